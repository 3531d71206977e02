"""The native backend: hands a program to the C++ runner, which walks it without Python.

Knows the module `_native` and the arrays that it borrows; keeps them alive for as long as the runner.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers
from headrace.arith.sampling import Draw, Logits
from headrace.errors import ExpertReadError
from headrace.kernels import program as p

_FIELDS = ("codes", "scales", "mins", "row")
_EXP2_TABLES = tuple(np.array(table, np.int32) for table in numbers.exp2_tables())


class NativeBackend:
    """One instruction set of the native module."""

    def __init__(self, module: Any, tier: str, threads: int) -> None:
        self.name = tier
        self.threads = threads
        self._module = module

    def compile(self, program: p.Program, *, capacity: int, logit_capacity: int) -> NativeRunner:
        return NativeRunner(self, self._module, program, capacity, logit_capacity)

    def draw(self, logits: Logits, how: Draw, word: int) -> int:
        parameters = (how.inverse_temperature, how.top_k, how.top_p, how.min_p, how.reach)
        token: int = self._module.draw(
            logits, (*parameters, how.fraction_bits), *_EXP2_TABLES, word
        )
        return token


class NativeRunner:
    """See `program.Runner`."""

    def __init__(
        self,
        backend: NativeBackend,
        module: Any,
        program: p.Program,
        capacity: int,
        logit_capacity: int,
    ) -> None:
        s = program.shape
        self.capacity = capacity
        self._program = program  # owns the arrays that the runner borrows
        sizes = [s.hidden, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim]
        sizes += [s.ffn_rows, s.ffn_width, s.vocab, s.fraction_bits]
        sizes += [s.num_experts, s.top_k, s.expert_rows, s.expert_width]
        self._runner = module.Runner(
            backend.name,
            backend.threads,
            sizes,
            np.ascontiguousarray(program.rope_low),
            np.ascontiguousarray(program.rope_high),
            np.ascontiguousarray(program.sigmoid),
            *_EXP2_TABLES,
            numbers.attention_scale(s.head_dim),
            capacity,
            logit_capacity,
        )
        self._starts = []  # of each operation among the runner's own, which are finer
        for op in program.ops:
            self._starts.append(self._runner.num_ops())
            self._add(op)
        self._starts.append(self._runner.num_ops())
        self._slots: p.ExpertSlots | None = None

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> int:
        stopped = self._runner.run(
            self._starts[begin],
            self._starts[end],
            batch.tokens,
            batch.positions,
            batch.sequences,
            list(batch.page_tables),
            batch.logit_rows,
            cache,
        )
        self._raise_failure()
        return bisect_left(self._starts, stopped)

    def bind_slots(self, slots: p.ExpertSlots) -> None:
        self._runner.bind_slots(slots.memory, slots.table, slots.state, slots.used)
        self._slots = slots  # borrowed by the runner

    def routes(self) -> NDArray[np.int32]:
        chosen: NDArray[np.int32] = self._runner.routes()
        return chosen

    def set_lookahead(self, on: bool) -> None:
        self._runner.set_lookahead(on)

    def set_watched(self, on: bool) -> None:
        self._runner.set_watched(on)

    def expert_uses(self) -> int:
        uses: int = self._runner.expert_uses()
        return uses

    def forecast(self) -> NDArray[np.int32]:
        guessed: NDArray[np.int32] = self._runner.forecast()
        return guessed

    def run_experts(
        self, index: int, experts: NDArray[np.int32], slots: NDArray[np.int32], last: bool
    ) -> None:
        self._runner.run_experts(self._starts[index], experts, slots, last)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if failed := self._runner.failure():
            raise ExpertReadError(*failed)

    def logits(self, rows: int) -> NDArray[np.int32]:
        view: NDArray[np.int32] = self._runner.logits()
        return view[:rows]

    def saturations(self) -> Mapping[str, int]:
        return dict(zip(p.SITES, self._runner.clipped(), strict=True))

    def close(self) -> None:
        self._runner = None

    def _add(self, op: p.Op) -> None:
        runner = self._runner
        match op:
            case p.Embed(weight):
                runner.embed(**_weight(weight))
            case p.Norm(gain):
                runner.norm(gain.values, gain.exponent, gain.eps)
            case p.Project(weight, target, bias, residual):
                runner.project(**_weight(weight), target=int(target), bias=bias, residual=residual)
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


def _router(gain: p.Gain, router: p.Router) -> tuple[Any, ...]:
    return (gain.values, gain.exponent, gain.eps, router.codes, router.exponents)


def _spans(spans: p.WeightSpans) -> list[int]:
    """Byte offsets of a record's fields, -1 for minimums that are not there, and the weight's sizes."""
    offsets = [spans.fields[n].offset if n in spans.fields else -1 for n in _FIELDS]
    return [*offsets, spans.n, spans.k, spans.bits, spans.group]


def _weight(weight: p.PackedWeight) -> dict[str, Any]:
    names = ("codes", "scales", "mins", "row", "n", "k", "bits", "group")
    return {name: getattr(weight, name) for name in names}
