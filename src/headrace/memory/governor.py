"""Gives memory back when others need it: a pure policy, and a thin governor that acts on it.

The pool shrinks at once when memory is short and grows back slowly, never above the plan. Between the two
lines nothing happens, so a pool at rest stays at rest. A size changes no token; this file only says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.errors import SettingError
from headrace.memory.ledger import Plan
from headrace.memory.machine import Machine, read_machine

POLL_S = 15.0
SHRINK_COOLDOWN_S = 15.0
GROW_COOLDOWN_S = 60.0
CALM_S = 60.0  # without any sign of pressure before the pool grows
SOME_HIGH, FULL_HIGH, SOME_CALM = 10.0, 5.0, 1.0  # percent of the last ten seconds
PRESSURE_SHARE = 4  # pressure takes a quarter of what may be taken
GROW_SHARE = 8  # and it comes back in eighths


@dataclass(frozen=True)
class Bounds:
    """Between what the pool moves, in slots, and how much memory others are left, in bytes.

    Below `low_bytes` memory is short; the pool grows only out of what is above `high_bytes`.
    """

    min_slots: int
    max_slots: int
    slot_bytes: int
    low_bytes: int
    high_bytes: int

    def __post_init__(self) -> None:
        ordered = 0 <= self.min_slots <= self.max_slots and 0 <= self.low_bytes < self.high_bytes
        if not ordered or self.slot_bytes < 1:
            raise SettingError(f"governor bounds {self} contradict each other")


@dataclass(frozen=True)
class Reading:
    """What the machine says at one moment; pressures are the larger of system and control group."""

    usable_bytes: int
    some_avg10: float = 0.0
    full_avg10: float = 0.0


@dataclass(frozen=True)
class State:
    """What the policy remembers. Times in seconds of one clock; None is never."""

    bounds: Bounds
    slots: int
    shrunk_at: float | None = None
    grown_at: float | None = None
    calm_since: float | None = None


@dataclass(frozen=True)
class Action:
    """The slots that the pool should have now, why, and what to remember."""

    slots: int
    reason: str
    state: State


def decide(state: State, reading: Reading, now: float) -> Action:
    """What to do with the pool now. Pure: the same trace gives the same actions."""
    wanted, reason = _shrunk(state, reading)
    if reason:
        state = replace(state, calm_since=None)
        emergency = reading.usable_bytes < state.bounds.low_bytes // 2
        if wanted == state.slots:
            return Action(state.slots, f"{reason}; the pool is as small as it may be", state)
        if not emergency and _within(state.shrunk_at, now, SHRINK_COOLDOWN_S):
            return Action(state.slots, f"{reason}; shrunk a moment ago", state)
        return Action(wanted, reason, replace(state, slots=wanted, shrunk_at=now))
    if reading.usable_bytes < state.bounds.high_bytes or reading.some_avg10 >= SOME_CALM:
        return Action(state.slots, "", replace(state, calm_since=None))
    since = now if state.calm_since is None or state.calm_since > now else state.calm_since
    return _grown(replace(state, calm_since=since), reading, now, calm=now - since >= CALM_S)


def _shrunk(state: State, reading: Reading) -> tuple[int, str]:
    """Slots after giving back, and why; an empty reason where nothing is short."""
    bounds, loose = state.bounds, max(0, state.slots - state.bounds.min_slots)
    give, reason = 0, ""
    if reading.some_avg10 >= SOME_HIGH or reading.full_avg10 >= FULL_HIGH:
        give, reason = -(-loose // PRESSURE_SHARE), "programs wait for memory"
    if reading.usable_bytes < bounds.low_bytes:
        missing = (bounds.low_bytes + bounds.high_bytes) // 2 - reading.usable_bytes
        give, reason = max(give, -(-missing // bounds.slot_bytes)), "memory is short"
    return state.slots - min(give, loose), reason


def _grown(state: State, reading: Reading, now: float, *, calm: bool) -> Action:
    """One step back towards the plan, out of what is above the high line."""
    bounds = state.bounds
    spare = (reading.usable_bytes - bounds.high_bytes) // bounds.slot_bytes
    step = max(1, (bounds.max_slots - bounds.min_slots) // GROW_SHARE)
    slots = min(bounds.max_slots, state.slots + min(step, spare))
    cooling = any(_within(at, now, GROW_COOLDOWN_S) for at in (state.shrunk_at, state.grown_at))
    if not calm or cooling or slots <= state.slots:
        return Action(state.slots, "", state)
    return Action(slots, "memory is free again", replace(state, slots=slots, grown_at=now))


def _within(then: float | None, now: float, seconds: float) -> bool:
    return then is not None and 0 <= now - then < seconds


def bounds_of(plan: Plan, machine: Machine) -> Bounds:
    """The bounds that a plan sets on a machine.

    The upper line is what automatic targets leave to others, so a pool at the plan's size is at rest.
    """
    low = max(1, machine.capacity_bytes // 40)
    return Bounds(plan.min_pool_slots, plan.pool_slots, max(1, plan.slot_bytes), low, 2 * low)


def reading_of(machine: Machine) -> Reading:
    """What the policy looks at, of a machine as it is now."""
    found = [p for p in (machine.pressure, machine.group_pressure) if p is not None]
    return Reading(
        machine.usable_bytes,
        max((p.some_avg10 for p in found), default=0.0),
        max((p.full_avg10 for p in found), default=0.0),
    )


class Resizable(Protocol):
    """A pool whose slots can be changed while it lives."""

    def resize(self, slots: int) -> None:
        """Change the number of slots, those of the lookahead not counted; what still fits stays."""


class Governor:
    """Looks at the machine between requests and resizes a pool. Used by the thread that runs them."""

    def __init__(
        self,
        plan: Plan,
        pool: Resizable,
        *,
        read: Callable[[], Machine] = read_machine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The pool has the plan's slots. Of a plan that is not adaptive nothing is ever resized."""
        self._pool = pool
        self._read = read
        self._clock = clock
        self._adaptive = plan.adaptive
        self._plan = plan
        self._looked_at: float | None = None
        self.state = State(bounds_of(plan, read()), plan.pool_slots)

    @property
    def given_back(self) -> int:
        """Bytes of the plan that the pool does not have now."""
        return (self._plan.pool_slots - self.state.slots) * self._plan.slot_bytes

    def between_requests(self) -> Action | None:
        """Look, at most every POLL_S seconds, and act; None where it was not time to look."""
        now = self._clock()
        if not self._adaptive or _within(self._looked_at, now, POLL_S):
            return None
        self._looked_at = now
        action = decide(self.state, reading_of(self._read()), now)
        if action.slots != self.state.slots:
            self._pool.resize(action.slots)  # where it fails, the state stays as it was
        self.state = action.state
        return action
