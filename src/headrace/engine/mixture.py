"""Where the engine meets the stream of experts: what happens when a run stops after a Route.

A pass of a few rows gets the experts that it lacks and goes on while they are read; a pass of many rows sweeps through
the layer's experts beside the pool. Neither changes a result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.engine.batch import Company
from headrace.errors import CancelledError, ExpertReadError
from headrace.experts.stream import ExpertStream
from headrace.experts.sweep import LayerExperts, hottest
from headrace.kernels import program as p
from headrace.values import ExpertStats

PROMPT_ROWS = 16  # rows of decode that a pass of a prompt counts for
SWEEP_ROWS = 32  # passes of more rows sweep; they would flush what decode uses
USES_EACH = 4  # uses of each expert, were all used alike, from which on a pass is taken to need all of a layer

Observer = Callable[[p.Route, NDArray[np.int32]], None]  # a Route, and X i32[rows, hidden] at it


class Mixture:
    """Runs passes of a program with experts: the runner computes, the stream supplies."""

    def __init__(self, program: p.Program, runner: p.Runner, stream: ExpertStream) -> None:
        self._ops = program.ops
        self._runner = runner
        self.stream = stream
        self._experts = {op.layer: i for i, op in enumerate(self._ops) if isinstance(op, p.Experts)}
        self._next = dict(pairwise(self._experts))  # layer with experts to the one after it
        runner.bind_slots(stream.slots)
        runner.set_lookahead(stream.options.reserve > 0)
        runner.set_watched(stream.recorder is not None)
        self._observer: Observer | None = None

    def run(
        self,
        batch: p.Batch,
        cache: NDArray[np.uint8],
        marks: tuple[int, ...],
        *,
        admit: bool,
        company: Company | None = None,
        begin: int = 0,
    ) -> None:
        """One pass, or a part of one. admit: it is the last of a prompt, so its hottest experts may stay.

        begin: the first operation. marks: ends of ranges of operations, the last where it ends, the program's end or
        one between layers; `company`, if any, is asked between them.
        Raises ExpertReadError, CancelledError; nothing is left half done in the pool then.
        """
        at, size = begin, marks[-1]
        self.stream.begin_step()
        try:
            while at < size:
                batch = company.pause(at) if at > begin and company is not None else batch
                end = marks[bisect_right(marks, at)]
                at = self._runner.run(at, end, batch, cache)
                if at < end:
                    at = self._serve(at, batch, cache, admit)
        except ExpertReadError as error:
            self.stream.end_step()
            self.stream.check(error.layer)  # knows the cause
            raise
        except CancelledError:
            self.stream.end_step()
            raise
        self.stream.end_step()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` after every Route of the passes inside the block."""
        self._observer = observer
        self._runner.set_watched(True)
        try:
            yield
        finally:
            self._observer = None
            self._runner.set_watched(self.stream.recorder is not None)

    def stats(self) -> ExpertStats:
        """Since the engine was made."""
        s = self.stream.stats
        guessed, guessed_right = self._runner.foretold()
        return ExpertStats(
            uses=self._runner.expert_uses(),
            reads=s.reads + s.swept,
            bytes_read=s.bytes_read,
            bytes_wasted=s.bytes_wasted,
            seconds_waited=self._runner.seconds_waited() + s.seconds_waited,
            guessed=guessed,
            guessed_right=guessed_right,
        )

    def _serve(self, at: int, batch: p.Batch, cache: NDArray[np.uint8], admit: bool) -> int:
        """Supply the experts of the Route before `at`; returns where the run goes on."""
        route = self._ops[at - 1]
        assert isinstance(route, p.Route)
        chosen = self._runner.routes()
        if self._observer is not None:
            self._observer(route, self._runner.residual(len(chosen)))
        wanted = np.unique(chosen)
        if self._sweeps(len(chosen), len(wanted)):
            if self.stream.recorder is not None:
                self.stream.recorder.add(route.layer, batch.positions, chosen)
            return self._sweep(route, at, batch, cache, admit)
        self.stream.supply(route.layer, chosen, batch.positions)
        if route.ahead is not None and len(guess := self._runner.forecast()):
            self.stream.prefetch(route.ahead.layer, guess.T.ravel().tolist())
        return at

    def _sweeps(self, rows: int, wanted: int) -> bool:
        """Whether the pool cannot, or should not, take what a pass needs. A pool for all experts always takes it."""
        if self.stream.capacity >= len(self._experts) * self.stream.slots.table.shape[1]:
            return False
        return rows > SWEEP_ROWS or wanted > self.stream.capacity

    def _sweep(
        self, route: p.Route, at: int, batch: p.Batch, cache: NDArray[np.uint8], admit: bool
    ) -> int:
        index, chosen = self._experts[route.layer], self._runner.routes()
        share = self.stream.capacity // len(self._experts)
        num_experts = self.stream.slots.table.shape[1]
        staying = hottest(chosen, num_experts, share) if admit else []
        wanted = np.unique(chosen).tolist()
        # What a prompt used most is what its answer will use; a few rows of it count, lest they outweigh the answer.
        rows = np.bincount(chosen.ravel(), minlength=num_experts)[wanted]
        self.stream.pool.credit(route.layer, wanted, rows * PROMPT_ROWS // len(chosen))
        self._runner.run(at, index, batch, cache)
        following = self._following(route.layer, chosen.size)
        now = LayerExperts(route.layer, wanted)
        for experts, slots, last in self.stream.sweep(now, staying, following):
            self._runner.run_experts(index, experts, slots, last)
        return index + 1

    def _following(self, layer: int, uses: int) -> LayerExperts | None:
        """What the next layer will need, if this one's uses of experts are so many that it is all of them."""
        num_experts = self.stream.slots.table.shape[1]
        after = self._next.get(layer)
        if after is None or uses < USES_EACH * num_experts:
            return None
        return LayerExperts(after, range(num_experts))
