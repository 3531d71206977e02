"""The pool's promises under any order of calls: what is pinned or being read stays, tables agree, contents stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from experts.disk import BLOCK, layout
from headrace.artifact.records import LayerRecords
from headrace.experts.slots import SlotPool
from headrace.kernels.program import EMPTY, FAILED, READING, READY

LAYERS, EXPERTS, MAX_SLOTS = 3, 6, 10


def make_pool(slots: int, max_slots: int = MAX_SLOTS, sweep_slots: int = 2) -> SlotPool:
    records = [
        LayerRecords(i, Path("x"), 0, EXPERTS, layout((1 + i) * BLOCK)) for i in range(LAYERS)
    ]
    return SlotPool(records, LAYERS, EXPERTS, max_slots, slots, sweep_slots)


def mark(layer: int, expert: int) -> int:
    return 1 + layer * EXPERTS + expert


class PoolMachine(RuleBasedStateMachine):
    """Claims, reads that end well or badly, uses, resizes; `self.held` is what the pool is believed to hold."""

    @initialize(slots=st.integers(0, MAX_SLOTS))
    def start(self, slots: int) -> None:
        self.pool = make_pool(slots)
        self.held: dict[tuple[int, int], int] = {}

    def pick(self, data: st.DataObject, states: tuple[int, ...]) -> set[int]:
        slots = [s for s in self.held.values() if self.pool.slots.state[s] in states]
        return set(data.draw(st.lists(st.sampled_from(slots), max_size=4))) if slots else set()

    @rule(
        layer=st.integers(0, LAYERS - 1),
        experts=st.sets(st.integers(0, EXPERTS - 1)),
        data=st.data(),
    )
    def claim(self, layer: int, experts: set[int], data: st.DataObject) -> None:
        missing = [e for e in sorted(experts) if not self.pool.resident(layer, e)]
        pinned = self.pick(data, (READY, FAILED, READING))
        reading = {s for s in self.held.values() if self.pool.slots.state[s] == READING}
        possible = self.pool.evictable(pinned)
        claimed = self.pool.claim(layer, missing, pinned)
        assert [e for e, _ in claimed] == missing[:possible]
        taken = {slot for _, slot in claimed}
        assert not taken & (pinned | reading)
        assert len(taken) == len(claimed)
        self.held = {key: slot for key, slot in self.held.items() if slot not in taken}
        self.held |= {(layer, expert): slot for expert, slot in claimed}

    @rule(data=st.data(), outcome=st.sampled_from([READY, READY, FAILED]))
    def finish(self, data: st.DataObject, outcome: int) -> None:
        for slot in self.pick(data, (READING,)):
            layer, expert = int(self.pool.layer[slot]), int(self.pool.expert[slot])
            self.pool.slots.memory[slot] = mark(layer, expert)
            self.pool.slots.state[slot] = outcome

    @rule(layer=st.integers(0, LAYERS - 1), expert=st.integers(0, EXPERTS - 1), data=st.data())
    def adopt(self, layer: int, expert: int, data: st.DataObject) -> None:
        """What a sweep has read into one of its slots stays."""
        if self.pool.resident(layer, expert):
            return
        slot = data.draw(st.sampled_from(sorted(self.pool.sweep_slots)))
        pinned = self.pick(data, (READY, FAILED, READING))
        reading = {s for s in self.held.values() if self.pool.slots.state[s] == READING}
        may = [s for key, s in self.held.items() if key[0] <= layer and s not in pinned | reading]
        possible = self.pool.num_free + len(may)
        self.pool.slots.memory[slot] = mark(layer, expert)
        self.pool.slots.state[slot] = READY
        given = self.pool.adopt(layer, expert, slot, pinned)
        assert (given is None) == (possible == 0)
        if given is None:
            self.pool.slots.state[slot] = EMPTY
            return
        assert given in may or given not in self.held.values()
        assert given in self.pool.sweep_slots
        assert slot not in self.pool.sweep_slots
        self.held = {key: s for key, s in self.held.items() if s != given}
        self.held[layer, expert] = slot

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.pool.slots.used[list(self.pick(data, (READY,)))] = 1

    @rule(data=st.data(), doom=st.booleans())
    def doom(self, data: st.DataObject, doom: bool) -> None:
        for slot in self.pick(data, (READY, READING)):
            self.pool.doom(slot) if doom else self.pool.spare(slot)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for slot in self.pick(data, (READY, FAILED)):
            self.pool.free(slot)
            self.held = {key: s for key, s in self.held.items() if s != slot}

    @rule(slots=st.integers(0, MAX_SLOTS), data=st.data())
    def resize(self, slots: int, data: st.DataObject) -> None:
        pinned = self.pick(data, (READY, READING))
        fixed = pinned | {s for s in self.held.values() if self.pool.slots.state[s] == READING}
        before, had = self.pool.num_open, dict(self.held)
        now = self.pool.resize(slots, pinned)
        self.held = {k: s for k, s in self.held.items() if self.pool.slot(*k) == s}
        assert now == max(slots, len(fixed))
        assert fixed <= set(self.held.values())
        assert slots < before or self.held == had
        assert len(self.held) >= min(len(had), slots)  # nothing goes that could have stayed

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, slots = self.pool, self.pool.slots
        table = {(int(i), int(j)): int(slots.table[i, j]) for i, j in np.argwhere(slots.table >= 0)}
        assert table == self.held
        assert len(set(table.values())) == len(table) <= pool.num_open
        for (layer, expert), slot in table.items():
            assert (pool.layer[slot], pool.expert[slot]) == (layer, expert)
            assert slots.state[slot] in (READING, READY, FAILED)
            if slots.state[slot] == READY:
                assert (slots.memory[slot] == mark(layer, expert)).all()
        free = [s for s in range(len(slots.state)) if s not in set(table.values())]
        assert (slots.state[free] == EMPTY).all()
        assert (slots.used[free] == 0).all()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def fill(pool: SlotPool, layer: int, experts: list[int]) -> list[int]:
    slots = [slot for _, slot in pool.claim(layer, experts, ())]
    pool.slots.state[slots] = READY
    return slots


def test_the_expert_used_least_goes_first() -> None:
    pool = make_pool(4)
    a, b, c, d = fill(pool, 0, [0, 1, 2, 3])
    pool.slots.used[[a, c]] = (3, 1)
    assert fill(pool, 1, [0]) == [b]  # the first of the unused behind the hand
    pool.slots.used[b] = 2
    assert fill(pool, 1, [1]) == [d]
    pool.slots.used[d] = 2
    assert fill(pool, 1, [2]) == [c]
    pool.slots.used[c] = 9
    assert fill(pool, 0, [1]) == [d]  # two uses, as b: the hand had passed b


def test_an_expert_that_comes_back_is_remembered() -> None:
    pool = make_pool(2)
    a, b = fill(pool, 0, [0, 1])
    pool.slots.used[[a, b]] = (200, 1)
    assert fill(pool, 1, [0]) == [b]
    pool.slots.used[b] = 255
    assert fill(pool, 1, [1]) == [a]
    assert fill(pool, 0, [0]) == [a]
    pool.slots.used[a] = 1
    assert fill(pool, 1, [2]) == [a]  # 201 uses are fewer than 255
    pool.credit(1, [2], np.array([300]))
    assert fill(pool, 1, [3]) == [b]


def test_old_uses_fade() -> None:
    pool = make_pool(2)
    a, b = fill(pool, 0, [0, 1])
    pool.slots.used[a] = 255
    for _ in range(40):  # b is used as often, but later
        pool.slots.used[b] = 20
        pool.resize(2)
        pool.claim(0, [], ())
        pool._learn()
    assert fill(pool, 1, [0]) == [a]


def test_doomed_experts_go_first_and_count_as_wasted_unless_used() -> None:
    pool = make_pool(3)
    a, b, c = fill(pool, 1, [0, 1, 2])
    pool.doom(c)
    pool.doom(b)
    pool.slots.used[c] = 1
    assert fill(pool, 0, [4]) == [b]
    assert pool.bytes_wasted == 2 * BLOCK
    assert fill(pool, 0, [5]) == [c]
    assert pool.bytes_wasted == 2 * BLOCK
    assert pool.resident(1, 0)
    assert pool.slot(1, 0) == a


def resident_bytes(pool: SlotPool) -> int:
    """Memory behind the pool's slots, as the kernel counts it."""
    first = pool.slots.memory.ctypes.data
    last, inside, total = first + pool.slots.memory.nbytes, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = first < end and begin < last
        elif inside and head == "Rss:":
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("size", [BLOCK, 5 * BLOCK, 1280 << 10, 2 << 20])
def test_closed_slots_hold_no_memory(size: int) -> None:
    count = max((16 << 20) // size, 8)
    records = [LayerRecords(0, Path("x"), 0, count, layout(size))]
    pool = SlotPool(
        records, 1, count, (1 << 38) // size, count
    )  # a quarter of a terabyte, reserved
    assert resident_bytes(pool) == 0
    for slot in fill(pool, 0, list(range(count))):
        pool.slots.memory[slot] = slot % 251
    assert resident_bytes(pool) == count * size
    for slots in (count // 2, 2):
        pool.slots.used[[3, 5]] = 1
        assert pool.resize(slots) == slots
        assert resident_bytes(pool) == slots * size
    assert {pool.slot(0, 3), pool.slot(0, 5)} == {3, 5}
    assert (pool.slots.memory[5] == 5).all()
    pool.resize(count)
    assert resident_bytes(pool) <= count * size
    pool.slots.memory[:count] = 7
    assert resident_bytes(pool) == count * size


@pytest.mark.parametrize("slots", [-1, MAX_SLOTS + 1])
def test_sizes_out_of_range_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        make_pool(slots)
    with pytest.raises(ValueError, match="slots"):
        make_pool(1).resize(slots)


def test_memory_is_aligned_for_direct_reads() -> None:
    memory = make_pool(1).slots.memory
    assert memory.ctypes.data % BLOCK == 0
    assert memory.strides[0] % BLOCK == 0
