"""The reference backend: runs a program with the definition itself. Slow on purpose, always there."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers, ops, sampling
from headrace.errors import ExpertReadError
from headrace.kernels import program as p
from headrace.kernels.adapters import checked_pairs
from headrace.kernels.layout import TileView, tile_record, unpack, unpack_expert
from headrace.kernels.parallel_for import check_hook, run_tasks, split_rows
from headrace.kernels.workspace import ALIGNMENT, check_memory, check_rows

Int = NDArray[np.int64]


class ReferenceBackend:
    """NumPy int64, one thread."""

    name = "reference"

    def workspace_bytes(
        self, shape: p.ModelShape, *, max_positions: int, capacity: int, logit_capacity: int
    ) -> int:
        return sum(_nbytes(*sizes) for sizes in _buffer_sizes(shape, capacity, logit_capacity))

    def compile(
        self,
        program: p.Program,
        *,
        capacity: int,
        logit_capacity: int,
        memory: NDArray[np.uint8] | None = None,
    ) -> ReferenceRunner:
        nbytes = self.workspace_bytes(
            program.shape, max_positions=0, capacity=capacity, logit_capacity=logit_capacity
        )
        if memory is None:
            memory = np.zeros(nbytes, np.uint8)
        else:
            check_memory(memory, nbytes)
        return ReferenceRunner(program, capacity, logit_capacity, memory)

    def draw(self, logits: sampling.Logits, how: sampling.Draw, word: int) -> int:
        return sampling.draw(logits, how, word)


class ReferenceRunner:
    """Interprets one program; see `program.Runner`."""

    def __init__(
        self,
        program: p.Program,
        capacity: int,
        logit_capacity: int,
        memory: NDArray[np.uint8],
    ) -> None:
        shape = program.shape
        self.capacity = capacity
        self._program = program
        self._shape = shape
        self._weights: dict[int, ops.Weight] = {}
        self._buffers: list[Int] = []  # views into memory
        at = 0
        for sizes in _buffer_sizes(shape, capacity, logit_capacity):
            rows, width = sizes
            view = memory[at : at + 8 * rows * width].view(np.int64).reshape(sizes)
            view[:] = 0
            self._buffers.append(view)
            at += _nbytes(*sizes)
        self._hook: p.ParallelFor | None = None
        self._busy = False  # with a run that has a hook
        self._broken = False  # the pass ended where a hook failed
        self._active: list[ops.Block] = []
        self._rows = 0
        self._clips = np.zeros((0, len(p.SITES)), np.int64)  # of each row of the pass, by site
        self._clips_before = np.zeros(len(p.SITES), np.int64)  # of the passes before
        self._origins: list[int] = []  # which row of the batch a row is
        self._slots: p.ExpertSlots | None = None
        self._chosen = np.zeros((0, shape.top_k), np.int64)
        self._shares = np.zeros((0, shape.top_k), np.int64)
        self._gates = np.zeros((0, 1), np.int64)
        self._lookahead = self._watched = False
        self._uses = 0
        self._guessed = np.zeros((0, shape.top_k), np.int64)
        self._guessed_layer = -1
        self._foretold = np.zeros(2, np.int64)  # choices, and those guessed rightly
        self._outputs: dict[tuple[int, int], Int] = {}  # of (row, expert)
        self._adapters: dict[int, p.Pairs] = {}

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> int:
        self._require_idle()
        if begin == 0:
            self._begin_pass(len(batch.tokens))
        if len(batch.tokens) != len(self._clips):
            raise ValueError("the batch has not as many rows as the pass")
        if self._broken:
            raise ValueError("the pass has ended where its hook failed")
        self._busy = self._hook is not None
        before = self._clips.copy()
        try:
            return self._walk(begin, end, batch, cache)
        except _HookFailed as failed:
            self._clips, self._broken = before, True
            raise failed.error from failed.error.__cause__
        finally:
            self._busy = False

    def _walk(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> int:
        for index in range(begin, end):
            op = self._program.ops[index]
            self._step(op, batch, cache)
            if isinstance(op, p.Route) and self._lacks_slots(op):
                return index + 1
        return end

    def load_adapter(self, pairs: p.Pairs) -> int:
        checked_pairs(self._program, pairs)
        number = next(i for i in range(len(self._adapters) + 1) if i not in self._adapters)
        self._adapters[number] = pairs
        return number

    def unload_adapter(self, number: int) -> None:
        for pair in (pair for site in self._adapters.pop(number).values() for pair in site):
            self._weights.pop(id(pair.a), None)
            self._weights.pop(id(pair.b), None)

    def _begin_pass(self, rows: int) -> None:
        self._require_idle()
        self._rows = rows
        self._broken = False
        self._clips_before += self._clips.sum(axis=0)
        self._clips = np.zeros((rows, len(p.SITES)), np.int64)
        self._origins = list(range(rows))
        self._guessed_layer = -1

    def _require_idle(self) -> None:
        if self._busy:
            raise ValueError("the runner is at work")

    def bind_slots(self, slots: p.ExpertSlots) -> None:
        self._slots = slots

    def routes(self) -> NDArray[np.int32]:
        return self._chosen.astype(np.int32)

    def set_lookahead(self, on: bool) -> None:
        self._lookahead = on

    def set_watched(self, on: bool) -> None:
        self._watched = on

    def expert_uses(self) -> int:
        return self._uses

    def foretold(self) -> tuple[int, int]:
        choices, right = self._foretold.tolist()
        return choices, right

    def seconds_waited(self) -> float:
        return 0  # it never waits

    def forecast(self) -> NDArray[np.int32]:
        return self._guessed.astype(np.int32)

    def run_experts(
        self, index: int, experts: NDArray[np.int32], slots: NDArray[np.int32], last: bool
    ) -> None:
        op = self._program.ops[index]
        assert isinstance(op, p.Experts)
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            self._run_expert(op, expert, slot)
        if last:
            self._mix()

    def logits(self, rows: int) -> NDArray[np.int32]:
        return self._buffers[p.Buffer.LOGITS][:rows].astype(np.int32)

    def residual(self, rows: int) -> NDArray[np.int32]:
        return self._buffers[p.Buffer.X][:rows].astype(np.int32)

    def put(self, rows: NDArray[np.int32]) -> None:
        check_rows(rows, self._shape.hidden, self.capacity)
        self._begin_pass(len(rows))
        self._buffers[p.Buffer.X][: len(rows)] = rows

    def set_parallel_for(self, hook: p.ParallelFor | None) -> None:
        check_hook(hook, threads=1)
        self._require_idle()
        self._hook = hook

    def saturations(self) -> Mapping[str, int]:
        counts = self._clips_before + self._clips.sum(axis=0)
        return dict(zip(p.SITES, counts.tolist(), strict=True))

    def row_saturations(self) -> NDArray[np.int64]:
        return self._clips.copy()

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
            case p.Adapt():
                self._adapt(op, batch)
            case p.HeadNorm():
                self._head_norm(op)
            case p.Land(layer):
                self._land(layer, batch, cache)
            case p.Attend(layer):
                self._attend(layer, batch, cache)
            case p.Quantize():
                rows = self._rows_of(p.Buffer.MIXED)
                self._active = [ops.quantize(r, -self._shape.fraction_bits) for r in rows]
            case p.SiluMul(rows):
                self._active = [self._silu(r, rows) for r in self._rows_of(p.Buffer.GATE_UP)]
            case p.Route():
                self._route(op)
            case p.Experts(layer):
                chosen = np.unique(self._chosen).astype(np.int32)
                for expert in chosen.tolist():
                    self._run_expert(op, expert, int(self._bound().table[layer, expert]))
                self._mix()
            case p.AddShared():
                self._add_shared()
            case p.Select():
                rows = self._buffers[p.Buffer.X][batch.logit_rows]
                self._rows = len(rows)
                self._origins = [self._origins[row] for row in batch.logit_rows.tolist()]
                self._buffers[p.Buffer.X][: self._rows] = rows

    def _rows_of(self, buffer: p.Buffer) -> Int:
        return self._buffers[buffer][: self._rows]

    def _unpacked(self, weight: p.PackedWeight) -> ops.Weight:
        if id(weight) not in self._weights:
            self._weights[id(weight)] = unpack(weight)
        return self._weights[id(weight)]

    def _count(self, site: str, row: int, result: ops.Saturated) -> Int:
        self._clips[self._origins[row], p.SITES.index(site)] += result.clipped
        return result.values

    def _embed(self, weight: ops.Weight, batch: p.Batch) -> None:
        f = self._shape.fraction_bits
        for row, token in enumerate(batch.tokens):
            value = ops.embed(weight, int(token), f)
            self._buffers[p.Buffer.X][row] = self._count("embed", row, value)

    def _norm(self, row: Int, gain: p.Gain) -> ops.Block:
        values, exponent = self._rms(row, gain)
        return ops.quantize(values, exponent)

    def _rms(self, row: Int, gain: p.Gain) -> tuple[Int, int]:
        wide = gain.values.astype(np.int64)
        return ops.rms_norm(row, wide, gain.exponent, gain.eps, self._shape.fraction_bits)

    def _project(self, op: p.Project) -> None:
        hook = self._hook
        if hook is None or not (op.target == p.Buffer.LOGITS or (hook.matvec and self._rows == 1)):
            return self._project_rows(op, 0, op.weight.n)
        blocks = split_rows(op.weight, hook.max_tasks)
        if len(blocks) == 1 or not self._active:
            return self._project_rows(op, 0, op.weight.n)
        try:
            run_tasks(hook, len(blocks), lambda i: self._project_rows(op, *blocks[i]))
        except BaseException as error:
            raise _HookFailed(error) from None

    def _project_rows(self, op: p.Project, first: int, last: int) -> None:
        """Rows [first, last) of the weight against all vectors."""
        weight = _cut(self._unpacked(op.weight), first, last)
        target = self._buffers[op.target][:, first:last]
        bias = None if op.bias is None else op.bias[first:last].astype(np.int64)
        for row, x in enumerate(self._active):
            held = target[row] if op.residual else None
            out = ops.project(x, weight, self._shape.fraction_bits, bias, held)
            site = "residual" if op.residual else "project"
            target[row] = self._count(site, row, out)

    def _adapt(self, op: p.Adapt, batch: p.Batch) -> None:
        if batch.adapters is None:
            return
        f, target = self._shape.fraction_bits, self._buffers[op.target]
        for row, x in enumerate(self._active):
            number = int(batch.adapters[batch.sequences[row]])
            pairs = self._adapters[number].get((op.layer, op.name), ()) if number >= 0 else ()
            for pair in pairs:
                part = target[row, pair.offset : pair.offset + pair.b.n]
                weights = self._unpacked(pair.a), self._unpacked(pair.b)
                part[:] = self._count("adapter", row, ops.adapt(x, *weights, f, part))

    def _head_norm(self, op: p.HeadNorm) -> None:
        start, size = op.first_head * self._shape.head_dim, op.width * self._shape.head_dim
        for row, x in enumerate(self._rows_of(p.Buffer.QKV)):
            for part in x[start : start + op.count * size].reshape(op.count, size):
                scaled = ops.rescale(*self._rms(part, op.gain), self._shape.fraction_bits)
                part[:] = self._count("head_norm", row, scaled)

    def _land(self, layer: int, batch: p.Batch, cache: NDArray[np.uint8]) -> None:
        s = self._shape
        for row, x in enumerate(self._rows_of(p.Buffer.QKV)):
            position = int(batch.positions[row])
            heads = x.reshape(-1, s.head_dim)
            turn = ops.rotary(self._program.rope_low, self._program.rope_high, position)
            for h in range(s.num_heads + s.num_kv_heads):
                site = "rope_q" if h < s.num_heads else "rope_k"
                heads[h] = self._count(site, row, ops.rope(heads[h], *turn))
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
                    mixed = ops.attend(q, keys, values, s.fraction_bits)
                    out[h] = self._count("attention", row, mixed)

    def _silu(self, row: Int, rows: int) -> ops.Block:
        f = self._shape.fraction_bits
        gate, up = _fit(row[:rows]), _fit(row[rows : 2 * rows])
        return ops.quantize(ops.silu_mul(gate, up, self._program.sigmoid, f), -2 * f)

    def _bound(self) -> p.ExpertSlots:
        assert self._slots is not None, "bind_slots comes first"
        return self._slots

    def _lacks_slots(self, op: p.Route) -> bool:
        table = self._bound().table
        lacking = self._watched or bool((table[op.layer, self._chosen] < 0).any())
        guessed = op.ahead is not None and bool((table[op.ahead.layer, self._guessed] < 0).any())
        return lacking or guessed

    def _route(self, op: p.Route) -> None:
        f, chosen, gates = self._shape.fraction_bits, [], []
        for row, x in enumerate(self._rows_of(p.Buffer.X)):
            logits = self._count("router", row, self._router_logits(x, op.gain, op.router))
            gates.append(logits[self._shape.num_experts :])
            logits = logits[: self._shape.num_experts]
            chosen.append(ops.choose_experts(logits, op.top_k, op.normalise, f))
        self._chosen = np.array([ids for ids, _ in chosen]).reshape(-1, op.top_k)
        self._shares = np.array([shares for _, shares in chosen]).reshape(-1, op.top_k)
        self._gates = np.array(gates).reshape(len(chosen), -1)
        if op.layer == self._guessed_layer:
            right = [
                np.isin(*pair).sum() for pair in zip(self._chosen, self._guessed, strict=False)
            ]
            self._foretold += len(right) * op.top_k, sum(right)
        self._guess(op)

    def _router_logits(self, row: Int, gain: p.Gain, router: p.Router) -> ops.Saturated:
        values, exponent = self._rms(row, gain)
        codes, exponents = router.codes.astype(np.int64), router.exponents.astype(np.int64)
        return ops.route_logits(values, exponent, codes, exponents, self._shape.fraction_bits)

    def _guess(self, op: p.Route) -> None:
        rows, f = self._rows_of(p.Buffer.X), self._shape.fraction_bits
        guesses = []
        if self._lookahead and op.ahead is not None and len(rows) <= p.FORECAST_ROWS:
            for row in rows:
                logits = self._router_logits(row, op.ahead.gain, op.ahead.router).values
                logits = logits[: self._shape.num_experts]
                guesses.append(ops.choose_experts(logits, op.top_k, True, f)[0])
        self._guessed = np.array(guesses, np.int64).reshape(-1, op.top_k)
        self._guessed_layer = -1 if op.ahead is None else op.ahead.layer

    def _run_expert(self, op: p.Experts, expert: int, slot: int) -> None:
        slots, f = self._bound(), self._shape.fraction_bits
        while slots.state[slot] == p.READING:
            os.sched_yield()
        if slots.state[slot] != p.READY:
            raise ExpertReadError(op.layer, expert)
        slots.used[slot] += slots.used[slot] < 255
        self._uses += 1
        gate_up, down = unpack_expert(slots.memory[slot], op.layout)
        for row in np.flatnonzero((self._chosen == expert).any(axis=1)).tolist():
            wide = self._count("project", row, ops.project(self._active[row], gate_up, f))
            inner = self._silu(wide, self._shape.expert_rows)
            out = ops.project(inner, down, f - numbers.EXPERT_HEADROOM)
            self._outputs[row, expert] = self._count("project", row, out)

    def _mix(self) -> None:
        rows = self._rows_of(p.Buffer.X)
        for row, (chosen, shares) in enumerate(zip(self._chosen, self._shares, strict=True)):
            outputs = np.stack([self._outputs[row, int(e)] for e in chosen])
            mixed = ops.mix_experts(rows[row], outputs, shares)
            rows[row] = self._count("experts", row, mixed)
        self._outputs.clear()

    def _add_shared(self) -> None:
        f, table = self._shape.fraction_bits, self._program.sigmoid
        rows, shared = self._rows_of(p.Buffer.X), self._rows_of(p.Buffer.SHARED)
        for row, (x, output, gate) in enumerate(zip(rows, shared, self._gates, strict=True)):
            x[:] = self._count("shared", row, ops.add_shared(x, output, gate, table, f))


class _HookFailed(Exception):
    """Carries what a hook raised past the operations."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _buffer_sizes(s: p.ModelShape, capacity: int, logit_capacity: int) -> list[tuple[int, int]]:
    """Rows and width of each `program.Buffer`."""
    widths = (s.hidden, s.qkv_size, s.q_size, 2 * s.ffn_rows, s.vocab, s.hidden)
    rows = [capacity] * len(widths)
    rows[p.Buffer.LOGITS] = logit_capacity
    return list(zip(rows, widths, strict=True))


def _nbytes(rows: int, width: int) -> int:
    """Of int64, in whole alignments."""
    return -(-8 * rows * width // ALIGNMENT) * ALIGNMENT


def _cut(w: ops.Weight, first: int, last: int) -> ops.Weight:
    """Rows [first, last)."""
    rows = slice(first, last)
    mins = None if w.mins is None else w.mins[rows]
    parameters = (w.mantissa[rows], w.exponent[rows], w.min_shift[rows])
    return ops.Weight(w.codes[rows], w.scales[rows], mins, *parameters, w.bits, w.group)


def _join(parts: list[ops.Keys], count: int) -> ops.Keys:
    fields = zip(*parts, strict=True)
    return ops.Keys(*(np.concatenate(f)[:count] for f in fields))


def _fit(x: Int) -> Int:
    """Zero-pad to whole activation blocks."""
    return np.pad(x, (0, -len(x) % numbers.BLOCK))
