"""The slot pool: which expert lies where, and which one makes room. One pool for all layers; no I/O.

Eviction is CLOCK over the `used` bits that kernels set. A pool is a set of open slots; the others are closed and
hold no memory.

Open slots are in huge pages where the system has them: a disk is given larger reads, at half the processor time. Closed
ones never are, so that no huge page gives memory to a closed slot beside an open one.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.records import LayerRecords
from headrace.kernels.program import EMPTY, READING, ExpertSlots

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)


class SlotPool:
    """`max_slots` slots at most, `slots` of them open, and after those `sweep_slots` that the pool does not manage.

    A slot holds the largest record of `records`. Used by one thread; kernels and lanes share `self.slots`.
    """

    def __init__(
        self,
        records: Sequence[LayerRecords],
        num_layers: int,
        num_experts: int,
        max_slots: int,
        slots: int,
        sweep_slots: int = 0,
    ) -> None:
        if not 0 <= slots <= max_slots:
            raise ValueError(f"{slots} slots of at most {max_slots}")
        self.slot_bytes = max(r.layout.nbytes for r in records)
        self.max_slots = max_slots
        self.sweep_slots = range(max_slots, max_slots + sweep_slots)
        total = max_slots + sweep_slots
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, max(total, 1) * self.slot_bytes, flags=flags)
        memory = np.frombuffer(self._map, np.uint8, total * self.slot_bytes)
        self.slots = ExpertSlots(
            memory=memory.reshape(total, self.slot_bytes),
            table=np.full((num_layers, num_experts), -1, np.int32),
            state=np.full(total, EMPTY, np.uint8),
            used=np.zeros(total, np.uint8),
        )
        self._nbytes = {r.layer: r.layout.nbytes for r in records}
        self.layer = np.full(
            max_slots, -1, np.int32
        )  # of the expert in a slot; -1: the slot is free
        self.expert = np.full(max_slots, -1, np.int32)
        self._open = np.zeros(max_slots, bool)
        self._doomed = np.zeros(max_slots, bool)
        self._hand = 0
        self.bytes_wasted = 0  # of doomed experts that were evicted unused
        self._advise(_NO_HUGE_PAGES, 0, total)
        self._advise(_HUGE_PAGES, max_slots, sweep_slots)
        self._open_slots(slots)

    @property
    def num_open(self) -> int:
        return int(self._open.sum())

    def slot(self, layer: int, expert: int) -> int:
        """The slot of an expert, whatever its state; -1 where it has none."""
        return int(self.slots.table[layer, expert])

    def resident(self, layer: int, expert: int) -> bool:
        """Whether the expert has a slot; it may still be READING."""
        return self.slot(layer, expert) >= 0

    def evictable(self, pinned: Collection[int] = ()) -> int:
        """How many experts could be claimed: free slots and those that may be evicted."""
        free = self._open & (self.layer < 0)
        return int(free.sum()) + int(self._candidates(pinned).sum())

    def claim(
        self, layer: int, experts: Sequence[int], pinned: Collection[int]
    ) -> list[tuple[int, int]]:
        """Give experts without a slot one each, READING from now on: [(expert, slot)].

        Free slots first, then doomed ones, then CLOCK; never one that is `pinned` or READING. Where there are not
        enough, the last experts get none.
        """
        free = np.flatnonzero(self._open & (self.layer < 0))[: len(experts)].tolist()
        victims = self._victims(len(experts) - len(free), pinned)
        for slot in victims:
            self.free(slot)
        claimed = list(zip(experts, free + victims, strict=False))
        for expert, slot in claimed:
            assert self.slots.table[layer, expert] < 0, "an expert has one slot"
            self.layer[slot], self.expert[slot] = layer, expert
            self.slots.table[layer, expert] = slot
            self.slots.state[slot] = READING
            self.slots.used[slot] = 0
        return claimed

    def free(self, slot: int) -> None:
        """Forget what is in a slot that nothing reads into or from."""
        layer = int(self.layer[slot])
        assert layer >= 0
        assert self.slots.state[slot] != READING
        if self._doomed[slot] and not self.slots.used[slot] and self.slots.state[slot] != EMPTY:
            self.bytes_wasted += self._nbytes[layer]
        self.slots.table[layer, self.expert[slot]] = -1
        self.layer[slot] = self.expert[slot] = -1
        self.slots.state[slot], self.slots.used[slot] = EMPTY, 0
        self._doomed[slot] = False

    def doom(self, slot: int) -> None:
        """Evict this one before all others."""
        self._doomed[slot] = True

    def spare(self, slot: int) -> None:
        """The opposite of `doom`."""
        self._doomed[slot] = False

    def resize(self, slots: int, pinned: Collection[int] = ()) -> int:
        """Open or close slots; what stays keeps its contents. Returns how many are open then.

        More than asked for stay open where too many are pinned or READING. Memory of closed slots is given back.
        """
        if not 0 <= slots <= self.max_slots:
            raise ValueError(f"{slots} slots of at most {self.max_slots}")
        surplus = self.num_open - slots
        if surplus < 0:
            self._open_slots(-surplus)
        elif surplus > 0:
            closing = np.flatnonzero(self._open & (self.layer < 0))[::-1][:surplus].tolist()
            victims = self._victims(surplus - len(closing), pinned)
            for slot in victims:
                self.free(slot)
            for slot in closing + victims:
                self._open[slot] = False
                self._advise(_NO_HUGE_PAGES, slot, 1)
                self._advise(mmap.MADV_DONTNEED, slot, 1)
        return self.num_open

    def _open_slots(self, count: int) -> None:
        """Open the first `count` of the closed slots."""
        opening = np.flatnonzero(~self._open)[:count]
        self._open[opening] = True
        for run in np.split(opening, np.flatnonzero(np.diff(opening) > 1) + 1):
            if len(run):
                self._advise(_HUGE_PAGES, int(run[0]), len(run))

    def _advise(self, advice: int | None, first: int, count: int) -> None:
        """Tell the system about the memory of some slots; what it does not know or cannot do is no fault."""
        if advice is not None and count:
            with suppress(OSError):
                self._map.madvise(advice, first * self.slot_bytes, count * self.slot_bytes)

    def _candidates(self, pinned: Collection[int]) -> NDArray[np.bool_]:
        """Slots whose expert may be evicted, bool[max_slots]."""
        reading = self.slots.state[: self.max_slots] == READING
        may: NDArray[np.bool_] = self._open & (self.layer >= 0) & ~reading
        may[[s for s in pinned if s < self.max_slots]] = False
        return may

    def _victims(self, count: int, pinned: Collection[int]) -> list[int]:
        """At most `count` slots: the doomed, then those at which the hand of the clock stops."""
        if count <= 0:
            return []
        may = self._candidates(pinned)
        doomed: list[int] = np.flatnonzero(may & self._doomed)[:count].tolist()
        may[doomed] = False
        return doomed + self._turn(count - len(doomed), may)

    def _turn(self, count: int, may: NDArray[np.bool_]) -> list[int]:
        """Turn the hand over the slots that `may` be taken: a used one is spared once and loses its bit."""
        victims: list[int] = []
        for _ in range(2):  # after one round nothing is used any more
            order = np.flatnonzero(may)
            behind = np.searchsorted(order, self._hand)
            order = np.concatenate([order[behind:], order[:behind]])
            unused = np.flatnonzero(self.slots.used[order] == 0)[: count - len(victims)]
            done = len(victims) + len(unused) == count
            taken = order[unused]
            victims += taken.tolist()
            if done:
                self.slots.used[order[: unused[-1]] if len(unused) else []] = 0
                break
            self.slots.used[order] = 0
            may[taken] = False
        if victims:
            self._hand = (victims[-1] + 1) % self.max_slots
        return victims
