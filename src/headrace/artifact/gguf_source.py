"""A GGUF file as a source: its metadata is the configuration and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.blocks import BLOCK_FORMATS, FLOAT_TYPES, floats
from headrace.artifact.gguf import GGUFFile, GGUFTensor, read_gguf
from headrace.artifact.manifest import TokenizerInfo
from headrace.artifact.naming import GGUF, GGUF_FAMILIES, GGUF_HARMLESS, GGUF_INTERLEAVED
from headrace.artifact.packing import AffineRows
from headrace.artifact.parts import Index, Layout, Part, float_part
from headrace.artifact.sources import Consumed, ConvertOptions, Source, natural, number_text
from headrace.artifact.tensorfile import forget_pages, mappings
from headrace.errors import FileError, UnsupportedError
from headrace.models.config import DecoderConfig, ExpertsConfig
from headrace.models.families import Family, family
from headrace.text.gguf_vocab import build_tokenizer_json, special_ids

ROPE_FACTORS = "rope_freqs.weight"
MAX_TOKENS = 1 << 20


def open_gguf(path: Path) -> Source:
    file = read_gguf(path)
    metadata = Consumed(file.metadata)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        known = ", ".join(sorted(GGUF_FAMILIES))
        raise UnsupportedError(
            f"{path}: architecture {architecture!r:.60} is not supported: {known}"
        )
    name = GGUF_FAMILIES[architecture]
    if architecture == "llama" and metadata.get("llama.expert_count", 0):
        name = "mixtral"
    config = _config(path, architecture, family(name), metadata, file)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise FileError(path, "tokenizer.chat_template", "is not text")
    return Source(
        path=path,
        kind="gguf",
        family=name,
        config=config,
        names=GGUF,
        tensors=GGUFTensors(file),
        interleaved=architecture in GGUF_INTERLEAVED,
        tokenizer_json=build_tokenizer_json(file.metadata, path).encode(),
        template=template,
        tokenizer=_special(path, file.metadata),
        files=file.parts,
        extra_names=frozenset({ROPE_FACTORS} & set(file.tensors)),
    )


def _special(path: Path, metadata: Mapping[str, Any]) -> TokenizerInfo:
    ids = special_ids(metadata, path)
    return TokenizerInfo(ids.bos, ids.add_bos, ids.eos)


def _config(
    path: Path, arch: str, traits: Family, metadata: Consumed, file: GGUFFile
) -> DecoderConfig:
    def key(name: str) -> str:
        return f"{arch}.{name}"

    heads = natural(path, metadata, key("attention.head_count"))
    hidden = natural(path, metadata, key("embedding_length"))
    head_dim = natural(path, metadata, key("attention.key_length"), max(1, hidden // heads))
    context = natural(path, metadata, key("context_length"))
    _refuse_variants(path, arch, metadata, head_dim, context)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= MAX_TOKENS:
        raise FileError(path, "tokenizer.ggml.tokens", "is missing, empty or too long")
    eps = metadata.get(key("attention.layer_norm_rms_epsilon"))
    metadata[key("eps")] = float(str(np.float32(eps))) if isinstance(eps, float) else eps
    ffn_size = natural(path, metadata, key("feed_forward_length"))
    experts = _experts(path, arch, traits, metadata, ffn_size)
    config = DecoderConfig(
        vocab_size=natural(path, metadata, key("vocab_size"), len(tokens)),
        hidden_size=hidden,
        num_layers=natural(path, metadata, key("block_count")),
        num_heads=heads,
        num_kv_heads=natural(path, metadata, key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        ffn_size=experts.ffn_size if experts else ffn_size,
        context=context,
        norm_eps=number_text(path, metadata, key("eps")),
        rope_theta=number_text(path, metadata, key("rope.freq_base"), 10000.0),
        tied="output.weight" not in file.tensors,
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
        rope_factors=_rope_factors(path, file, head_dim),
        qk_norm_whole=traits.qk_norm_whole,
        experts=experts,
    )
    unasked = [k for k in metadata.unasked() if not k.startswith(GGUF_HARMLESS)]
    if unasked:
        raise UnsupportedError(
            f"{path}: key {unasked[0]!r} is not understood: a variant of {arch}?"
        )
    return config


def _refuse_variants(
    path: Path, arch: str, metadata: Consumed, head_dim: int, context: int
) -> None:
    same = {"rope.dimension_count": head_dim, "attention.value_length": head_dim}
    for name, wanted in same.items():
        value = metadata.get(f"{arch}.{name}", wanted)
        if value != wanted:
            raise UnsupportedError(
                f"{path}: {arch}.{name} = {value!r:.60} is not supported: {wanted}"
            )
    window = metadata.get(f"{arch}.attention.sliding_window", 0)
    if window and (type(window) is not int or window < context):
        raise UnsupportedError(f"{path}: a sliding window of {window!r:.60} is not supported")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    for name in ("factor", "original_context_length", "finetuned"):
        metadata.get(f"{arch}.rope.scaling.{name}")
    if scaling != "none":
        raise UnsupportedError(f"{path}: rope scaling {scaling!r:.60} is not supported")


# What llama.cpp computes for these architectures, whatever a key says: a key that says otherwise is refused.
_NORMALISED = {"llama": True, "qwen2moe": False, "qwen3moe": True, "olmoe": False}
_SOFTMAX = 1


def _experts(
    path: Path, arch: str, traits: Family, metadata: Consumed, ffn_size: int
) -> ExpertsConfig | None:
    """The experts of every layer: no architecture mixes them with ordinary layers."""
    if not traits.experts:
        for name in ("expert_count", "expert_used_count"):
            if metadata.get(f"{arch}.{name}", 0):
                raise UnsupportedError(f"{path}: {arch}.{name}: {arch} has no experts")
        return None
    normalise = _NORMALISED[arch]
    plain: dict[str, tuple[object, ...]] = {
        "expert_weights_norm": (normalise, None),
        "expert_weights_scale": (1.0, 0.0, None),
        "expert_gating_func": (_SOFTMAX, None),
        "expert_shared_count": (None, 0, *([1] if traits.shared_expert else [])),
    }
    for name, accepted in plain.items():
        value = metadata.get(f"{arch}.{name}")
        if value not in accepted:
            raise UnsupportedError(f"{path}: {arch}.{name} = {value!r:.60} is not supported")
    size, shared = ffn_size, 0
    if arch != "llama" and arch != "olmoe":
        size = natural(path, metadata, f"{arch}.expert_feed_forward_length")
    if traits.shared_expert:
        shared = natural(path, metadata, f"{arch}.expert_shared_feed_forward_length", ffn_size)
    return ExpertsConfig(
        num_experts=natural(path, metadata, f"{arch}.expert_count"),
        top_k=natural(path, metadata, f"{arch}.expert_used_count"),
        ffn_size=size,
        normalise=normalise,
        shared_ffn_size=shared,
    )


def _rope_factors(path: Path, file: GGUFFile, head_dim: int) -> tuple[str, ...] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if FLOAT_TYPES.get(tensor.type_code) != "F32" or tensor.shape != (head_dim // 2,):
        raise FileError(path, f"tensor {ROPE_FACTORS!r}", f"is not F32[{head_dim // 2}]")
    if not (np.isfinite(tensor.data).all() and (tensor.data > 0).all()):
        raise FileError(path, f"tensor {ROPE_FACTORS!r}", "holds a factor that is not positive")
    return tuple(str(v) for v in tensor.data)


class GGUFTensors:
    """See `sources.Tensors`."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._maps = mappings(t.data for t in file.tensors.values())

    def forget(self) -> None:
        forget_pages(self._maps)

    def names(self) -> set[str]:
        return set(self._file.tensors)

    def part(self, name: str, options: ConvertOptions) -> Part:
        tensor = self._tensor(f"{name}.weight")
        if len(tensor.shape) != 2:
            raise self._fail(tensor.name, f"shape {list(tensor.shape)} is not [n, k]")
        return self._part(tensor, tensor.data, options.bits_of(name, GGUF), options.group)

    def stack(self, full_name: str, count: int, options: ConvertOptions) -> list[Part]:
        tensor = self._tensor(full_name)
        if len(tensor.shape) != 3 or tensor.shape[0] != count:
            raise self._fail(full_name, f"shape {list(tensor.shape)} is not [{count}, n, k]")
        n = tensor.shape[1]
        data = tensor.data.reshape(
            count, n, *tensor.data.shape[-2 if self._is_packed(tensor) else -1 :]
        )
        return [self._part(tensor, one, options.bits, options.group) for one in data]

    def matrix(self, full_name: str) -> NDArray[np.float64]:
        tensor = self._tensor(full_name)
        if len(tensor.shape) > 2:
            raise self._fail(full_name, f"shape {list(tensor.shape)} is not [n, k]")
        if self._is_packed(tensor):
            part = self._part(tensor, tensor.data, 8, 32)
            return part.read(np.arange(part.n)).values()
        return np.atleast_2d(
            self._finite(full_name, floats(FLOAT_TYPES[tensor.type_code], tensor.data))
        )

    def _is_packed(self, tensor: GGUFTensor) -> bool:
        return tensor.type_code not in FLOAT_TYPES

    def _part(self, tensor: GGUFTensor, data: NDArray[Any], bits: int, group: int) -> Part:
        """A matrix, or one of a stack: floats [n, k] or blocks u8 [n, blocks, bytes]."""
        n, k = len(data), tensor.shape[-1]
        if not self._is_packed(tensor):
            kind = FLOAT_TYPES[tensor.type_code]

            def values(index: Index) -> NDArray[np.float64]:
                return self._finite(tensor.name, floats(kind, data[index]))

            return float_part(tensor.name, n, k, bits, group, values)
        block = BLOCK_FORMATS[tensor.type_code]

        def rows(index: Index) -> AffineRows:
            out = block.decode(data[index])
            self._finite(tensor.name, out.scales)
            if out.mins is not None:
                self._finite(tensor.name, out.mins)
            return out

        return Part(tensor.name, n, k, k, Layout(block.bits, block.mins, 32), rows)

    def vector(self, full_name: str) -> NDArray[np.float64]:
        tensor = self._tensor(full_name)
        if tensor.type_code not in FLOAT_TYPES or len(tensor.shape) != 1:
            raise FileError(self._file.path, f"tensor {full_name!r}", "is not a vector of floats")
        return self._finite(full_name, floats(FLOAT_TYPES[tensor.type_code], tensor.data))

    def _tensor(self, full_name: str) -> GGUFTensor:
        if full_name not in self._file.tensors:
            raise FileError(self._file.path, f"tensor {full_name!r}", "is missing")
        return self._file.tensors[full_name]

    def _fail(self, name: str, cause: str) -> FileError:
        return FileError(self._file.path, f"tensor {name!r}", cause)

    def _finite(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not np.isfinite(values).all():
            raise FileError(self._file.path, f"tensor {name!r}", "holds a value that is not finite")
        return values
