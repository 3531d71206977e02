"""The native backend: hands a program to the C++ runner, which walks it without Python.

Knows the module `_native` and the arrays that it borrows; keeps them alive for as long as the runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers
from headrace.arith.sampling import Draw, Logits
from headrace.kernels import program as p

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
        self._runner = module.Runner(
            backend.name,
            backend.threads,
            sizes,
            np.ascontiguousarray(program.rope_low),
            np.ascontiguousarray(program.rope_high),
            np.ascontiguousarray(program.sigmoid),
            numbers.attention_scale(s.head_dim),
            capacity,
            logit_capacity,
        )
        for op in program.ops:
            self._add(op)

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> int:
        self._runner.run(
            begin,
            end,
            batch.tokens,
            batch.positions,
            batch.sequences,
            list(batch.page_tables),
            batch.logit_rows,
            cache,
        )
        return end

    def bind_slots(self, slots: p.ExpertSlots) -> None:
        raise NotImplementedError

    def routes(self) -> NDArray[np.int32]:
        raise NotImplementedError

    def run_experts(
        self, index: int, experts: NDArray[np.int32], slots: NDArray[np.int32], last: bool
    ) -> None:
        raise NotImplementedError

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
            case p.HeadNorm(gain, first, count, _):
                runner.head_norm(gain.values, gain.exponent, gain.eps, first, count)
            case p.Land(layer):
                runner.land(layer)
            case p.Attend(layer):
                runner.attend(layer)
            case p.Quantize():
                runner.quantize()
            case p.SiluMul():
                runner.silu_mul()
            case p.Select():
                runner.select()


def _weight(weight: p.PackedWeight) -> dict[str, Any]:
    names = ("codes", "scales", "mins", "row", "n", "k", "bits", "group")
    return {name: getattr(weight, name) for name in names}
