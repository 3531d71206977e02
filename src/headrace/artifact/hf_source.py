"""A Hugging Face or MLX directory as a source: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.blocks import floats
from headrace.artifact.container import MAX_TEMPLATE_BYTES
from headrace.artifact.jsontext import read_bytes, read_object
from headrace.artifact.manifest import TokenizerInfo
from headrace.artifact.naming import HF_FAMILIES, HF_HARMLESS, HUGGING_FACE
from headrace.artifact.packing import AffineRows
from headrace.artifact.parts import Index, Layout, Part, float_part
from headrace.artifact.sources import Consumed, ConvertOptions, Source, natural, number_text
from headrace.artifact.tensorfile import StoredTensor, forget_pages, mappings, read_tensors
from headrace.errors import FileError, UnsupportedError
from headrace.models.config import DenseConfig, Llama3Scaling

_FLOATS = ("F32", "F16", "BF16")
_SUFFIXES = (".json", ".jinja", ".safetensors")
MAX_TOKENIZER_BYTES = 64 << 20

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")


def open_hugging_face(path: Path) -> Source:
    config_path = path / "config.json"
    raw = read_object(config_path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        known = ", ".join(sorted(HF_FAMILIES))
        raise UnsupportedError(f"{path}: model_type {model_type!r:.60} is not supported: {known}")
    tensors = HFTensors(
        path, _load(path), raw.get("quantization") or raw.get("quantization_config")
    )
    config = _config(config_path, model_type, Consumed(raw))
    return Source(
        path=path,
        kind="mlx" if tensors.quantization else "safetensors",
        family=HF_FAMILIES[model_type],
        config=config,
        names=HUGGING_FACE,
        tensors=tensors,
        interleaved=False,
        tokenizer_json=read_bytes(path / "tokenizer.json", MAX_TOKENIZER_BYTES),
        template=_template(path),
        tokenizer=_special(path, raw, config.vocab_size),
        files=tuple(sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES and f.is_file())),
    )


def _load(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint: one file, or those that the index names."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return read_tensors(path / "model.safetensors")
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(index, "weight_map", "is missing or empty")
    out: dict[str, StoredTensor] = {}
    for name in sorted({str(v) for v in weight_map.values()}):
        if _SHARD.fullmatch(name) is None:
            raise FileError(index, "weight_map", f"{name!r:.80} is not a plain file name")
        for key, tensor in read_tensors(path / name).items():
            if weight_map.get(key) != name:
                raise FileError(path / name, f"tensor {key!r:.80}", "is not where the index says")
            out[key] = tensor
    if len(out) != len(weight_map):
        raise FileError(index, "weight_map", "names a tensor that no file holds")
    return out


def _template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise FileError(file, "text", "is not valid UTF-8") from None
    template = _optional(path / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name: the default is the one for plain chats
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise FileError(path / "tokenizer_config.json", "chat_template", "is not text")
    return template


def _optional(path: Path) -> dict[str, Any]:
    """A JSON file that need not be there."""
    return read_object(path) if path.exists() else {}


def _special(path: Path, config: Mapping[str, Any], vocab_size: int) -> TokenizerInfo:
    chosen = _optional(path / "generation_config.json")
    end = chosen.get("eos_token_id", config.get("eos_token_id"))
    bos = config.get("bos_token_id")
    ids = [t for t in (end if isinstance(end, list) else [end]) if t is not None]
    for token in [*ids, *([] if bos is None else [bos])]:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise FileError(path, "bos_token_id or eos_token_id", f"{token!r:.60} is no token")
    add = _optional(path / "tokenizer_config.json").get("add_bos_token", False)
    return TokenizerInfo(bos, add is True, tuple(dict.fromkeys(ids)))


def _config(path: Path, model_type: str, data: Consumed) -> DenseConfig:
    heads, hidden = natural(path, data, "num_attention_heads"), natural(path, data, "hidden_size")
    # What is not said has another default in some families: there it must be said.
    implied = model_type != "qwen3" and data.get("head_dim") is None
    head_dim = hidden // heads if implied else natural(path, data, "head_dim")
    context = natural(path, data, "max_position_embeddings")
    _refuse_variants(path, model_type, data, context)
    rope = _rope(path, data)
    config = DenseConfig(
        vocab_size=natural(path, data, "vocab_size"),
        hidden_size=hidden,
        num_layers=natural(path, data, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=natural(
            path, data, "num_key_value_heads", heads if model_type == "llama" else None
        ),
        head_dim=head_dim,
        ffn_size=natural(path, data, "intermediate_size"),
        context=context,
        norm_eps=number_text(path, data, "rms_norm_eps", 1e-6),
        rope_theta=number_text(path, rope, "rope_theta", data.get("rope_theta", 10000.0)),
        tied=_flag(path, data, "tie_word_embeddings"),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        rope_scaling=_scaling(path, rope),
    )
    unasked = [k for k in data.unasked() if k not in HF_HARMLESS]
    if unasked:
        raise UnsupportedError(
            f"{path}: key {unasked[0]!r} is not understood: a variant of {model_type}?"
        )
    return config


def _flag(path: Path, data: Consumed, key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise FileError(path, f"key {key!r}", f"{value!r:.60} is not true or false")
    return value


def _refuse_variants(path: Path, model_type: str, data: Consumed, context: int) -> None:
    plain: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "attention_bias": (True, None) if model_type == "qwen2" else (False, None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1.0, None),
        "use_sliding_window": (False, None),
        "rope_interleaved": (False, None),
        "mlp_only_layers": ([], None),
        "is_encoder_decoder": (False, None),
        "add_cross_attention": (False, None),
        "auto_map": (None,),  # code of the checkpoint's own
    }
    for key, accepted in plain.items():
        value = data.get(key)
        if value not in accepted:
            raise UnsupportedError(f"{path}: {key} = {value!r:.60} is not supported")
    kinds = data.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedError(
            f"{path}: layer_types = {kinds!r:.60} is not supported: full_attention"
        )
    # A Mistral that does not say has a window of 4096.
    window = data.get("sliding_window", 4096 if model_type == "mistral" else None)
    if model_type != "mistral":  # use_sliding_window is off
        return
    if window is not None and (type(window) is not int or window < context):
        raise UnsupportedError(
            f"{path}: a sliding window of {window!r:.60} is not supported below the context, {context}"
        )


def _rope(path: Path, data: Consumed) -> Consumed:
    """rope_parameters (newer) or rope_scaling (older) as one mapping."""
    value = data.get("rope_parameters") or data.get("rope_scaling") or {}
    data.get("rope_scaling")
    if not isinstance(value, dict):
        raise FileError(path, "rope_scaling", "is not an object")
    return Consumed(value)


def _scaling(path: Path, rope: Consumed) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type")
    if kind == "default":
        scaling = None
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number_text(path, rope, "factor"),
            low_freq_factor=number_text(path, rope, "low_freq_factor"),
            high_freq_factor=number_text(path, rope, "high_freq_factor"),
            original_context=natural(path, rope, "original_max_position_embeddings"),
        )
    else:
        raise UnsupportedError(
            f"{path}: rope scaling {kind!r:.60} is not supported: default, llama3"
        )
    if rope.unasked():
        raise UnsupportedError(f"{path}: rope key {rope.unasked()[0]!r} is not understood")
    return scaling


class HFTensors:
    """See `sources.Tensors`. With `quantization`, weights may be MLX affine triples."""

    def __init__(
        self, path: Path, stored: Mapping[str, StoredTensor], quantization: object
    ) -> None:
        self._path = path
        self._stored = stored
        self._maps = mappings(t.data for t in stored.values())
        self.quantization = quantization if isinstance(quantization, dict) else None
        if self.quantization is not None and "quant_method" in self.quantization:
            method = self.quantization["quant_method"]
            raise UnsupportedError(
                f"{path}: quantisation method {method!r:.60} is not supported: MLX affine"
            )
        if self.quantization is not None and self.quantization.get("mode", "affine") != "affine":
            raise UnsupportedError(
                f"{path}: MLX mode {self.quantization['mode']!r:.60} is not supported: affine"
            )

    def forget(self) -> None:
        forget_pages(self._maps)

    def names(self) -> set[str]:
        quantized = {n[: -len(".scales")] for n in self._stored if n.endswith(".scales")}
        extra = {
            f"{n}.{part}"
            for n in quantized
            for part in ("scales", "biases")
            if f"{n}.weight" in self._stored
        }
        return set(self._stored) - extra

    def part(self, name: str, options: ConvertOptions) -> Part:
        stored = self._get(f"{name}.weight")
        if stored.data.ndim != 2:
            raise self._fail(f"{name}.weight", f"shape {list(stored.data.shape)} is not [n, k]")
        if f"{name}.scales" in self._stored:
            return self._affine(name, stored)
        if stored.dtype not in _FLOATS:
            raise self._fail(f"{name}.weight", f"{stored.dtype} is not one of {', '.join(_FLOATS)}")
        n, k = stored.data.shape

        def values(index: Index) -> NDArray[np.float64]:
            return self._finite(f"{name}.weight", floats(stored.dtype, stored.data[index]))

        return float_part(name, n, k, options.bits_of(name, HUGGING_FACE), options.group, values)

    def vector(self, full_name: str) -> NDArray[np.float64]:
        stored = self._get(full_name)
        if stored.data.ndim != 1 or stored.dtype not in _FLOATS:
            raise self._fail(full_name, "is not a vector of floats")
        return self._finite(full_name, floats(stored.dtype, stored.data))

    def _affine(self, name: str, stored: StoredTensor) -> Part:
        scales, biases = self._get(f"{name}.scales"), self._get(f"{name}.biases")
        bits, group = self._setting(name)
        n, words = stored.data.shape
        k = words * 32 // bits
        wanted = (n, k // group)
        if (
            stored.dtype != "U32"
            or scales.data.shape != wanted
            or biases.data.shape != wanted
            or k % group
        ):
            raise self._fail(f"{name}.weight", f"does not fit {bits} bits in groups of {group}")
        if scales.dtype not in _FLOATS or biases.dtype not in _FLOATS:
            raise self._fail(f"{name}.scales", "are not floats")
        kept = min(group, 64)

        def rows(index: Index) -> AffineRows:
            raw = np.ascontiguousarray(stored.data[index]).view(np.uint8)
            codes = (
                raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(index), k)
            )
            s, b = (
                np.repeat(self._finite(name, floats(t.dtype, t.data[index])), group // kept, 1)
                for t in (scales, biases)
            )
            return AffineRows(s, codes, b, bits, kept)

        return Part(name, n, k, k, Layout(bits, True, kept), rows)

    def _setting(self, name: str) -> tuple[int, int]:
        """Bits and group of one module: its own entry, or the checkpoint's."""
        base = self.quantization or {}
        own = base.get(name, {})
        merged = {**base, **own} if isinstance(own, dict) else base
        if merged.get("mode", "affine") != "affine":
            raise UnsupportedError(
                f"{self._path}: {name}: MLX mode {merged['mode']!r:.60}: affine is supported"
            )
        bits, group = merged.get("bits"), merged.get("group_size")
        if type(bits) is not int or bits not in (4, 8) or group not in (32, 64, 128):
            raise UnsupportedError(
                f"{self._path}: {name}: {bits!r:.20} bits in groups of {group!r:.20} are not supported:"
                " 4 or 8 in 32, 64 or 128"
            )
        return bits, group

    def _get(self, full_name: str) -> StoredTensor:
        if full_name not in self._stored:
            raise self._fail(full_name, "is missing")
        return self._stored[full_name]

    def _fail(self, name: str, cause: str) -> FileError:
        return FileError(self._path, f"tensor {name!r}", cause)

    def _finite(self, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not np.isfinite(values).all():
            raise self._fail(name, "holds a value that is not finite")
        return values
