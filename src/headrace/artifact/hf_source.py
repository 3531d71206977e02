"""A Hugging Face or MLX directory as a source: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.blocks import floats
from headrace.artifact.container import MAX_TEMPLATE_BYTES
from headrace.artifact.hf_config import read_config
from headrace.artifact.jsontext import read_bytes, read_object
from headrace.artifact.manifest import TokenizerInfo
from headrace.artifact.naming import HF_FAMILIES, HUGGING_FACE, MTP
from headrace.artifact.packing import AffineRows
from headrace.artifact.parts import Index, Layout, Part, float_part
from headrace.artifact.sources import Consumed, ConvertOptions, Source
from headrace.artifact.tensorfile import StoredTensor, forget_pages, mappings, read_tensors
from headrace.errors import FileError, UnsupportedError

_FLOATS = ("F32", "F16", "BF16")
_TEXTS = (".json", ".jinja")
MAX_TOKENIZER_BYTES = 64 << 20

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")


def open_hugging_face(path: Path) -> Source:
    config_path = path / "config.json"
    raw = read_object(config_path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        known = ", ".join(sorted(HF_FAMILIES))
        raise UnsupportedError(f"{path}: model_type {model_type!r:.60} is not supported: {known}")
    shards = _shards(path)
    quantization = raw.get("quantization") or raw.get("quantization_config")
    tensors = HFTensors(path, _load(path, shards), quantization)
    config = read_config(config_path, model_type, Consumed(raw))
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
        files=tuple(sorted([*(path / name for name in shards), *_files(path, _TEXTS)])),
        unread=tuple(f.name for f in _files(path, {".safetensors"}) if f.name not in shards),
        head=_head(path, shards, quantization),
    )


def _head(path: Path, shards: Collection[str], quantization: object) -> HFTensors | None:
    """The tensors of a head that drafts; None where there is none that can be read. It changes no answer."""
    file = path / MTP.file
    if MTP.file in shards or not file.is_file():
        return None
    try:
        return HFTensors(file, read_tensors(file), quantization)
    except FileError as error:
        warnings.warn(f"the draft head is left out: {error}", RuntimeWarning, stacklevel=2)
        return None


def _files(path: Path, suffixes: Collection[str]) -> list[Path]:
    return sorted(f for f in path.iterdir() if f.suffix in suffixes and f.is_file())


def _shards(path: Path) -> dict[str, set[str] | None]:
    """The checkpoint's files, and the tensors of each that an index names; None without an index."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return {"model.safetensors": None}
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FileError(index, "weight_map", "is missing or empty")
    out: dict[str, set[str] | None] = {}
    for name in sorted({str(v) for v in weight_map.values()}):
        if _SHARD.fullmatch(name) is None:
            raise FileError(index, "weight_map", f"{name!r:.80} is not a plain file name")
        out[name] = {key for key, file in weight_map.items() if file == name}
    return out


def _load(path: Path, shards: Mapping[str, set[str] | None]) -> dict[str, StoredTensor]:
    out: dict[str, StoredTensor] = {}
    for name, named in shards.items():
        tensors = read_tensors(path / name)
        for key in sorted(tensors.keys() ^ (tensors.keys() if named is None else named)):
            cause = (
                "is not where the index says"
                if key in tensors
                else "is not in the file that the index names"
            )
            raise FileError(path / name, f"tensor {key!r:.80}", cause)
        out |= tensors
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
        bits = options.bits_of(name, HUGGING_FACE)
        stored = self._get(f"{name}.weight")
        if stored.data.ndim != 2:
            raise self._fail(f"{name}.weight", f"shape {list(stored.data.shape)} is not [n, k]")
        return self._part(f"{name}.weight", bits, options.group)

    def stack(self, full_name: str, count: int, options: ConvertOptions) -> list[Part]:
        shape = list(self._get(full_name).data.shape)
        if len(shape) != 3 or shape[0] != count:
            raise self._fail(full_name, f"shape {shape} is not [{count}, n, k]")
        return [self._part(full_name, options.bits, options.group, e) for e in range(count)]

    def matrix(self, full_name: str) -> NDArray[np.float64]:
        stored = self._get(full_name)
        if stored.data.ndim == 2 and self._is_affine(full_name):
            part = self._affine(full_name, None)
            return part.read(np.arange(part.n)).values()
        if stored.data.ndim > 2 or stored.dtype not in _FLOATS:
            raise self._fail(full_name, "is not a matrix of floats")
        return self._finite(full_name, np.atleast_2d(floats(stored.dtype, stored.data)))

    def vector(self, full_name: str) -> NDArray[np.float64]:
        stored = self._get(full_name)
        if stored.data.ndim != 1 or stored.dtype not in _FLOATS:
            raise self._fail(full_name, "is not a vector of floats")
        return self._finite(full_name, floats(stored.dtype, stored.data))

    def _is_affine(self, full_name: str) -> bool:
        return f"{full_name.removesuffix('.weight')}.scales" in self._stored

    def _part(self, full_name: str, bits: int, group: int, expert: int | None = None) -> Part:
        """A matrix, or one of a stack."""
        if self._is_affine(full_name):
            return self._affine(full_name, expert)
        stored = self._get(full_name)
        if stored.dtype not in _FLOATS:
            raise self._fail(full_name, f"{stored.dtype} is not one of {', '.join(_FLOATS)}")
        data = stored.data if expert is None else stored.data[expert]

        def values(index: Index) -> NDArray[np.float64]:
            return self._finite(full_name, floats(stored.dtype, data[index]))

        n, k = data.shape
        return float_part(full_name, n, k, bits, group, values)

    def _affine(self, full_name: str, expert: int | None) -> Part:
        name = full_name.removesuffix(".weight")
        stored, scales, biases = (
            self._get(n) for n in (full_name, f"{name}.scales", f"{name}.biases")
        )
        bits, group = self._setting(name)
        *outer, n, words = stored.data.shape
        k = words * 32 // bits
        wanted = (*outer, n, k // group)
        if (
            stored.dtype != "U32"
            or scales.data.shape != wanted
            or biases.data.shape != wanted
            or k % group
        ):
            raise self._fail(full_name, f"does not fit {bits} bits in groups of {group}")
        if scales.dtype not in _FLOATS or biases.dtype not in _FLOATS:
            raise self._fail(f"{name}.scales", "are not floats")
        kept = min(group, 64)
        data, scale, bias = (
            t.data if expert is None else t.data[expert] for t in (stored, scales, biases)
        )

        def rows(index: Index) -> AffineRows:
            raw = np.ascontiguousarray(data[index]).view(np.uint8)
            codes = (
                raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(index), k)
            )
            s, b = (
                np.repeat(self._finite(name, floats(dtype, a[index])), group // kept, 1)
                for dtype, a in ((scales.dtype, scale), (biases.dtype, bias))
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
