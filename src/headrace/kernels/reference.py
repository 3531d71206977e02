"""The reference backend: runs a program with the definition itself. Slow on purpose, always there."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.arith import ops
from headrace.kernels import program as p
from headrace.kernels.layout import TileView, tile_record, unpack

Int = NDArray[np.int64]


class ReferenceBackend:
    """NumPy int64, one thread."""

    name = "reference"

    def compile(self, program: p.Program, *, capacity: int, logit_capacity: int) -> ReferenceRunner:
        return ReferenceRunner(program, capacity, logit_capacity)


class ReferenceRunner:
    """Interprets one program; see `program.Runner`."""

    def __init__(self, program: p.Program, capacity: int, logit_capacity: int) -> None:
        shape = program.shape
        self.capacity = capacity
        self._program = program
        self._shape = shape
        self._weights: dict[int, ops.Weight] = {}
        self._sites = dict.fromkeys(p.SITES, 0)
        widths = (shape.hidden, shape.qkv_size, shape.q_size, 2 * shape.ffn_rows)
        self._buffers = [np.zeros((capacity, w), np.int64) for w in widths]
        self._buffers.append(np.zeros((logit_capacity, shape.vocab), np.int64))
        self._active: list[ops.Block] = []
        self._rows = 0

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> None:
        if begin == 0:
            self._rows = len(batch.tokens)
        for op in self._program.ops[begin:end]:
            self._step(op, batch, cache)

    def logits(self, rows: int) -> NDArray[np.int32]:
        return self._buffers[p.Buffer.LOGITS][:rows].astype(np.int32)

    def saturations(self) -> Mapping[str, int]:
        return dict(self._sites)

    def close(self) -> None:
        self._weights.clear()

    def _step(self, op: p.Op, batch: p.Batch, cache: NDArray[np.uint8]) -> None:
        match op:
            case p.Embed(weight):
                self._embed(self._unpacked(weight), batch)
            case p.Norm(gain):
                self._active = [self._norm(row, gain) for row in self._rows_of(p.Buffer.X)]
            case p.Project():
                self._project(op)
            case p.HeadNorm(gain, first, count):
                self._head_norm(gain, first, count)
            case p.Land(layer):
                self._land(layer, batch, cache)
            case p.Attend(layer):
                self._attend(layer, batch, cache)
            case p.Quantize():
                rows = self._rows_of(p.Buffer.MIXED)
                self._active = [ops.quantize(r, -self._shape.fraction_bits) for r in rows]
            case p.SiluMul():
                self._active = [self._silu(r) for r in self._rows_of(p.Buffer.GATE_UP)]
            case p.Select():
                rows = self._buffers[p.Buffer.X][batch.logit_rows]
                self._rows = len(rows)
                self._buffers[p.Buffer.X][: self._rows] = rows

    def _rows_of(self, buffer: p.Buffer) -> Int:
        return self._buffers[buffer][: self._rows]

    def _unpacked(self, weight: p.PackedWeight) -> ops.Weight:
        if id(weight) not in self._weights:
            self._weights[id(weight)] = unpack(weight)
        return self._weights[id(weight)]

    def _count(self, site: str, result: ops.Saturated) -> Int:
        self._sites[site] += result.clipped
        return result.values

    def _embed(self, weight: ops.Weight, batch: p.Batch) -> None:
        f = self._shape.fraction_bits
        for row, token in enumerate(batch.tokens):
            value = ops.embed(weight, int(token), f)
            self._buffers[p.Buffer.X][row] = self._count("embed", value)

    def _norm(self, row: Int, gain: p.Gain) -> ops.Block:
        values, exponent = self._rms(row, gain)
        return ops.quantize(values, exponent)

    def _rms(self, row: Int, gain: p.Gain) -> tuple[Int, int]:
        wide = gain.values.astype(np.int64)
        return ops.rms_norm(row, wide, gain.exponent, gain.eps, self._shape.fraction_bits)

    def _project(self, op: p.Project) -> None:
        weight = self._unpacked(op.weight)
        target = self._buffers[op.target]
        bias = None if op.bias is None else op.bias.astype(np.int64)
        for row, x in enumerate(self._active):
            held = target[row] if op.residual else None
            out = ops.project(x, weight, self._shape.fraction_bits, bias, held)
            target[row, : op.weight.n] = self._count("residual" if op.residual else "project", out)

    def _head_norm(self, gain: p.Gain, first: int, count: int) -> None:
        d = self._shape.head_dim
        for row in self._rows_of(p.Buffer.QKV):
            for head in row.reshape(-1, d)[first : first + count]:
                scaled = ops.rescale(*self._rms(head, gain), self._shape.fraction_bits)
                head[:] = self._count("head_norm", scaled)

    def _land(self, layer: int, batch: p.Batch, cache: NDArray[np.uint8]) -> None:
        s = self._shape
        for row, x in enumerate(self._rows_of(p.Buffer.QKV)):
            position = int(batch.positions[row])
            heads = x.reshape(-1, s.head_dim)
            turn = ops.rotary(self._program.rope_low, self._program.rope_high, position)
            for h in range(s.num_heads + s.num_kv_heads):
                site = "rope_q" if h < s.num_heads else "rope_k"
                heads[h] = self._count(site, ops.rope(heads[h], *turn))
            for h in range(s.num_kv_heads):
                key, value = (
                    ops.quantize(heads[s.num_heads + i * s.num_kv_heads + h], -s.fraction_bits)
                    for i in range(2)
                )
                tile = self._tile(batch, row, layer, h, position, cache)
                tile.write(position % 16, key, value)

    def _tile(
        self,
        batch: p.Batch,
        row: int,
        layer: int,
        head: int,
        position: int,
        cache: NDArray[np.uint8],
    ) -> TileView:
        pages = batch.page_tables[int(batch.sequences[row])]
        page, tile = int(pages[position // p.PAGE_TOKENS]), position % p.PAGE_TOKENS // 16
        return TileView(
            tile_record(cache, self._shape, page, layer, head, tile), self._shape.head_dim
        )

    def _attend(self, layer: int, batch: p.Batch, cache: NDArray[np.uint8]) -> None:
        s = self._shape
        shared = s.num_heads // s.num_kv_heads
        for row, x in enumerate(self._rows_of(p.Buffer.QKV)):
            visible = int(batch.positions[row]) + 1
            out = self._buffers[p.Buffer.MIXED][row].reshape(-1, s.head_dim)
            for kv in range(s.num_kv_heads):
                tiles = [
                    self._tile(batch, row, layer, kv, at, cache) for at in range(0, visible, 16)
                ]
                keys = _join([t.keys() for t in tiles], visible)
                values = _join([t.values() for t in tiles], visible)
                for h in range(kv * shared, (kv + 1) * shared):
                    q = x.reshape(-1, s.head_dim)[h]
                    out[h] = self._count("attention", ops.attend(q, keys, values, s.fraction_bits))

    def _silu(self, row: Int) -> ops.Block:
        s = self._shape
        gate = _fit(row[: s.ffn_rows], s.ffn_width)
        up = _fit(row[s.ffn_rows :], s.ffn_width)
        product = ops.silu_mul(gate, up, self._program.sigmoid, s.fraction_bits)
        return ops.quantize(product, -2 * s.fraction_bits)


def _join(parts: list[ops.Keys], count: int) -> ops.Keys:
    fields = zip(*parts, strict=True)
    return ops.Keys(*(np.concatenate(f)[:count] for f in fields))


def _fit(x: Int, width: int) -> Int:
    """Zero-pad to the width of whole activation blocks."""
    return np.pad(x, (0, width - len(x)))
