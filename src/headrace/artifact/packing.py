"""Affine groups of rows into kernel order (docs/artifact.md). Deterministic NumPy float64 and integers.

Only +, -, *, /, rint, frexp and ldexp are used on floats: IEEE 754 defines them bit for bit, so the
same source gives the same bytes on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import BLOCK, GAIN_BITS, SUPERGROUP, TILE

Float = NDArray[np.float64]

MAX_SCALE = 32767
MAX_MIN_SHIFT = 14


@dataclass(frozen=True, eq=False)
class AffineRows:
    """Rows [n, k] as value = scale * code + minimum, by group of `group` elements.

    scales, mins float64 [n, k / group]; codes u8 [n, k], 0..15 or 0..255 by `bits`. mins None means
    symmetric: minimum = -centre * scale with centre 8 or 128.
    """

    scales: Float
    codes: NDArray[np.uint8]
    mins: Float | None
    bits: int
    group: int

    @property
    def centre(self) -> int:
        return 8 if self.bits == 4 else 128

    def values(self) -> Float:
        """What the rows stand for, float64 [n, k]."""
        mins = -self.centre * self.scales if self.mins is None else self.mins
        wide = np.repeat(self.scales, self.group, 1) * self.codes
        return wide + np.repeat(mins, self.group, 1)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Whole tiles in kernel order: codes u8, scales i16, mins i16 or None, row i32[3, 16 T]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.int16]
    mins: NDArray[np.int16] | None
    row: NDArray[np.int32]


def widen(rows: AffineRows, bits: int, with_mins: bool) -> AffineRows:
    """The same values with 8-bit codes or explicit minimums; exact."""
    codes, mins, scales = rows.codes, rows.mins, rows.scales
    if with_mins and mins is None:
        mins = -rows.centre * scales
    if bits > rows.bits:
        codes = codes + np.uint8(120)  # 8 -> 128: the centred code stays
        mins = None if mins is None else mins - 120 * scales
    return AffineRows(scales, codes, mins, bits, rows.group)


def regroup(rows: AffineRows, group: int) -> AffineRows:
    """The same values with smaller groups; exact."""
    times = rows.group // group
    mins = None if rows.mins is None else np.repeat(rows.mins, times, 1)
    return AffineRows(np.repeat(rows.scales, times, 1), rows.codes, mins, rows.bits, group)


def quantize_rows(values: Float, bits: int, group: int) -> AffineRows:
    """Floats [n, k] to affine groups: 8 bits symmetric, 4 bits between minimum and maximum."""
    grouped = values.reshape(len(values), -1, group)
    if bits == 8:
        scales = np.abs(grouped).max(2) / 127
        offset, mins = 128.0, None
        codes = np.rint(grouped / _safe(scales)[..., None]) + offset
    else:
        low, high = grouped.min(2), grouped.max(2)
        scales, mins = (high - low) / 15, low
        codes = np.rint((grouped - low[..., None]) / _safe(scales)[..., None])
    flat = codes.astype(np.uint8).reshape(values.shape)
    return AffineRows(scales, flat, mins, bits, group)


def _safe(scales: Float) -> Float:
    return np.where(scales == 0, 1.0, scales)


def pack(rows: AffineRows) -> PackedRows:
    """Kernel order of rows; n is padded with zero rows to whole tiles."""
    peak = np.abs(rows.scales).max(axis=1)
    centred = None
    if rows.mins is not None:
        centred = rows.mins + rows.centre * rows.scales
        # A minimum reaches 2^14 times further than a scale, and no further.
        peak = np.maximum(peak, np.ldexp(np.abs(centred).max(axis=1), -MAX_MIN_SHIFT))
    mantissa, exponent = _row_scale(peak)
    unit = np.ldexp(_safe(mantissa.astype(np.float64)), exponent)[:, None]
    scales = np.rint(rows.scales / unit).astype(np.int64)
    mins, shift = None, np.zeros(len(scales), np.int64)
    if centred is not None:
        mins, shift = _shifted_mins(centred / unit)
    return _arrange(rows, scales, mins, np.stack([mantissa, exponent, shift]))


def _row_scale(peak: Float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """peak / 32767 as mantissa (15 bits) * 2^exponent, rounded up; 0 stays 0."""
    fraction, exponent = np.frexp(peak / MAX_SCALE)
    mantissa = np.ceil(np.ldexp(fraction, 15)).astype(np.int64)
    places = exponent.astype(np.int64) - 15
    over = mantissa == 1 << 15
    mantissa[over] >>= 1
    places[over] += 1
    places[mantissa == 0] = 0
    return mantissa, places


def _shifted_mins(centred: Float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Minimums in units of the row, each row shifted as little as fits 16 bits."""
    peak = np.abs(centred).max(axis=1)
    shift = np.zeros(len(centred), np.int64)
    for _ in range(MAX_MIN_SHIFT):
        shift += np.rint(np.ldexp(peak, -shift)) > MAX_SCALE
    return np.rint(np.ldexp(centred, -shift[:, None])).astype(np.int64), shift


def _arrange(
    rows: AffineRows,
    scales: NDArray[np.int64],
    mins: NDArray[np.int64] | None,
    row: NDArray[np.int64],
) -> PackedRows:
    n, k = rows.codes.shape
    tiles, blocks, groups = -(-n // TILE), k // BLOCK, scales.shape[1]

    def padded(a: NDArray[Any]) -> NDArray[Any]:
        return np.pad(a, ((0, tiles * TILE - n), (0, 0)))

    codes = padded(rows.codes).reshape(tiles, TILE, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
    if rows.bits == 4:
        codes = codes[:, :, :4] | (codes[:, :, 4:] << np.uint8(4))
    packed_mins = None
    if mins is not None:
        supers = -(-groups // SUPERGROUP)
        wide = np.pad(padded(mins), ((0, 0), (0, supers * SUPERGROUP - groups)))
        order = wide.reshape(tiles, TILE, supers, SUPERGROUP).transpose(0, 2, 1, 3)
        packed_mins = np.ascontiguousarray(order.astype(np.int16))
    by_tile = padded(scales).reshape(tiles, TILE, groups).transpose(0, 2, 1)
    return PackedRows(
        np.ascontiguousarray(codes),
        np.ascontiguousarray(by_tile.astype(np.int16)),
        packed_mins,
        np.ascontiguousarray(padded(row.T).T.astype(np.int32)),
    )


def pack_gain(values: Float) -> tuple[NDArray[np.int32], int]:
    """A norm's gain as 24-bit signed mantissas and one exponent."""
    peak = float(np.abs(values).max())
    exponent = int(np.frexp(peak)[1]) - GAIN_BITS
    mantissas = np.rint(np.ldexp(values, -exponent)).astype(np.int64)
    if np.abs(mantissas).max() >= 1 << GAIN_BITS:
        exponent += 1
        mantissas = np.rint(np.ldexp(values, -exponent)).astype(np.int64)
    return mantissas.astype(np.int32), exponent


def pack_router(values: Float) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """A router's rows [E, K] as 16-bit codes and an exponent a row, the smallest that fits; a zero row has 0."""
    peak = np.abs(values).max(axis=1)
    exponent = np.frexp(peak)[1].astype(np.int64) - 15
    over = np.rint(np.ldexp(peak, -exponent)) > MAX_SCALE
    exponent = np.where(peak == 0, 0, exponent + over)
    codes = np.rint(np.ldexp(values, -exponent[:, None]))
    return codes.astype(np.int16), exponent.astype(np.int32)


def pack_bias(values: Float, fraction_bits: int) -> NDArray[np.int32]:
    """A bias in fixed point. Raises OverflowError when it does not fit."""
    fixed = np.rint(np.ldexp(values, fraction_bits))
    if np.abs(fixed).max() > 2**31 - 1:
        raise OverflowError(f"a bias of {np.abs(values).max():g} does not fit {fraction_bits} bits")
    return fixed.astype(np.int32)
