"""The governor's policy on recorded traces: gives back at once, takes back slowly, rests in between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import SettingError
from headrace.memory.governor import (
    CALM_S,
    GROW_COOLDOWN_S,
    POLL_S,
    Bounds,
    Governor,
    Reading,
    State,
    bounds_of,
    decide,
    reading_of,
)
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.machine import Machine, Pressure
from headrace.memory.plan import plan
from memory.model import GB, MB, MIXTURE

BOUNDS = Bounds(min_slots=8, max_slots=1000, slot_bytes=MB, low_bytes=200 * MB, high_bytes=400 * MB)
START = State(BOUNDS, 1000)
CALM = Reading(900 * MB)


def replay(trace: Iterable[Reading], state: State = START, step: float = POLL_S) -> list[int]:
    """Slots after each reading."""
    out = []
    for i, reading in enumerate(trace):
        action = decide(state, reading, i * step)
        assert action.slots == action.state.slots
        state = action.state
        out.append(action.slots)
    return out


def test_a_quiet_machine_changes_nothing() -> None:
    assert set(replay([CALM] * 20)) == {1000}


def test_between_the_lines_nothing_happens() -> None:
    half = replace(START, slots=500)
    assert set(replay([Reading(300 * MB)] * 50, half)) == {500}
    assert set(replay([Reading(900 * MB, some_avg10=5.0)] * 50, half)) == {500}


def test_short_memory_is_given_back_at_once() -> None:
    """Up to the middle between the lines, in whole slots."""
    assert replay([Reading(150 * MB)]) == [1000 - 150]
    assert replay([Reading(200 * MB)]) == [1000]
    assert replay([Reading(200 * MB - 1)]) == [1000 - 101]


def test_never_below_the_smallest_pool() -> None:
    assert replay([Reading(0)] * 30)[-1] == BOUNDS.min_slots
    assert min(replay([Reading(0)] * 30, replace(START, bounds=replace(BOUNDS, slot_bytes=1)))) == 8


def test_pressure_takes_a_quarter_and_cools_down() -> None:
    slots = replay([Reading(900 * MB, some_avg10=40.0)] * 3, step=5.0)
    assert slots == [1000 - 248] * 3
    assert replay([Reading(900 * MB, some_avg10=40.0)] * 2)[1] == 752 - 186
    assert replay([Reading(900 * MB, full_avg10=5.0)]) == [752]


def test_an_emergency_waits_for_no_cooldown() -> None:
    slots = replay([Reading(190 * MB), Reading(190 * MB), Reading(90 * MB)], step=1.0)
    assert slots[1] == slots[0]
    assert slots[2] < slots[1]


def test_recovery_is_slow_and_ends_at_the_plan() -> None:
    start = State(BOUNDS, 500, shrunk_at=0.0)
    slots = replay([CALM] * 60, start)
    grown = [i * POLL_S for i in range(1, 60) if slots[i] > slots[i - 1]]
    assert grown[0] >= CALM_S
    assert all(b - a >= GROW_COOLDOWN_S for a, b in pairwise(grown))
    assert slots == sorted(slots)
    assert slots[-1] == BOUNDS.max_slots


def test_growth_takes_only_what_is_spare() -> None:
    assert replay([Reading(403 * MB)] * 10, replace(START, slots=500))[4] == 503


def test_a_sign_of_pressure_starts_the_calm_anew() -> None:
    trace = [CALM] * 4 + [Reading(900 * MB, some_avg10=2.0)] + [CALM] * 4
    assert set(replay(trace, replace(START, slots=500))) == {500}


def test_a_recorded_squeeze() -> None:
    """Another program takes 700 MB in 30 s, stays for two minutes, and ends."""
    others = [0, 350, 700, *[700] * 8, *[0] * 60]
    state, seen = START, []
    for i, taken in enumerate(others):
        usable = 450 + (1000 - state.slots) - taken
        action = decide(state, Reading(max(0, usable) * MB), i * POLL_S)
        state = action.state
        seen.append(state.slots)
    assert seen[0] == 1000
    assert min(seen) >= 1000 - 700
    assert len(set(seen[3:11])) == 1, "the pool rests while the other program stays"
    assert seen[-1] == 1000
    changes = sum(a != b for a, b in pairwise(seen))
    assert changes <= 12


def test_a_clock_that_jumps_back_blocks_nothing() -> None:
    state = State(BOUNDS, 500, shrunk_at=1e9, grown_at=1e9, calm_since=1e9)
    assert decide(state, Reading(0), 0.0).slots == 500 - 300
    assert replay([CALM] * 10, state)[-1] > 500


readings = st.builds(Reading, st.integers(0, 2 * GB), st.floats(0, 100), st.floats(0, 100))


@given(st.lists(readings, max_size=60), st.integers(0, 1000), st.floats(0.1, 120))
@settings(max_examples=100, deadline=None)
def test_any_trace_stays_inside_the_bounds(trace: list[Reading], start: int, step: float) -> None:
    state = State(BOUNDS, max(8, start))
    slots = replay(trace, state, step)
    assert all(BOUNDS.min_slots <= s <= BOUNDS.max_slots for s in slots)
    assert slots == replay(trace, state, step)


def test_bounds_that_contradict_each_other() -> None:
    for change in (
        {"min_slots": 1001},
        {"slot_bytes": 0},
        {"low_bytes": 400 * MB},
        {"min_slots": -1},
    ):
        with pytest.raises(SettingError):
            replace(BOUNDS, **change)


class Pool:
    """Counts what a pool would be told."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def resize(self, slots: int) -> None:
        self.sizes.append(slots)


def _plan(machine: Machine, **options: float) -> Plan:
    made = plan(machine, MIXTURE, PlanOptions(**options))
    assert isinstance(made, Plan)
    return made


MACHINE = Machine(8 * GB, 6 * GB, 2)


def test_the_governor_looks_acts_and_waits() -> None:
    made, pool, now = _plan(MACHINE, memory_limit_gb=3), Pool(), [0.0]
    machines = [MACHINE]
    governor = Governor(made, pool, read=lambda: machines[-1], clock=lambda: now[0])
    assert governor.between_requests() is not None
    assert pool.sizes == []
    machines.append(replace(MACHINE, available_bytes=50 * MB))
    assert governor.between_requests() is None, "it is not time to look again"
    now[0] = POLL_S
    action = governor.between_requests()
    assert action is not None
    assert pool.sizes == [action.slots]
    assert made.min_pool_slots <= action.slots < made.pool_slots


def test_a_failed_resize_is_tried_again() -> None:
    class Failing(Pool):
        def resize(self, slots: int) -> None:
            super().resize(slots)
            raise OSError("no memory")

    made, pool, now = _plan(MACHINE, memory_limit_gb=3), Failing(), [0.0]
    governor = Governor(
        made, pool, read=lambda: replace(MACHINE, available_bytes=0), clock=lambda: now[0]
    )
    for at in (0.0, POLL_S):
        now[0] = at
        with pytest.raises(OSError, match="no memory"):
            governor.between_requests()
        assert governor.state.slots == made.pool_slots
    assert len(pool.sizes) == 2


def test_a_fixed_size_is_left_alone() -> None:
    pool = Pool()
    short = replace(MACHINE, available_bytes=0)
    governor = Governor(_plan(MACHINE, memory_gb=3), pool, read=lambda: short)
    assert governor.between_requests() is None
    assert pool.sizes == []


def test_an_automatic_plan_is_at_rest_when_nobody_else_asks() -> None:
    """A model that takes what auto gives it does not make the governor shrink it."""
    for free in (8 * GB, 4 * GB, 2 * GB):
        machine = Machine(8 * GB, free, 2)
        made = _plan(machine, max_ram_percent=100)
        loaded = replace(machine, available_bytes=free - made.ledger.committed)
        state = State(bounds_of(made, machine), made.pool_slots)
        assert decide(state, reading_of(loaded), 0.0).slots == made.pool_slots


def test_the_larger_pressure_counts() -> None:
    machine = replace(MACHINE, pressure=Pressure(1, 5), group_pressure=Pressure(7, 2))
    assert reading_of(machine) == Reading(6 * GB, 7, 5)
