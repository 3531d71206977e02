"""The sweep of prefill: all chosen experts of one layer once, in the order of the file, beside the pool.

What the pool holds comes first, while the first wave is read; then waves through two halves of the sweep slots: one is
computed from while the other is read.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.experts.slots import SlotPool
from headrace.experts.store import ExpertStore
from headrace.kernels.program import EMPTY, FAILED, READING

Part = tuple[
    NDArray[np.int32], NDArray[np.int32], bool
]  # experts, their slots, whether it is the last
_Placed = list[tuple[int, int]]  # (expert, slot)


class Sweep:
    """One sweep over `experts` (ascending) of a layer. `admit` are read into the pool where that has room.

    pinned: slots of the pool that stay. found, read: experts of the parts so far that the pool held, and not.
    """

    def __init__(
        self,
        pool: SlotPool,
        store: ExpertStore,
        layer: int,
        experts: Sequence[int],
        admit: Collection[int],
        pinned: Collection[int],
    ) -> None:
        self._pool, self._store, self._layer = pool, store, layer
        self._held = [(e, pool.slot(layer, e)) for e in experts if pool.resident(layer, e)]
        self._pinned = {*pinned, *(slot for _, slot in self._held)}
        self._admit = admit
        missing = [e for e in experts if not pool.resident(layer, e)]
        size = len(pool.sweep_slots) // 2
        self._waves = [missing[at : at + size] for at in range(0, len(missing), size)]
        self._begun: set[int] = set()
        self.found = self.read = 0

    def parts(self) -> Generator[Part, None, None]:
        """Every slot of a part is READY, and stays so until the next is asked for. Raises ExpertReadError.

        Whether this ends, fails or is closed early, nothing is being read for it afterwards.
        """
        try:
            ahead = self._begin(0)
            if self._held:
                self._finish(self._held)
                self.found = len(self._held)
                yield _part(self._held, not self._waves)
            for number in range(len(self._waves)):
                wave, ahead = ahead, self._begin(number + 1)
                self._finish(wave)
                self.read += len(wave)
                yield _part(wave, not ahead)
        finally:
            self._end()

    def _begin(self, number: int) -> _Placed:
        """Begin to read a wave; none where there is no such wave. Waves use the halves of the sweep slots in turn."""
        if number >= len(self._waves):
            return []
        pool, wave = self._pool, self._waves[number]
        staying = dict(pool.claim(self._layer, [e for e in wave if e in self._admit], self._pinned))
        pool.slots.used[list(staying.values())] = 1  # decode has not seen them: one round of grace
        self._pinned.update(staying.values())
        half = pool.sweep_slots[len(pool.sweep_slots) // 2 * (number % 2) :]
        placed = [(e, staying.get(e, half[i])) for i, e in enumerate(wave)]
        slots = [slot for _, slot in placed]
        pool.slots.state[slots] = READING
        self._begun.update(slots)
        self._store.read_runs(self._layer, placed)
        return placed

    def _finish(self, placed: _Placed) -> None:
        for expert, slot in placed:
            if self._store.lanes.wait(slot) == FAILED:
                raise self._store.error(self._layer, expert, slot)

    def _end(self) -> None:
        """Wait for what was begun, and leave no slot that is neither free nor whole."""
        for slot in self._begun:
            failed = self._store.lanes.wait(slot) == FAILED
            if slot in self._pool.sweep_slots:
                self._pool.slots.state[slot] = EMPTY
            elif failed:
                self._pool.free(slot)


def hottest(routes: NDArray[np.integer[Any]], num_experts: int, count: int) -> list[int]:
    """The experts that most rows of routes i32[rows, top_k] chose, `count` at most; ties to the lower index."""
    rows = np.bincount(np.asarray(routes).ravel(), minlength=num_experts)
    order = np.argsort(-rows, kind="stable")[:count]
    chosen: list[int] = order[rows[order] > 0].tolist()
    return chosen


def _part(placed: _Placed, last: bool) -> Part:
    experts, slots = zip(*placed, strict=True)
    return np.array(experts, np.int32), np.array(slots, np.int32), last
