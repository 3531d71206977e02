"""The native backend: hands a program to the C++ runner, which walks it without Python.

Can be imported only where the native module was built; `select` asks.

Knows the module `_native` and the arrays that it borrows; keeps them alive for as long as the runner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers
from headrace.arith.sampling import Draw, Logits
from headrace.errors import ExpertReadError, ParallelForError
from headrace.kernels import _native
from headrace.kernels import program as p
from headrace.kernels.adapters import checked_pairs
from headrace.kernels.parallel_for import check_hook, stale
from headrace.kernels.workspace import check_memory, check_rows

I16 = NDArray[np.int16]
I32 = NDArray[np.int32]
Hook = Callable[[int, _native.Task], None]

MAX_PAIRS = p.MAX_PAIRS  # of a runner that is made; any number gives the same results

_FIELDS = ("codes", "scales", "mins", "row")
_HIGH, _LOW = (np.array(table, np.int32) for table in numbers.exp2_tables())


class NativeBackend:
    """One instruction set of the native module."""

    def __init__(self, tier: str, threads: int) -> None:
        self.name = tier
        self.threads = threads

    def workspace_bytes(
        self, shape: p.ModelShape, *, max_positions: int, capacity: int, logit_capacity: int
    ) -> int:
        positions = -(-max_positions // numbers.ROPE_LOW) * numbers.ROPE_LOW
        sizes = (self.threads, _sizes(shape), positions, capacity, logit_capacity, MAX_PAIRS)
        return _native.workspace_bytes(*sizes)

    def compile(
        self,
        program: p.Program,
        *,
        capacity: int,
        logit_capacity: int,
        memory: NDArray[np.uint8] | None = None,
    ) -> NativeRunner:
        if memory is not None:
            positions = len(program.rope_high) * numbers.ROPE_LOW
            needed = self.workspace_bytes(
                program.shape,
                max_positions=positions,
                capacity=capacity,
                logit_capacity=logit_capacity,
            )
            check_memory(memory, needed)
        return NativeRunner(self, program, capacity, logit_capacity, memory)

    def draw(self, logits: Logits, how: Draw, word: int) -> int:
        parameters = (how.inverse_temperature, how.top_k, how.top_p, how.min_p, how.reach)
        facts = ((*parameters, how.fraction_bits), _HIGH, _LOW, word)
        if logits.dtype == np.int32:
            return _native.draw_i32(logits.astype(np.int32, copy=False), *facts)
        return _native.draw_i64(logits.astype(np.int64, copy=False), *facts)


class NativeRunner:
    """See `program.Runner`."""

    def __init__(
        self,
        backend: NativeBackend,
        program: p.Program,
        capacity: int,
        logit_capacity: int,
        memory: NDArray[np.uint8] | None,
    ) -> None:
        self.capacity = capacity
        self._program = program  # owns the arrays that the runner borrows
        self._memory = memory  # borrowed, too
        self._threads = backend.threads
        self._hook: Hook | None = None
        self._runner: _native.Runner | None = _native.Runner(
            backend.name,
            backend.threads,
            _sizes(program.shape),
            np.ascontiguousarray(program.rope_low),
            np.ascontiguousarray(program.rope_high),
            np.ascontiguousarray(program.sigmoid),
            _HIGH,
            _LOW,
            numbers.attention_scale(program.shape.head_dim),
            capacity,
            logit_capacity,
            MAX_PAIRS,
            memory,
        )
        self._slots: p.ExpertSlots | None = None
        self._adapters: dict[int, p.Pairs] = {}
        self._starts: list[int] = []  # of each operation among the runner's own, which are finer
        for op in program.ops:
            self._starts.append(self._runner.num_ops())
            self._add(op)
        self._starts.append(self._runner.num_ops())

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> int:
        stopped = self._open.run(
            self._starts[begin],
            self._starts[end],
            batch.tokens,
            batch.positions,
            batch.sequences,
            list(batch.page_tables),
            batch.logit_rows,
            cache,
            batch.adapters,
            self._hook,
        )
        if stopped < 0:
            raise ParallelForError(self._open.hook_failure())
        self._raise_failure()
        return bisect_left(self._starts, stopped)

    def load_adapter(self, pairs: p.Pairs) -> int:
        placed = checked_pairs(self._program, pairs)
        number = self._open.load_adapter(
            [
                (self._starts[index], pair.offset, _pair_weight(pair.a), _pair_weight(pair.b))
                for index, each in placed.items()
                for pair in each
            ]
        )
        self._adapters[number] = pairs  # borrowed by the runner
        return number

    def unload_adapter(self, number: int) -> None:
        self._open.unload_adapter(number)
        del self._adapters[number]

    def bind_slots(self, slots: p.ExpertSlots) -> None:
        self._open.bind_slots(slots.memory, slots.table, slots.state, slots.used)
        self._slots = slots  # borrowed by the runner

    def routes(self) -> NDArray[np.int32]:
        return self._open.routes()

    def set_lookahead(self, on: bool) -> None:
        self._open.set_lookahead(on)

    def set_watched(self, on: bool) -> None:
        self._open.set_watched(on)

    def expert_uses(self) -> int:
        return self._open.expert_uses()

    def foretold(self) -> tuple[int, int]:
        return self._open.foretold()

    def seconds_waited(self) -> float:
        return self._open.waited() * 10**-9

    def forecast(self) -> NDArray[np.int32]:
        return self._open.forecast()

    def run_experts(
        self, index: int, experts: NDArray[np.int32], slots: NDArray[np.int32], last: bool
    ) -> None:
        self._open.run_experts(self._starts[index], experts, slots, last)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if failed := self._open.failure():
            raise ExpertReadError(*failed)

    def logits(self, rows: int) -> NDArray[np.int32]:
        return self._open.logits()[:rows]

    def residual(self, rows: int) -> NDArray[np.int32]:
        return self._open.residual()[:rows]

    def put(self, rows: I32) -> None:
        check_rows(rows, self._program.shape.hidden, self.capacity)
        self._open.put(np.ascontiguousarray(rows))

    def set_parallel_for(self, hook: p.ParallelFor | None) -> None:
        check_hook(hook, self._threads)
        if hook is None:
            self._open.set_parallel_for(0, False)
            self._hook = None
        else:
            self._open.set_parallel_for(hook.max_tasks, hook.matvec)
            self._hook = _caller(hook)

    def saturations(self) -> Mapping[str, int]:
        return dict(zip(p.SITES, self._open.clipped(), strict=True))

    def row_saturations(self) -> NDArray[np.int64]:
        out = np.zeros((self._open.pass_rows(), len(p.SITES)), np.int64)
        self._open.row_clipped(out)
        return out

    def close(self) -> None:
        self._runner = None

    @property
    def _open(self) -> _native.Runner:
        assert self._runner is not None, "the runner is closed"
        return self._runner

    def _add(self, op: p.Op) -> None:
        runner = self._open
        match op:
            case p.Embed(weight):
                runner.embed(*_weight(weight))
            case p.Norm(gain):
                runner.norm(gain.values, gain.exponent, gain.eps)
            case p.Project(weight, target, bias, residual):
                runner.project(*_weight(weight), int(target), bias, residual)
            case p.Adapt(_, _, target):
                runner.adapt(int(target))
            case p.HeadNorm(gain, first, count, width):
                runner.head_norm(gain.values, gain.exponent, gain.eps, first, count, width)
            case p.Land(layer):
                runner.land(layer)
            case p.Attend(layer):
                runner.attend(layer)
            case p.Quantize():
                runner.quantize()
            case p.SiluMul(rows):
                runner.silu_mul(rows)
            case p.Select():
                runner.select()
            case p.Route(layer, gain, router, _, normalise, gate, ahead):
                runner.route(layer, *_router(gain, router), normalise, gate)
                if ahead is not None:
                    runner.route_ahead(ahead.layer, *_router(ahead.gain, ahead.router))
            case p.Experts(layer, layout):
                runner.experts(layer, _spans(layout.gate_up), _spans(layout.down), layout.nbytes)
            case p.AddShared():
                runner.add_shared()


def _caller(hook: p.ParallelFor) -> Hook:
    """What the module calls: a task there returns False where it is called too late."""

    def run(count: int, task: _native.Task) -> None:
        def call(index: int) -> None:
            if not task(index):
                raise stale()

        hook.run(count, call)

    return run


def _sizes(s: p.ModelShape) -> list[int]:
    sizes = [s.hidden, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim]
    sizes += [s.ffn_rows, s.ffn_width, s.vocab, s.fraction_bits]
    return [*sizes, s.num_experts, s.top_k, s.expert_rows, s.expert_width]


def _router(gain: p.Gain, router: p.Router) -> tuple[I32, int, tuple[int, int], I16, I32]:
    return gain.values, gain.exponent, gain.eps, router.codes, router.exponents


def _spans(spans: p.WeightSpans) -> list[int]:
    """Byte offsets of a record's fields, -1 for minimums that are not there, and the weight's sizes."""
    offsets = [spans.fields[n].offset if n in spans.fields else -1 for n in _FIELDS]
    return [*offsets, spans.n, spans.k, spans.bits, spans.group]


def _pair_weight(w: p.PackedWeight) -> tuple[NDArray[np.uint8], I16, I32, int, int]:
    return w.codes, w.scales, w.row, w.n, w.k


def _weight(
    w: p.PackedWeight,
) -> tuple[NDArray[np.uint8], I16, I16 | None, I32, int, int, int, int]:
    return w.codes, w.scales, w.mins, w.row, w.n, w.k, w.bits, w.group
