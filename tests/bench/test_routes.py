"""The simulator: its optimum is one, the pool is close to the policy that it follows, and the others do what their
names say."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from bench.routes import POLICIES, belady, clock, lfu, lru, main, rates, steps_of
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.disk import BLOCK, layout
from headrace.artifact.records import LayerRecords
from headrace.experts.slots import SlotPool
from headrace.experts.trace import RouteHeader, RouteRecorder
from headrace.kernels.program import READY

KEYS = 6


def steps_strategy(width: int, most: int) -> st.SearchStrategy[list[list[int]]]:
    step = st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=width).map(sorted)
    return st.lists(step, max_size=most)


def pool_hits(steps: list[list[int]], slots: int) -> int:
    """Hits of the real pool."""
    pool = SlotPool([LayerRecords(0, Path("x"), 0, KEYS, layout(BLOCK))], 1, KEYS, slots, slots)
    hits = 0
    for step in steps:
        held = [pool.slot(0, e) for e in step if pool.resident(0, e)]
        hits += len(held)
        pool.claim(0, [e for e in step if not pool.resident(0, e)], held)
        now = pool.slots.table[0, step]
        pool.slots.state[now] = READY
        pool.slots.used[now] = 1
    return hits


def optimum(steps: list[list[int]], slots: int) -> int:
    """The most hits of any policy, by trying all."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        step = frozenset(steps[at])
        others = held - step
        room = min(slots - len(step), len(others))
        kept = [step | set(c) for c in combinations(sorted(others), room)]
        return len(held & step) + max(best(at + 1, frozenset(k)) for k in kept)

    return best(0, frozenset())


@given(steps=steps_strategy(3, 40), slots=st.integers(3, KEYS))
@settings(max_examples=60, deadline=None)
def test_the_pool_is_no_better_than_the_optimum(steps: list[list[int]], slots: int) -> None:
    assert pool_hits(steps, slots) <= belady(steps, slots)


def test_the_pool_follows_its_policy() -> None:
    """On skewed routes it hits about as often as the fading LFU of the simulator: ties go another way."""
    rng = np.random.default_rng(2)
    weights = 1.0 / np.arange(1, KEYS + 1)
    steps = [
        sorted(rng.choice(KEYS, 2, replace=False, p=weights / weights.sum()).tolist())
        for _ in range(2000)
    ]
    for slots in (3, 4):
        ours, theirs = pool_hits(steps, slots), lfu(steps, slots)
        assert abs(ours - theirs) <= 0.03 * 2 * len(steps)
        assert ours > clock(steps, slots)


@given(steps=steps_strategy(2, 10), slots=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_belady_is_the_optimum(steps: list[list[int]], slots: int) -> None:
    assert belady(steps, slots) == optimum(steps, slots)
    assert all(policy(steps, slots) <= belady(steps, slots) for policy in POLICIES.values())


def test_known_sequences() -> None:
    once = [[k] for k in [0, 1, 2, 0, 1, 3, 0, 1, 2, 3]]
    assert lru(once, 3) == 4
    assert belady(once, 3) == 5
    often = [[k] for k in [0, 0, 0, 1, 2, 3, 4, 0]]
    assert lru(often, 2) == 2
    assert lfu(often, 2) == 3


def test_with_room_for_all_only_the_first_use_misses() -> None:
    rng = np.random.default_rng(1)
    steps = [rng.permutation(KEYS)[:3].tolist() for _ in range(50)]
    first = len({key for step in steps for key in step})
    assert set(rates(steps, KEYS).values()) == {1 - first / 150}
    with pytest.raises(ValueError, match="fewer than a step needs"):
        rates(steps, 2)


def test_a_recording_becomes_steps(tmp_path: Path) -> None:
    recorder = RouteRecorder(tmp_path / "routes", RouteHeader(2, 4, 2))
    recorder.add(0, np.array([7]), np.array([[1, 3]]))
    recorder.add(1, np.array([7]), np.array([[0, 3]]))
    recorder.close()
    assert steps_of(tmp_path / "routes") == ([[1, 3], [4, 7]], 8)


def test_a_file_that_is_no_recording_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 40)
    for name, experts in (("one", 4), ("two", 8)):
        RouteRecorder(tmp_path / name, RouteHeader(2, experts, 2)).close()
    for names in (["none"], ["garbage"], ["one", "two"]):
        monkeypatch.setattr("sys.argv", ["routes", *(str(tmp_path / n) for n in names)])
        assert main() == 2
        captured = capsys.readouterr()
        assert not captured.out
        assert captured.err.startswith(f"error: {tmp_path / names[-1]}: ")
        assert captured.err.count("\n") == 1
