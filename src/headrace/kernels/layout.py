"""Between kernel order and logical order: what the reference reads and tests compare.

Kernel order is described in docs/artifact.md (weights) and src/native/ops.h (KV tiles).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.ops import Block, Keys, Weight
from headrace.kernels.program import (
    PAGE_TILES,
    ExpertLayout,
    FieldSpan,
    ModelShape,
    PackedWeight,
    WeightSpans,
)

TILE = 16


def unpack(packed: PackedWeight) -> Weight:
    """The logical weight of a packed one."""
    tiles, blocks = packed.codes.shape[:2]
    rows = tiles * TILE
    raw = packed.codes
    if packed.bits == 4:
        raw = np.concatenate([raw & 15, raw >> 4], axis=2)
    codes = raw.transpose(0, 3, 1, 2, 4).reshape(rows, blocks * 32).astype(np.int64)
    scales = packed.scales.transpose(0, 2, 1).reshape(rows, -1)
    mins = None
    if packed.mins is not None:
        wide = packed.mins.transpose(0, 2, 1, 3).reshape(rows, -1)
        mins = wide[: packed.n, : scales.shape[1]].astype(np.int64)
    mantissa, exponent, min_shift = packed.row[:, : packed.n].astype(np.int64)
    centre = 8 if packed.bits == 4 else 128
    return Weight(
        codes[: packed.n] - centre,
        scales[: packed.n].astype(np.int64),
        mins,
        mantissa,
        exponent,
        min_shift,
        packed.bits,
        packed.group,
    )


def field_view(record: NDArray[np.uint8], span: FieldSpan) -> NDArray[Any]:
    """A field of an expert's record u8[nbytes] as its own array."""
    kind = np.dtype(span.dtype)
    size = math.prod(span.shape) * kind.itemsize
    return record[span.offset : span.offset + size].view(kind).reshape(span.shape)


def unpack_expert(record: NDArray[np.uint8], layout: ExpertLayout) -> tuple[Weight, Weight]:
    """The logical gate_up and down weights of one expert's record."""
    return _unpack_spans(record, layout.gate_up), _unpack_spans(record, layout.down)


def _unpack_spans(record: NDArray[np.uint8], spans: WeightSpans) -> Weight:
    fields = {name: field_view(record, span) for name, span in spans.fields.items()}
    fields.setdefault("mins", None)  # type: ignore[arg-type]
    return unpack(PackedWeight(**fields, n=spans.n, k=spans.k, bits=spans.bits, group=spans.group))


class TileView:
    """The fields of one KV tile record as writable arrays over its bytes."""

    def __init__(self, record: NDArray[np.uint8], head_dim: int) -> None:
        size, blocks = TILE * head_dim, head_dim // 32
        self.k_codes = record[:size].view(np.int8).reshape(head_dim // 4, TILE, 4)
        self.v_codes = record[size : 2 * size].view(np.int8).reshape(4, head_dim, 4)
        words = record[2 * size :].view(np.int16)
        self.k_scales = words[: blocks * TILE].reshape(blocks, TILE)
        self.v_scales = words[blocks * TILE : 2 * blocks * TILE].reshape(blocks, TILE)
        self.k_exponent, self.v_exponent = words[2 * blocks * TILE :].reshape(2, TILE)

    def write(self, slot: int, key: Block, value: Block) -> None:
        self.k_codes[:, slot, :] = key.codes.reshape(-1, 4)
        self.v_codes[slot // 4, :, slot % 4] = value.codes
        self.k_scales[:, slot], self.v_scales[:, slot] = key.scales, value.scales
        self.k_exponent[slot], self.v_exponent[slot] = key.exponent, value.exponent

    def keys(self) -> Keys:
        codes = self.k_codes.transpose(1, 0, 2).reshape(TILE, -1)
        return _wide(codes, self.k_scales.T, self.k_exponent)

    def values(self) -> Keys:
        codes = self.v_codes.transpose(0, 2, 1).reshape(TILE, -1)
        return _wide(codes, self.v_scales.T, self.v_exponent)


def _wide(*fields: NDArray[np.generic]) -> Keys:
    return Keys(*(f.astype(np.int64) for f in fields))


def tile_record(
    cache: NDArray[np.uint8], shape: ModelShape, page: int, layer: int, head: int, tile: int
) -> NDArray[np.uint8]:
    """The bytes of one tile: cache u8[pages, page_bytes]."""
    index = (layer * shape.num_kv_heads + head) * PAGE_TILES + tile
    return cache[page, index * shape.tile_bytes : (index + 1) * shape.tile_bytes]


def page_positions(shape: ModelShape) -> NDArray[np.uint8]:
    """Which of a page's 64 positions each of its bytes belongs to, u8[page_bytes]."""
    head_dim, blocks = shape.head_dim, shape.head_dim // 32
    slots = np.arange(TILE, dtype=np.uint8)
    keys = np.broadcast_to(slots[None, :, None], (head_dim // 4, TILE, 4))
    values = np.broadcast_to(slots.reshape(4, 1, 4), (4, head_dim, 4))
    words = np.broadcast_to(slots[None, :, None], (2 * blocks + 2, TILE, 2))
    tile = np.concatenate([part.ravel() for part in (keys, values, words)])
    page = np.concatenate([tile + TILE * i for i in range(PAGE_TILES)])
    return np.tile(page, shape.num_layers * shape.num_kv_heads).astype(np.uint8)
