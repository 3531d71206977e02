"""Inputs for operations: painted by formula, random, and at the limits of every format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith import ops
from headrace.artifact.packing import AffineRows, PackedRows, pack
from headrace.kernels.program import PackedWeight

Int = NDArray[np.int64]


def painted(count: int, low: int, high: int, start: int = 0) -> Int:
    """Integers in [low, high] by formula: period 251, so that a swapped block shows."""
    index = np.arange(start, start + count, dtype=np.int64)
    return low + (index * index * 7 + index * 13 + 5) % 251 * (high - low) // 250


def weight(
    n: int, k: int, bits: int, group: int, mins: bool, fill: str = "painted", seed: int = 0
) -> PackedWeight:
    """A packed weight made of codes and scales directly, so that every limit can be reached.

    fill: "painted", "random", "high" or "low" (all codes and scales at a limit), "zero".
    """
    rng = np.random.default_rng(seed)
    top = (1 << bits) - 1
    groups = k // group

    def draw(shape: tuple[int, int], low: int, high: int) -> Int:
        count = shape[0] * shape[1]
        if fill == "random":
            return rng.integers(low, high + 1, shape)
        if fill in ("high", "low", "zero"):
            value = {"high": high, "low": low, "zero": 0}[fill]
            return np.full(shape, value, np.int64)
        return painted(count, low, high, seed).reshape(shape)

    codes = draw((n, k), 0, top).astype(np.uint8)
    rows = AffineRows(
        np.ones((n, groups)), codes, np.zeros((n, groups)) if mins else None, bits, group
    )
    order = pack(rows)
    scales = draw((n, groups), -32767, 32767)
    minimums = draw((n, groups), -32767, 32767) if mins else None
    return _with(order, n, k, bits, group, scales, minimums, draw)


def _with(
    order: PackedRows,
    n: int,
    k: int,
    bits: int,
    group: int,
    scales: Int,
    mins: Int | None,
    draw: Any,
) -> PackedWeight:
    tiles = order.codes.shape[0]
    extra = ((0, tiles * 16 - n), (0, 0))
    by_tile = np.pad(scales, extra).reshape(tiles, 16, -1).transpose(0, 2, 1)
    packed_mins = None
    if mins is not None and order.mins is not None:
        wide = np.pad(mins, (extra[0], (0, order.mins.shape[1] * 4 - mins.shape[1])))
        packed_mins = wide.reshape(tiles, 16, -1, 4).transpose(0, 2, 1, 3)
    row = np.zeros((3, tiles * 16), np.int32)
    row[0, :n] = draw((n, 1), 1 << 14, (1 << 15) - 1)[:, 0]
    row[1, :n] = draw((n, 1), -60, -20)[:, 0]
    if mins is not None:
        row[2, :n] = draw((n, 1), 0, 14)[:, 0]
    return PackedWeight(
        codes=order.codes,
        scales=np.ascontiguousarray(by_tile.astype(np.int16)),
        mins=None if packed_mins is None else np.ascontiguousarray(packed_mins.astype(np.int16)),
        row=row,
        n=n,
        k=k,
        bits=bits,
        group=group,
    )


class Activation:
    """A block activation in the arrays that kernels read, and as the definition's `Block`s."""

    def __init__(self, blocks: list[ops.Block]) -> None:
        self.blocks = blocks
        self.codes = np.stack([b.codes for b in blocks]).astype(np.int8)
        self.scales = np.stack([b.scales for b in blocks]).astype(np.int16)
        self.sums = np.stack([b.sums() for b in blocks]).astype(np.int16)
        self.rounded = np.stack([ops.shift_round(b.scales * b.sums(), 13) for b in blocks]).astype(
            np.int16
        )
        self.exponent = np.array([b.exponent for b in blocks], np.int32)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.codes, self.scales, self.sums, self.rounded, self.exponent

    @staticmethod
    def blank(k: int) -> tuple[NDArray[Any], ...]:
        """Arrays for a kernel to fill with one vector; poisoned, so that an unwritten byte shows."""
        blocks = k // 32
        return (
            np.full(k, 85, np.int8), np.full(blocks, -7, np.int16), np.full(blocks, -7, np.int16),
            np.full(blocks, -7, np.int16), np.full(1, -7, np.int32),
        )  # fmt: skip


def activation(m: int, k: int, fill: str = "painted", seed: int = 0) -> Activation:
    """m vectors of width k: painted, random, at a limit, zero, or with one huge outlier."""
    rng = np.random.default_rng(seed + 1)
    blocks = []
    for row in range(m):
        scales, codes = np.full(k // 32, 16513, np.int64), np.full(k, 127, np.int64)
        if fill == "low":
            codes = -codes
        elif fill == "zero":
            scales, codes = np.zeros_like(scales), np.zeros_like(codes)
        elif fill == "random":
            scales, codes = rng.integers(0, 16514, k // 32), rng.integers(-127, 128, k)
        elif fill == "outlier":
            codes = painted(k, -1, 1, row)
            codes[row % k] = 127
        elif fill == "painted":
            scales, codes = painted(k // 32, 1, 16513, row), painted(k, -127, 127, row)
        blocks.append(ops.Block(codes, scales, int(painted(1, -30, 10, row)[0])))
    return Activation(blocks)
