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
from headrace.models.config import DenseConfig
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
    config = _config(path, architecture, metadata, file)
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise FileError(path, "tokenizer.chat_template", "is not text")
    return Source(
        path=path,
        kind="gguf",
        family=GGUF_FAMILIES[architecture],
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


def _config(path: Path, arch: str, metadata: Consumed, file: GGUFFile) -> DenseConfig:
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
    config = DenseConfig(
        vocab_size=natural(path, metadata, key("vocab_size"), len(tokens)),
        hidden_size=hidden,
        num_layers=natural(path, metadata, key("block_count")),
        num_heads=heads,
        num_kv_heads=natural(path, metadata, key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        ffn_size=natural(path, metadata, key("feed_forward_length")),
        context=context,
        norm_eps=number_text(path, metadata, key("eps")),
        rope_theta=number_text(path, metadata, key("rope.freq_base"), 10000.0),
        tied="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        rope_factors=_rope_factors(path, file, head_dim),
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
    if metadata.get(f"{arch}.expert_count", 0):
        raise UnsupportedError(f"{path}: mixture-of-experts models are not supported yet")
    metadata.get(f"{arch}.expert_used_count")


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
            raise FileError(
                self._file.path, f"tensor {tensor.name!r}", f"shape {tensor.shape} is not [n, k]"
            )
        n, k = tensor.shape
        if tensor.type_code in FLOAT_TYPES:
            kind = FLOAT_TYPES[tensor.type_code]

            def values(index: Index) -> NDArray[np.float64]:
                return self._finite(tensor.name, floats(kind, tensor.data[index]))

            return float_part(name, n, k, options.bits_of(name, GGUF), options.group, values)
        block = BLOCK_FORMATS[tensor.type_code]

        def rows(index: Index) -> AffineRows:
            out = block.decode(tensor.data[index])
            self._finite(tensor.name, out.scales)
            if out.mins is not None:
                self._finite(tensor.name, out.mins)
            return out

        return Part(name, n, k, k, Layout(block.bits, block.mins, 32), rows)

    def vector(self, full_name: str) -> NDArray[np.float64]:
        tensor = self._tensor(full_name)
        if tensor.type_code not in FLOAT_TYPES or len(tensor.shape) != 1:
            raise FileError(self._file.path, f"tensor {full_name!r}", "is not a vector of floats")
        return self._finite(full_name, floats(FLOAT_TYPES[tensor.type_code], tensor.data))

    def _tensor(self, full_name: str) -> GGUFTensor:
        if full_name not in self._file.tensors:
            raise FileError(self._file.path, f"tensor {full_name!r}", "is missing")
        return self._file.tensors[full_name]

    def _finite(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not np.isfinite(values).all():
            raise FileError(self._file.path, f"tensor {name!r}", "holds a value that is not finite")
        return values
