"""Converts a PEFT folder into an adapter's artifact for one base: deterministic, all or nothing.

`a` is scaled by a power of two so that no vector can make its inner values clip (R16), and `b` by the inverse; `b`'s
row mantissas and exponents also carry alpha / rank.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import BLOCK, CODE_MAX, INT32_MAX, SUM_SHIFT, TILE, dot_shift
from headrace.artifact.adapter import (
    WEIGHTS_NAME,
    AdaptedModule,
    Adapter,
    AdapterManifest,
    open_adapter,
    pair_shapes,
)
from headrace.artifact.adapter_places import Place, place
from headrace.artifact.check import MAX_EXPONENT, MIN_EXPONENT, read_config, weight_arrays
from headrace.artifact.container import Artifact, building, file_sha256
from headrace.artifact.manifest import MANIFEST_NAME
from headrace.artifact.packing import PackedRows, pack, quantize_rows
from headrace.artifact.peft import PeftAdapter, PeftPair, read_peft, values
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.errors import AdapterShapeError, FileError
from headrace.models.config import DecoderConfig

MOST_SCALE = 16513  # of a block of a vector (R2)


def convert_adapter(source: Path, target: Path, base: Artifact) -> Adapter:
    """Convert the PEFT folder `source` into the artifact `target` for `base`.

    The same source gives the same bytes on every machine. What stood at `target` is replaced only by a complete
    artifact. Raises FileError, UnsupportedError, AdapterShapeError, DiskFullError.
    """
    peft = read_peft(source)
    config = read_config(base.path, base.manifest)
    places = {_name(pair): _place(peft, config, pair) for pair in peft.pairs}
    targets = {
        _name(p): AdaptedModule(p.rank, repr(float(p.alpha)), repr(p.scale)) for p in peft.pairs
    }
    specs = [
        TensorSpec(key, dtype, shape)
        for name, at in places.items()
        for weight, entry in pair_shapes(name, targets[name], at).items()
        for key, (dtype, shape) in weight_arrays(weight, entry).items()
    ]
    specs.sort(key=lambda s: s.nbytes % 64 != 0)  # so that arrays of whole lines stay aligned
    with building(target, sum(s.nbytes for s in specs) + (1 << 20), WEIGHTS_NAME) as work:
        with (work / WEIGHTS_NAME).open("wb") as file:
            writer = TensorFileWriter(file, specs)
            for pair in peft.pairs:
                _write(writer, peft, pair, places[_name(pair)])
        digests = [file_sha256(file) for file in peft.files]
        digest = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        manifest = AdapterManifest(
            base=base.identity,
            targets=targets,
            source={"kind": "peft", "sha256": digest},
            nbytes=(work / WEIGHTS_NAME).stat().st_size,
            sha256=file_sha256(work / WEIGHTS_NAME),
        )
        (work / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        open_adapter(work, base)
    return open_adapter(target, base)


def _name(pair: PeftPair) -> str:
    return f"layers.{pair.layer}.{pair.module}"


def _place(peft: PeftAdapter, config: DecoderConfig, pair: PeftPair) -> Place:
    """Where a pair lies in the base, whose shapes it has."""
    file = peft.files[1]
    if pair.layer >= config.num_layers:
        cause = f"is of layer {pair.layer}, the base has {config.num_layers}"
        raise AdapterShapeError(file, f"tensor {pair.a_name!r:.120}", cause)
    at = place(config, pair.layer, pair.module)
    if at is None:
        cause = "is of an ordinary MLP, and the base has experts in that layer"
        raise AdapterShapeError(file, f"tensor {pair.a_name!r:.120}", cause)
    wanted = (
        (pair.a_name, pair.a, [pair.rank, at.columns]),
        (pair.b_name, pair.b, [at.n, pair.rank]),
    )
    for name, tensor, shape in wanted:
        if list(tensor.data.shape) != shape:
            cause = f"is {list(tensor.data.shape)}, the base needs {shape}"
            raise AdapterShapeError(file, f"tensor {name!r:.120}", cause)
    return at


def _write(writer: TensorFileWriter, peft: PeftAdapter, pair: PeftPair, at: Place) -> None:
    file, name = peft.files[1], _name(pair)
    rank = -(-pair.rank // BLOCK) * BLOCK
    a = np.zeros((rank, at.k))
    a[: pair.rank, : at.columns] = values(file, pair.a_name, pair.a)
    b = np.zeros((at.n, rank))
    b[:, : pair.rank] = values(file, pair.b_name, pair.b)
    down = pack(quantize_rows(a, 8, BLOCK))
    rows = quantize_rows(b, 8, BLOCK)
    up = pack(replace(rows, scales=rows.scales * pair.scale))
    places = room(down)
    for side, packed, shift in (("a", down, places), ("b", up, -places)):
        row = packed.row.copy()
        row[1, row[0] != 0] += shift
        if row[1].min() < MIN_EXPONENT or row[1].max() > MAX_EXPONENT:
            which = pair.a_name if side == "a" else pair.b_name
            raise FileError(
                file, f"tensor {which!r:.120}", "holds values that are too large or too small"
            )
        writer.write(f"{name}.{side}.codes", packed.codes)
        writer.write(f"{name}.{side}.scales", packed.scales)
        writer.write(f"{name}.{side}.row", row)


def room(a: PackedRows) -> int:
    """How many places the rows of `a` may be shifted up so that no vector makes an inner value clip (R16)."""
    sums = _largest_sums(a)
    blocks = a.codes.shape[1]
    unit = SUM_SHIFT + 2 + 4 + dot_shift(blocks)
    mantissa, exponent = a.row[0].astype(np.int64), a.row[1].astype(np.int64)
    bits = [
        int(s * m).bit_length() + int(e)
        for s, m, e in zip(sums, mantissa, exponent, strict=True)
        if s * m
    ]
    return INT32_MAX.bit_length() - 1 - unit - max(bits) if bits else 0


def _largest_sums(a: PackedRows) -> NDArray[np.int64]:
    """The largest |accumulator| of R3 that any vector gives each row, [16 T]; below 2^31."""
    tiles, blocks = a.codes.shape[:2]
    centred = np.abs(a.codes.astype(np.int64) - 128).sum(axis=(2, 4))  # [T, B, 16]
    most = (centred * CODE_MAX + 8) >> 4
    scale = (np.abs(a.scales.astype(np.int64)) * MOST_SCALE + (1 << 14)) >> 15
    by_block = ((most * scale) >> dot_shift(blocks)) + 1
    out: NDArray[np.int64] = by_block.sum(axis=1).reshape(tiles * TILE)
    return out
