"""The slot pool: which expert lies where, and which one makes room. One pool for all layers; no I/O.

The expert that was used least goes, by counts that fade; `used` counts what kernels do between two looks. Recency
alone would be no guide: layers are visited in a circle, so what was used longest ago is what comes next (policies are
compared on recorded routes in docs/benchmarks.md). A pool is a set of open slots; the others are closed and hold no
memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.records import LayerRecords
from headrace.kernels.program import EMPTY, READING, ExpertSlots

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
_NO_HUGE_PAGES = getattr(mmap, "MADV_NOHUGEPAGE", None)


HALF_LIFE = 16  # uses, times the number of experts, after which a use counts half


class SlotPool:
    """`max_slots` slots at most, `slots` of them open, and `sweep_slots` more that belong to the sweep (`adopt`).

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
        total = max_slots + sweep_slots
        self.sweep_slots = set(range(max_slots, total))
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
        # Of the expert in a slot; -1: the slot is free, or the sweep's.
        self.layer = np.full(total, -1, np.int32)
        self.expert = np.full(total, -1, np.int32)
        self._open = np.zeros(total, bool)
        self._doomed = np.zeros(total, bool)
        self._touched = np.zeros(total, bool)  # used since it was read
        self._uses = np.zeros((num_layers, num_experts), np.int32)  # of every expert, fading
        self._new_uses = 0
        self._hand = 0
        self.bytes_wasted = 0  # of experts that were read and not used
        self._advise(_NO_HUGE_PAGES, 0, total)
        self._advise(_HUGE_PAGES, max_slots, sweep_slots)
        self._open_slots(slots)

    @property
    def num_open(self) -> int:
        return int(self._open.sum())

    @property
    def num_free(self) -> int:
        """Open slots without an expert."""
        return int((self._open & (self.layer < 0)).sum())

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

        Free slots first, then doomed ones, then those used least; never one that is `pinned` or READING. Where there
        are not enough, the last experts get none.
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
            self.slots.used[slot], self._touched[slot] = 0, False
        return claimed

    def adopt(self, layer: int, expert: int, slot: int, pinned: Collection[int]) -> int | None:
        """Keep an expert that a sweep has read and used: its slot becomes one of the pool, which gives up another.

        Experts of later layers do not make room: their turn comes in the same pass. Returns the other slot, which is
        the sweep's from now on; None where the open ones are `pinned`, READING or of later layers.
        """
        free = np.flatnonzero(self._open & (self.layer < 0))[:1].tolist()
        given = free or self._victims(1, pinned, upto=layer)
        if not given:
            return None
        other: int = given[0]
        if self.layer[other] >= 0:
            self.free(other)
        self._open[other], self._open[slot] = False, True
        self.sweep_slots.remove(slot)
        self.sweep_slots.add(other)
        self.layer[slot], self.expert[slot] = layer, expert
        self.slots.table[layer, expert] = slot
        self.slots.used[slot], self._touched[slot] = 0, True
        return other

    def was_used(self, slot: int) -> bool:
        """Whether a kernel has used the expert in a slot since it was read."""
        return bool(self._touched[slot] or self.slots.used[slot])

    def credit(self, layer: int, experts: Sequence[int], uses: NDArray[np.integer[Any]]) -> None:
        """Uses of experts of a layer that no slot has counted."""
        self._uses[layer, list(experts)] += uses

    def waste(self, layer: int) -> None:
        """Count an expert of a layer that was read in vain."""
        self.bytes_wasted += self._nbytes[layer]

    def free(self, slot: int) -> None:
        """Forget what is in a slot that nothing reads into or from."""
        layer = int(self.layer[slot])
        assert layer >= 0
        assert self.slots.state[slot] != READING
        if self._doomed[slot] and not self.was_used(slot) and self.slots.state[slot] != EMPTY:
            self.waste(layer)
        self._uses[layer, self.expert[slot]] += self.slots.used[slot]
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

    def reset(self) -> None:
        """Forget every expert, whatever state the slots are in; nothing reads into them. As many are open as before."""
        count, total = min(self.num_open, self.max_slots), len(self._open)
        self.slots.table[:] = -1
        self.slots.state[:], self.slots.used[:] = EMPTY, 0
        self.layer[:] = self.expert[:] = -1
        self._open[:] = self._doomed[:] = self._touched[:] = False
        self.sweep_slots = set(range(self.max_slots, total))
        self._advise(_NO_HUGE_PAGES, 0, total)
        self._advise(mmap.MADV_DONTNEED, 0, total)
        self._advise(_HUGE_PAGES, self.max_slots, total - self.max_slots)
        self._open_slots(count)

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
        closed = ~self._open
        closed[list(self.sweep_slots)] = False
        opening = np.flatnonzero(closed)[:count]
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
        may: NDArray[np.bool_] = self._open & (self.layer >= 0) & (self.slots.state != READING)
        may[list(pinned)] = False
        return may

    def _victims(self, count: int, pinned: Collection[int], upto: int | None = None) -> list[int]:
        """At most `count` slots, of layers up to one: the doomed, then those of the experts used least."""
        if count <= 0:
            return []
        may = self._candidates(pinned)
        if upto is not None:
            may &= self.layer <= upto
        doomed: list[int] = np.flatnonzero(may & self._doomed)[:count].tolist()
        may[doomed] = False
        return doomed + self._rarest(count - len(doomed), may)

    def _rarest(self, count: int, may: NDArray[np.bool_]) -> list[int]:
        """Slots of the experts that were used least; of equals the first behind the hand, which goes round."""
        if count <= 0:
            return []
        self._learn()
        slots = np.flatnonzero(may)
        uses = self._uses[self.layer[slots], self.expert[slots]].astype(np.int64)
        total = len(self._open)
        keys = uses * total + (slots - self._hand) % total
        order = np.argsort(keys) if count >= len(keys) else np.argpartition(keys, count - 1)
        victims: list[int] = slots[np.sort(order[:count])].tolist()
        if victims:
            self._hand = (victims[-1] + 1) % total
        return victims

    def _learn(self) -> None:
        """Add the uses since the last call to what is remembered, which fades."""
        used = self.slots.used
        now = np.flatnonzero(used * (self.layer >= 0))
        self._uses[self.layer[now], self.expert[now]] += used[now]
        self._new_uses += int(used[now].sum())
        self._touched[now] = True
        used[now] = 0
        if self._new_uses > HALF_LIFE * self._uses.size:
            self._uses >>= 1
            self._new_uses = 0
