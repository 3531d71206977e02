"""The stream: keeps the experts that a layer needs in slots, reads ahead, and sweeps through layers in prefill.

Nothing here can change a token: the caller's router decides, and a kernel computes only from slots that are READY.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.records import LayerRecords
from headrace.experts.slots import SlotPool
from headrace.experts.store import NUM_LANES, PIECE_BYTES, ExpertStore
from headrace.experts.sweep import LayerExperts, Part, Sweep
from headrace.experts.trace import RouteRecorder
from headrace.kernels.program import FAILED, READING, ExpertSlots


@dataclass(frozen=True)
class StreamOptions:
    """Sizes of a stream. slots, max_slots: of the pool now and at most. reserve: slots that unconfirmed forecasts may
    take. sweep_slots: memory that prefill passes through, beside the pool."""

    slots: int
    max_slots: int
    reserve: int = 0
    sweep_slots: int = 4
    num_lanes: int = NUM_LANES
    piece_bytes: int = PIECE_BYTES
    direct: bool = True


@dataclass
class StreamStats:
    """Counts since the stream was made.

    warmed: experts that were to be read before they were asked for. hits, misses: experts of decode steps that had a
    slot, and not. reads: experts that were read for those and for forecasts. swept: experts that prefill read;
    swept_hits: that it found in the pool.
    """

    warmed: int = 0
    hits: int = 0
    misses: int = 0
    reads: int = 0
    swept: int = 0
    swept_hits: int = 0
    bytes_read: int = 0
    bytes_wasted: int = 0  # read for a forecast, or a next layer of a sweep, and not used
    seconds_waited: float = 0.0


class ExpertStream:
    """What the engine calls, from one thread; kernels and lanes share `slots` with it."""

    def __init__(
        self,
        records: Sequence[LayerRecords],
        num_layers: int,
        num_experts: int,
        options: StreamOptions,
        *,
        native: Any = None,
        recorder: RouteRecorder | None = None,
    ) -> None:
        if options.sweep_slots < 1:
            raise ValueError("a sweep takes a slot at least")
        self.options = options
        self._layers = {r.layer: r.num_experts for r in records}
        self.recorder = recorder
        self.pool = SlotPool(
            records, num_layers, num_experts, options.max_slots, options.slots, options.sweep_slots
        )
        self.store = ExpertStore(
            records,
            self.pool.slots,
            num_lanes=options.num_lanes,
            piece_bytes=options.piece_bytes,
            native=native,
            direct=options.direct,
        )
        self._sweep = Sweep(self.pool, self.store)
        self._stats = StreamStats()
        self._foretold: dict[int, int] = {}  # slots taken for forecasts, and their layers
        self._pinned: set[int] = set()  # slots of the layer that was supplied last
        self._warming: set[int] = set()  # slots that `warm` reads into
        self._in_step = False

    @property
    def slots(self) -> ExpertSlots:
        return self.pool.slots

    @property
    def capacity(self) -> int:
        """How many experts of one layer `supply` takes; a layer that needs more is swept."""
        return self.pool.num_open

    def warm(self) -> None:
        """Begin to read experts into slots that are free, of each layer as many; returns at once.

        They are read when nothing else is to be read, and leave room for forecasts.
        """
        left = len(self._layers)
        for layer, num_experts in self._layers.items():
            room = self.pool.num_free - self.options.reserve
            missing = [e for e in range(num_experts) if not self.pool.resident(layer, e)]
            claimed = self.pool.claim(layer, missing[: max(0, -(-room // left))], self._kept())
            self._warming.update(slot for _, slot in claimed)
            self._stats.warmed += len(claimed)
            self.store.read(layer, claimed, prefetch=True)
            left -= 1

    def begin_step(self) -> None:
        """A pass begins. Where the one before never ended, an interrupt may have come at any moment: trust nothing."""
        if self._in_step:
            self.forget()
        self._in_step = True

    def forget(self) -> None:
        """Between passes: nothing is in memory any more."""
        self.store.lanes.drain()
        self.pool.reset()
        self._sweep.reset()
        self._foretold = {}
        self._pinned, self._warming = set(), set()
        self._in_step = False

    def supply(
        self,
        layer: int,
        experts: NDArray[np.integer[Any]],
        positions: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Give every expert that a layer chose a slot, and begin to read those that had none; returns at once.

        experts: i32[rows, top_k]. positions i32[rows] are for the recorder. The slots stay until the next call or
        `end_step`.
        """
        if self.recorder is not None and positions is not None:
            self.recorder.add(layer, positions, experts)
        wanted = np.unique(experts).tolist()
        if len(wanted) > self.capacity:
            raise ValueError(f"{len(wanted)} experts, {self.capacity} slots")
        self._free_failed(layer)
        self._judge(layer, wanted)
        hits = [slot for e in wanted if (slot := self.pool.slot(layer, e)) >= 0]
        for slot in hits:
            self.pool.spare(slot)
            if self.slots.state[slot] == READING:
                self.store.lanes.promote(slot)
        missing = [e for e in wanted if not self.pool.resident(layer, e)]
        claimed = self._claim(layer, missing, set(hits))
        self.store.read(layer, claimed)
        self._pinned = {*hits, *(slot for _, slot in claimed)}
        self._stats.hits += len(hits)
        self._stats.misses += len(missing)
        self._stats.reads += len(claimed)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Begin to read experts that a later layer will probably choose, the likeliest first, into reserved slots."""
        experts = [int(e) for e in experts]
        self._free_failed(layer)
        kept = self._kept()
        kept |= {slot for e in experts if (slot := self.pool.slot(layer, e)) >= 0}
        room = self.options.reserve - self._guesses()
        missing = [e for e in dict.fromkeys(experts) if not self.pool.resident(layer, e)]
        claimed = self.pool.claim(layer, missing[: max(room, 0)], kept)
        self._foretold.update((slot, layer) for _, slot in claimed)
        self._stats.reads += len(claimed)
        self.store.read(layer, claimed, prefetch=True)

    def wait(self, layer: int) -> None:
        """Until nothing of the layer is being read. Raises ExpertReadError as `check` does."""
        for slot in self._slots_of(layer, READING):
            self.store.lanes.wait(slot)
        self.check(layer)

    def check(self, layer: int) -> None:
        """Free the slots of the layer whose read failed. Raises ExpertReadError for the first of them."""
        failed = self._slots_of(layer, FAILED)
        errors = [self.store.error(layer, int(self.pool.expert[slot]), slot) for slot in failed]
        self._free_failed(layer)
        if errors:
            raise errors[0]

    def end_step(self) -> None:
        """The pass has ended, well or with an error of the house: no kernel uses a slot until the next `supply`."""
        self._judge(self.slots.table.shape[0], [])
        self._pinned = set()
        self._sweep.drop()
        self._in_step = False

    def sweep(
        self,
        now: LayerExperts,
        admit: Sequence[int] = (),
        following: LayerExperts | None = None,
    ) -> Iterator[Part]:
        """Parts of a layer's experts for `Runner.run_experts`, all READY.

        The pool stays as it is but for `admit`: those stay in it, where there is room. following: what the next layer
        will probably need; reads for it begin once those of this one have. The slots of a part are valid until the
        next one is asked for. Raises ExpertReadError.
        """
        self._free_failed(now.layer)
        try:
            yield from self._sweep.parts(now, set(admit), self._kept(), following)
        finally:
            self._forget_lost()

    def resize(self, slots: int) -> int:
        """Grow or shrink the pool, keeping the contents of what stays; returns how many slots it has then."""
        if self._in_step:  # the last pass never ended
            self.forget()
        if slots < self.pool.num_open:
            for slot in set(self._reading()) - self._pinned:
                self._settle(slot)
        now = self.pool.resize(slots, self._pinned)
        self._forget_lost()
        return now

    @property
    def stats(self) -> StreamStats:
        lanes = self.store.lanes
        self._stats.swept, self._stats.swept_hits = self._sweep.read, self._sweep.found
        self._stats.bytes_read = lanes.bytes_read()
        self._stats.bytes_wasted = self.pool.bytes_wasted
        self._stats.seconds_waited = lanes.nanoseconds_waited() / 1e9
        return self._stats

    def close(self) -> None:
        """End the lanes, close the files, give the memory back. No kernel may use a slot any more."""
        self.store.close()
        self._free_failed(None)
        self.pool.resize(0)
        if self.recorder is not None:
            self.recorder.close()

    # ---- claims -----------------------------------------------------------------------------------

    def _claim(self, layer: int, experts: list[int], pinned: set[int]) -> list[tuple[int, int]]:
        """Slots for all experts: forecasts keep theirs if that is possible, reads in flight are ended if need be."""
        kept = pinned | set(self._foretold)
        if self.pool.evictable(kept) < len(experts):
            kept = pinned
        for slot in self._reading():
            if self.pool.evictable(kept) >= len(experts):
                break
            if slot not in kept:
                self._settle(slot)
        claimed = self.pool.claim(layer, experts, kept)
        self._forget_lost()
        assert len(claimed) == len(experts), "capacity was checked"
        return claimed

    def _kept(self) -> set[int]:
        """Slots that nothing but a layer's own need takes."""
        return self._pinned | set(self._foretold)

    def _reading(self) -> list[int]:
        out: list[int] = np.flatnonzero(
            (self.slots.state == READING) & (self.pool.layer >= 0)
        ).tolist()
        return out

    def _settle(self, slot: int) -> None:
        """End the read into a slot: forget it if it has not begun, else wait for it."""
        self._warming.discard(slot)
        if self.store.lanes.cancel(slot):
            self.pool.free(slot)
            self._foretold.pop(slot, None)
        else:
            self.store.lanes.wait(slot)

    # ---- forecasts --------------------------------------------------------------------------------

    def _guesses(self) -> int:
        """Slots that forecasts hold, with those of wrong ones that are still being read."""
        reading = set(self._reading())
        self._warming &= reading
        return len(set(self._foretold) | (reading - self._pinned - self._warming))

    def _judge(self, layer: int, wanted: list[int]) -> None:
        """The layer's choice is known: confirm what was foretold rightly, give up what was not."""
        chosen = {self.pool.slot(layer, e) for e in wanted}
        for slot, of in list(self._foretold.items()):
            if of > layer:
                continue  # its turn comes
            del self._foretold[slot]
            if slot in chosen or self.pool.was_used(slot):
                continue  # an expert of the pool like any other from now on
            if self.slots.state[slot] == READING and self.store.lanes.cancel(slot):
                self.pool.free(slot)
            else:
                self.pool.doom(slot)

    def _forget_lost(self) -> None:
        """Forecasts whose slot went to another expert."""
        for slot, layer in list(self._foretold.items()):
            if self.pool.layer[slot] != layer:
                del self._foretold[slot]

    # ---- failures ---------------------------------------------------------------------------------

    def _slots_of(self, layer: int, state: int) -> list[int]:
        held = self.slots.table[layer]
        held = held[held >= 0]
        out: list[int] = held[self.slots.state[held] == state].tolist()
        return out

    def _free_failed(self, layer: int | None) -> None:
        """Of one layer, or of all."""
        layers = range(len(self.slots.table)) if layer is None else [layer]
        for slot in [slot for one in layers for slot in self._slots_of(one, FAILED)]:
            self._foretold.pop(slot, None)
            self._pinned.discard(slot)
            self.pool.free(slot)
