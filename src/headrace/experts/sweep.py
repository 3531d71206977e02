"""The sweep of prefill: the experts of one layer after another, in the order of the file, beside the pool.

Its slots are a queue. Reads begin as slots come free, what has arrived is computed, and once a layer's last expert is
being read the first ones of the next layer follow, so that the disk works while attention does. What the pool holds
is computed where the sweep would otherwise wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.experts.slots import SlotPool
from headrace.experts.store import ExpertStore
from headrace.kernels.program import EMPTY, FAILED, READING

Part = tuple[
    NDArray[np.int32], NDArray[np.int32], bool
]  # experts, their slots, whether it is the last


@dataclass(frozen=True)
class LayerExperts:
    """Some experts of a layer, ascending."""

    layer: int
    experts: Sequence[int]


@dataclass(frozen=True)
class _Read:
    """An expert that is read, or was, into a slot of the sweep."""

    layer: int
    expert: int
    slot: int


class Sweep:
    """Takes layers through the sweep slots of a pool.

    found, read: experts that layers found in the pool, and that were read for them or in vain.
    """

    def __init__(self, pool: SlotPool, store: ExpertStore) -> None:
        self._pool, self._store = pool, store
        self._free = list(pool.sweep_slots)
        self._least = max(1, len(self._free) // 4)  # experts of a part, where there are as many
        self._queue: deque[_Read] = deque()  # in the order of their reads
        self.found = self.read = 0

    @property
    def queued(self) -> int:
        """Reads for a layer that has not come yet."""
        return len(self._queue)

    def parts(
        self,
        now: LayerExperts,
        admit: Collection[int] = (),
        pinned: Iterable[int] = (),
        following: LayerExperts | None = None,
    ) -> Generator[Part, None, None]:
        """Parts of a layer. Every slot of one is READY, and stays so until the next is asked for.

        admit: experts that the pool keeps afterwards, where it has room beside the `pinned` slots, others of this layer
        and of earlier ones making room. following: what the
        next layer to be swept will probably need. Raises ExpertReadError. After an error, or when this is closed early,
        nothing is being read.
        """
        held = [(e, slot) for e in now.experts if (slot := self._pool.slot(now.layer, e)) >= 0]
        kept = {*pinned, *(slot for _, slot in held)}
        missing = self._missing(now)
        self._forget_all_but(now.layer, missing)
        queued = {read.expert for read in self._queue}
        todo = deque((now.layer, e) for e in missing if e not in queued)
        if following is not None:
            todo.extend((following.layer, e) for e in self._missing(following))
        for _, slot in held:
            self._store.lanes.promote(slot)
        self.found += len(held)
        left = len(missing)
        try:
            self._begin(todo)
            while held or left:
                part = arrived = self._arrived(left, wait=not held)
                if not arrived:
                    count = self._least if left else len(held)
                    part, held = held[:count], held[count:]
                left -= len(arrived)
                yield self._part(now.layer, part, not held and not left)
                if not arrived:  # of the pool: what is hotter may take their place
                    kept -= {slot for expert, slot in part if expert not in admit}
                self._release(len(arrived), admit, kept)
                self._begin(todo)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Forget what is queued; nothing is being read afterwards."""
        self._forget_all_but(-1, ())

    def reset(self) -> None:
        """Begin again with the pool's sweep slots, when nothing reads into them."""
        self._queue.clear()
        self._free = list(self._pool.sweep_slots)

    def _missing(self, one: LayerExperts) -> list[int]:
        return [e for e in one.experts if not self._pool.resident(one.layer, e)]

    def _begin(self, todo: deque[tuple[int, int]]) -> None:
        """Begin to read the next experts, (layer, expert), into the free slots."""
        while todo and self._free:
            layer, placed = todo[0][0], []
            while todo and self._free and todo[0][0] == layer:
                placed.append((todo.popleft()[1], self._free.pop()))
            self._pool.slots.state[[slot for _, slot in placed]] = READING
            self._store.read_runs(layer, placed)
            self._queue.extend(_Read(layer, *one) for one in placed)
            self.read += len(placed)

    def _arrived(self, left: int, *, wait: bool) -> list[tuple[int, int]]:
        """The first of the queue that are there, `left` at most; none where that are too few for a part.

        wait: until they are enough.
        """
        first = [(read.expert, read.slot) for read in islice(self._queue, left)]
        enough = min(self._least, left)
        if wait:
            for _, slot in first[:enough]:
                self._store.lanes.wait(slot)
        state = self._pool.slots.state
        count = next((i for i, (_, slot) in enumerate(first) if state[slot] == READING), len(first))
        return first[:count] if count >= enough else []

    def _part(self, layer: int, placed: list[tuple[int, int]], last: bool) -> Part:
        for expert, slot in placed:
            if self._store.lanes.wait(slot) == FAILED:
                raise self._store.error(layer, expert, slot)
        experts, slots = zip(*placed, strict=True)
        return np.array(experts, np.int32), np.array(slots, np.int32), last

    def _release(self, count: int, admit: Collection[int], kept: set[int]) -> None:
        """The first of the queue have been used: their slots are free, or the pool's, which gives others for them."""
        for _ in range(count):
            read = self._queue.popleft()
            given = None
            if read.expert in admit:
                given = self._pool.adopt(read.layer, read.expert, read.slot, kept)
                kept.add(read.slot)
            self._put_back(read.slot if given is None else given)

    def _put_back(self, slot: int) -> None:
        self._pool.slots.state[slot], self._pool.slots.used[slot] = EMPTY, 0
        self._free.append(slot)

    def _forget_all_but(self, layer: int, experts: Collection[int]) -> None:
        """Forget what is queued but for these experts of this layer."""
        wanted, queue = set(experts), self._queue
        self._queue = deque()
        for read in queue:
            if read.layer == layer and read.expert in wanted:
                self._queue.append(read)
                continue
            if self._store.lanes.cancel(read.slot):
                self.read -= 1
            else:
                self._store.lanes.wait(read.slot)
                self._pool.waste(read.layer)
            self._put_back(read.slot)


def hottest(routes: NDArray[np.integer[Any]], num_experts: int, count: int) -> list[int]:
    """The experts that most rows of routes i32[rows, top_k] chose, `count` at most; ties to the lower index."""
    rows = np.bincount(np.asarray(routes).ravel(), minlength=num_experts)
    order = np.argsort(-rows, kind="stable")[:count]
    chosen: list[int] = order[rows[order] > 0].tolist()
    return chosen
