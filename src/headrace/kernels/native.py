"""The native backend: hands a program to the C++ runner, which walks it without Python.

Can be imported only where the native module was built; `select` asks.

Knows the module `_native` and the arrays that it borrows; keeps them alive for as long as the runner.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers
from headrace.kernels import _native
from headrace.kernels import program as p

I16 = NDArray[np.int16]
I32 = NDArray[np.int32]


class NativeBackend:
    """One instruction set of the native module."""

    def __init__(self, tier: str, threads: int) -> None:
        self.name = tier
        self.threads = threads

    def compile(self, program: p.Program, *, capacity: int, logit_capacity: int) -> NativeRunner:
        return NativeRunner(self, program, capacity, logit_capacity)


class NativeRunner:
    """See `program.Runner`."""

    def __init__(
        self,
        backend: NativeBackend,
        program: p.Program,
        capacity: int,
        logit_capacity: int,
    ) -> None:
        s = program.shape
        self.capacity = capacity
        self._program = program  # owns the arrays that the runner borrows
        sizes = [s.hidden, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim]
        sizes += [s.ffn_rows, s.ffn_width, s.vocab, s.fraction_bits]
        self._runner: _native.Runner | None = _native.Runner(
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

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> None:
        self._open.run(
            begin,
            end,
            batch.tokens,
            batch.positions,
            batch.sequences,
            list(batch.page_tables),
            batch.logit_rows,
            cache,
        )

    def logits(self, rows: int) -> NDArray[np.int32]:
        return self._open.logits()[:rows]

    def saturations(self) -> Mapping[str, int]:
        return dict(zip(p.SITES, self._open.clipped(), strict=True))

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
            case p.HeadNorm(gain, first, count):
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


def _weight(
    w: p.PackedWeight,
) -> tuple[NDArray[np.uint8], I16, I16 | None, I32, int, int, int, int]:
    return w.codes, w.scales, w.mins, w.row, w.n, w.k, w.bits, w.group
