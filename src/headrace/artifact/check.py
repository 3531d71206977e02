"""What an artifact must hold for its configuration: every tensor's name, shape, type and value bounds.

The bounds are those that docs/arithmetic.md derives from, so no file can make an accumulator overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers
from headrace.arith.numbers import BLOCK, SUPERGROUP, TILE
from headrace.artifact.manifest import MANIFEST_NAME, Manifest
from headrace.artifact.tensorfile import forget_pages, mappings
from headrace.errors import FileError, InputError
from headrace.models.config import DecoderConfig, padded_rows, padded_width
from headrace.models.families import family

Tensors = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors dtype, shape)

MIN_EXPONENT, MAX_EXPONENT, MAX_SHIFT = -256, 128, 14
_NUMPY = {"U8": np.uint8, "I16": np.int16, "I32": np.int32}


def check_tensors(
    path: Path, manifest: Manifest, tensors: Tensors, *, release: bool = False
) -> None:
    """Refuse an artifact whose tensors are not exactly those of its configuration. Raises FileError.

    release: give back the memory of mapped pages as they are checked.
    """
    config = read_config(path, manifest)
    shapes, experts = dict(weight_shapes(config)), dict(expert_shapes(config))
    for name in sorted((shapes.keys() | experts.keys()) ^ manifest.tensors.keys()):
        cause = "is missing" if name in shapes | experts else "is not one of this family's"
        raise FileError(path, f"weight {name!r:.120}", cause)
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {
        name: (dtype, shape) for name, dtype, shape in array_shapes(config)
    }
    for name, shape in (shapes | experts).items():
        entry = manifest.tensors[name]
        if entry["shape"] != list(shape):
            raise FileError(path, f"weight {name!r}", f"is {entry['shape']}, not {list(shape)}")
        if name in shapes:
            arrays |= weight_arrays(name, entry)
    check_shapes(path, arrays, tensors)
    for name in tensors:
        check_values(path, name, tensors[name])
        if release:
            forget_pages(mappings([tensors[name]]))


def read_config(path: Path, manifest: Manifest) -> DecoderConfig:
    """The configuration of a manifest, checked against its family. Raises FileError."""
    try:
        config = DecoderConfig.from_json(manifest.config)
        family(manifest.family).check(config)
    except InputError as error:
        raise FileError(path / MANIFEST_NAME, "config", error.message) from None
    special = [*manifest.tokenizer.end, manifest.tokenizer.bos or 0]
    if max(special) >= config.vocab_size:
        raise FileError(path / MANIFEST_NAME, "tokenizer", f"{max(special)} is no token")
    return config


def weight_shapes(c: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and [n, k] of every packed weight of the dense files."""
    yield "embed", (c.vocab_size, c.hidden_size)
    if not c.tied:
        yield "head", (c.vocab_size, c.hidden_size)
    yield from _layer_weights(c)


def _layer_weights(c: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    for i in range(c.num_layers):
        yield f"layers.{i}.qkv", (c.q_size + 2 * c.kv_size, c.hidden_size)
        yield f"layers.{i}.out", (c.hidden_size, c.q_size)
        if not c.has_experts(i):
            yield from _mlp(f"layers.{i}", c.hidden_size, c.ffn_size)
        elif c.experts and c.experts.shared_ffn_size:
            yield from _mlp(f"layers.{i}.shared", c.hidden_size, c.experts.shared_ffn_size)


def expert_shapes(c: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and [n, k] of the packed weights of one expert of every layer that has some."""
    for i in range(c.num_layers):
        if c.experts and c.has_experts(i):
            yield from _mlp(f"layers.{i}.experts", c.hidden_size, c.experts.ffn_size)


def _mlp(name: str, hidden: int, ffn_size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield f"{name}.gate_up", (2 * padded_rows(ffn_size), hidden)
    yield f"{name}.down", (hidden, padded_width(ffn_size))


def array_shapes(c: DecoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of every other array."""
    half, rows = c.head_dim // 2, -(-c.context // numbers.ROPE_LOW)
    yield "rope.low", "I32", (numbers.ROPE_LOW, half, 2)
    yield "rope.high", "I32", (rows, half, 2)
    yield "table.sigmoid", "I32", (2 * numbers.SIGMOID_RANGE * numbers.SIGMOID_STEPS + 1,)
    yield from _layer_arrays(c)


def head_shapes(c: DecoderConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    """`weight_shapes` of a head that drafts, a decoder of one layer."""
    yield "fc.embed", (c.hidden_size, c.hidden_size)
    yield "fc.hidden", (c.hidden_size, c.hidden_size)
    yield from _layer_weights(c)


def head_array_shapes(c: DecoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """`array_shapes` of a head that drafts."""
    yield "identity", "U8", (32,)
    yield "ffn", "I32", (1,)
    yield from _gain("fc.embed_norm", c.hidden_size)
    yield from _gain("fc.hidden_norm", c.hidden_size)
    yield from _layer_arrays(c)


def _layer_arrays(c: DecoderConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield from _gain("norm", c.hidden_size)
    for i in range(c.num_layers):
        yield from _gain(f"layers.{i}.attention_norm", c.hidden_size)
        yield from _gain(f"layers.{i}.mlp_norm", c.hidden_size)
        if c.qkv_bias:
            yield f"layers.{i}.qkv.bias", "I32", (c.q_size + 2 * c.kv_size,)
        if c.qk_norm or c.qk_norm_whole:
            whole = c.qk_norm_whole
            yield from _gain(f"layers.{i}.q_norm", c.q_size if whole else c.head_dim)
            yield from _gain(f"layers.{i}.k_norm", c.kv_size if whole else c.head_dim)
        if c.experts and c.has_experts(i):
            count = c.experts.num_experts + (c.experts.shared_ffn_size > 0)
            yield f"layers.{i}.router.codes", "I16", (count, c.hidden_size)
            yield f"layers.{i}.router.exponents", "I32", (count,)


def _gain(name: str, size: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield f"{name}.gain", "I32", (size,)
    yield f"{name}.gain_exponent", "I32", (1,)


def weight_arrays(name: str, entry: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The stored arrays of a packed weight."""
    n, k = entry["shape"]
    tiles, blocks, groups = -(-n // TILE), k // BLOCK, k // entry["group"]
    bits = int(entry["format"][1])
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{name}.codes": ("U8", (tiles, blocks, bits, TILE, 4)),
        f"{name}.scales": ("I16", (tiles, groups, TILE)),
        f"{name}.row": ("I32", (3, tiles * TILE)),
    }
    if entry["format"].endswith("m"):
        out[f"{name}.mins"] = ("I16", (tiles, -(-groups // SUPERGROUP), TILE, SUPERGROUP))
    return out


def check_shapes(path: Path, expected: Shapes, tensors: Tensors) -> None:
    for name in sorted(expected.keys() ^ tensors.keys()):
        cause = "is missing" if name in expected else "is not described by the manifest"
        raise FileError(path, f"tensor {name!r:.120}", cause)
    for name, (dtype, shape) in expected.items():
        array = tensors[name]
        if array.dtype != _NUMPY[dtype] or array.shape != shape:
            raise FileError(
                path, f"tensor {name!r}", f"is {array.dtype}{array.shape}, not {dtype}{shape}"
            )


def check_values(path: Path, name: str, array: NDArray[Any]) -> None:
    """The ranges that the rules rely on. Raises FileError."""
    part = name.rpartition(".")[2]
    if part == "codes" and not name.endswith(".router.codes"):
        return  # any byte is a code
    if part == "row":
        mantissa, exponent, shift = array
        _within(path, name, "mantissa", mantissa, 0, (1 << 15) - 1)
        _within(path, name, "exponent", exponent, MIN_EXPONENT, MAX_EXPONENT)
        _within(path, name, "shift", shift, 0, MAX_SHIFT)
    elif part in _RANGES:
        _within(path, name, part, array, *_RANGES[part])


_RANGES = {
    "codes": (-32767, 32767),
    "exponents": (MIN_EXPONENT, MAX_EXPONENT),
    "scales": (-32767, 32767),
    "mins": (-32767, 32767),
    "gain": (-(1 << numbers.GAIN_BITS), 1 << numbers.GAIN_BITS),
    "gain_exponent": (MIN_EXPONENT, MAX_EXPONENT),
    "bias": (-numbers.INT32_MAX, numbers.INT32_MAX),
    "low": (-(1 << numbers.ROPE_BITS), 1 << numbers.ROPE_BITS),
    "high": (-(1 << numbers.ROPE_BITS), 1 << numbers.ROPE_BITS),
    "sigmoid": (0, 1 << numbers.SIGMOID_BITS),
}


def _within(path: Path, name: str, what: str, array: NDArray[Any], low: int, high: int) -> None:
    least, most = int(array.min()), int(array.max())
    if least < low or most > high:
        worst = least if least < low else most
        raise FileError(
            path, f"tensor {name!r}", f"{what} {worst} is not between {low:,} and {high:,}"
        )
