"""The stream: whatever is forecast, resized or swept, a layer's experts are whole records in slots of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts.disk import BLOCK, GAP, painted, write
from headrace.errors import ExpertReadError
from headrace.experts.stream import ExpertStream, StreamOptions
from headrace.experts.sweep import LayerExperts, hottest
from headrace.experts.trace import RouteHeader, RouteRecorder, read_routes
from headrace.kernels.program import EMPTY, FAILED, READING, READY

SIZES, EXPERTS, TOP_K = [3 * BLOCK, 2 * BLOCK, 3 * BLOCK, BLOCK], 8, 3
LAYERS = len(SIZES)
ALL = LAYERS * EXPERTS
RESERVE = 4


def make_stream(folder: Path, native: Any, **options: Any) -> ExpertStream:
    records = write(folder, SIZES, EXPERTS)
    given = {
        "slots": ALL,
        "max_slots": ALL,
        "reserve": RESERVE,
        "piece_bytes": 2 * BLOCK,
        **options,
    }
    recorder = given.pop("recorder", None)
    return ExpertStream(
        records, LAYERS, EXPERTS, StreamOptions(**given), native=native, recorder=recorder
    )


def assert_whole(stream: ExpertStream, layer: int, experts: Any, slots: Any) -> None:
    for expert, slot in zip(experts, slots, strict=True):
        assert stream.slots.state[slot] == READY
        size = SIZES[layer]
        assert np.array_equal(
            stream.slots.memory[slot, :size], painted(layer, int(expert), size)
        ), (layer, expert)


def use(stream: ExpertStream, layer: int, experts: list[int]) -> None:
    """What a kernel does with the experts of a step."""
    stream.wait(layer)
    slots = stream.slots.table[layer, experts]
    assert_whole(stream, layer, experts, slots)
    stream.slots.used[slots] = 1


def assert_pool_whole(stream: ExpertStream) -> None:
    stream.store.lanes.drain()
    for layer, expert in np.argwhere(stream.slots.table >= 0).tolist():
        assert_whole(stream, layer, [expert], [stream.slots.table[layer, expert]])
    assert (stream.slots.state != EMPTY).sum() == (stream.slots.table >= 0).sum()


GUESSES = {
    "none": lambda rng, right: [],
    "right": lambda rng, right: right,
    "wrong": lambda rng, right: [e for e in range(EXPERTS) if e not in right],
    "any": lambda rng, right: rng.permutation(EXPERTS)[:TOP_K].tolist(),
}


@pytest.mark.parametrize("slots", [TOP_K, TOP_K + RESERVE, ALL // 2, ALL])
@pytest.mark.parametrize("guesses", GUESSES)
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_a_layer_has_its_experts_whatever_was_foretold(
    tmp_path: Path, native: Any, slots: int, guesses: str, num_lanes: int
) -> None:
    rng = np.random.default_rng(slots)
    stream = make_stream(tmp_path, native, slots=slots, num_lanes=num_lanes)
    for _ in range(12):
        routes = [sorted(rng.permutation(EXPERTS)[:TOP_K].tolist()) for _ in range(LAYERS)]
        for layer, chosen in enumerate(routes):
            stream.supply(layer, np.array([chosen], np.int32))
            for ahead in range(layer + 1, min(layer + 3, LAYERS)):
                stream.prefetch(ahead, GUESSES[guesses](rng, routes[ahead]))
            use(stream, layer, chosen)
        stream.end_step()
    assert_pool_whole(stream)
    stats = stream.stats
    assert stats.hits + stats.misses == 12 * LAYERS * TOP_K
    if guesses == "right":
        assert stats.bytes_wasted == 0 or slots < TOP_K + RESERVE
    stream.close()
    assert (stream.slots.table == -1).all()


@pytest.mark.parametrize("seed", range(4))
def test_resizes_and_sweeps_in_between(tmp_path: Path, native: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stream = make_stream(tmp_path, native, slots=TOP_K, num_lanes=2, sweep_slots=4)
    for _ in range(25):
        layer = int(rng.integers(LAYERS))
        chosen = sorted(rng.permutation(EXPERTS)[: int(rng.integers(1, EXPERTS + 1))].tolist())
        match int(rng.integers(4)):
            case 0:
                want = int(rng.integers(TOP_K, ALL + 1))
                kept = {tuple(k) for k in np.argwhere(stream.slots.table >= 0).tolist()}
                grown = want >= stream.capacity
                assert stream.resize(want) == want
                now = {tuple(k) for k in np.argwhere(stream.slots.table >= 0).tolist()}
                assert now <= kept
                assert len(now) <= want
                assert not grown or now == kept
            case 1:
                seen: list[int] = []
                admit = chosen[: int(rng.integers(0, 3))]
                for experts, slots, last in stream.sweep(LayerExperts(layer, chosen), admit):
                    assert_whole(stream, layer, experts, slots)
                    seen += experts.tolist()
                    assert last == (len(seen) == len(chosen))
                assert sorted(seen) == chosen
            case 2:
                stream.supply(layer, np.array(chosen[: min(TOP_K, stream.capacity)], np.int32))
                use(stream, layer, chosen[:TOP_K])
                stream.end_step()
            case 3:
                stream.prefetch(layer, chosen)
    assert_pool_whole(stream)
    stream.close()


def test_guesses_never_take_more_than_their_reserve(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=ALL // 2, reserve=3)
    for layer in (1, 2, 3):
        stream.prefetch(layer, list(range(EXPERTS)))
    assert (stream.slots.table >= 0).sum() == 3
    stream.wait(1)
    stream.supply(1, np.array([[6, 7]], np.int32))  # none of them
    stream.prefetch(2, [5])
    assert stream.pool.resident(2, 5)
    use(stream, 1, [6, 7])
    stream.resize(3)
    assert stream.stats.bytes_wasted == 3 * SIZES[1]
    stream.close()


def test_a_layer_that_needs_more_than_the_pool_is_refused(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=TOP_K)
    with pytest.raises(ValueError, match="4 experts, 3 slots"):
        stream.supply(0, np.arange(4))
    stream.close()


def test_a_guess_is_a_hit_and_counts(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native)
    stream.supply(0, np.array([[0, 1]]))
    stream.prefetch(1, [2, 3])
    use(stream, 0, [0, 1])
    stream.supply(1, np.array([[3, 4]]))
    use(stream, 1, [3, 4])
    stream.supply(0, np.array([[1, 1], [0, 1]]))
    stats = stream.stats
    assert (stats.hits, stats.misses) == (3, 3)
    assert stats.bytes_read >= 2 * SIZES[0] + 2 * SIZES[1]
    stream.close()


def test_a_wrong_guess_that_is_used_after_all_stays(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=3, reserve=1)
    stream.prefetch(1, [0])
    stream.wait(1)
    stream.supply(1, np.array([[4]]))
    stream.supply(1, np.array([[0]]))
    use(stream, 1, [0])
    stream.supply(1, np.array([[5]]))
    use(stream, 1, [5])
    stream.supply(1, np.array([[6]]))
    assert [stream.pool.resident(1, e) for e in (0, 4, 5, 6)] == [True, False, True, True]
    assert stream.stats.bytes_wasted == 0
    stream.close()


def test_a_guess_that_lost_its_slot_frees_its_reserve(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=3, reserve=3)
    stream.prefetch(2, [0, 1, 2])
    stream.supply(0, np.array([[3, 4, 5]]))
    use(stream, 0, [3, 4, 5])
    stream.end_step()
    stream.prefetch(3, [6, 7])
    assert [stream.pool.resident(3, e) for e in (6, 7)] == [True, True]
    stream.close()


def test_a_pool_shrinks_while_it_is_read_into(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, reserve=ALL, num_lanes=1, piece_bytes=BLOCK)
    for layer in range(LAYERS):
        stream.prefetch(layer, list(range(EXPERTS)))
    assert stream.resize(2) == 2
    assert (stream.slots.table >= 0).sum() <= 2
    assert_pool_whole(stream)
    stream.close()


# ---- warming up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [RESERVE, 13, ALL])
def test_free_slots_are_filled_with_a_share_of_every_layer(
    tmp_path: Path, native: Any, slots: int
) -> None:
    reserve = 0 if slots == ALL else RESERVE
    stream = make_stream(tmp_path, native, slots=slots, reserve=reserve)
    stream.warm()
    assert_pool_whole(stream)
    shares = (stream.slots.table >= 0).sum(axis=1)
    assert shares.sum() == slots - reserve == stream.stats.warmed
    assert shares.max() - shares.min() <= 1
    stream.warm()
    assert stream.stats.warmed == slots - reserve
    stream.close()


@pytest.mark.parametrize("slots", [TOP_K + RESERVE, ALL // 2])
def test_what_is_needed_comes_before_what_warms_up(tmp_path: Path, native: Any, slots: int) -> None:
    stream = make_stream(tmp_path, native, slots=slots, num_lanes=1, sweep_slots=3)
    for _ in range(4):
        stream.warm()
        for layer in range(LAYERS):
            stream.supply(layer, np.array([[7, 6, 5]]))
            if layer + 1 < LAYERS:
                stream.prefetch(layer + 1, [7, 6])
            use(stream, layer, [7, 6, 5])
        stream.end_step()
        stream.warm()
        for experts, slots_, _ in stream.sweep(LayerExperts(2, range(EXPERTS)), [0]):
            assert_whole(stream, 2, experts, slots_)
        stream.resize(TOP_K)
        stream.resize(slots)
    assert_pool_whole(stream)
    stream.close()


def test_warming_up_forgives_what_cannot_be_read(damaged: Any) -> None:
    stream, mend = damaged
    stream.resize(ALL)
    stream.warm()
    stream.store.lanes.drain()
    stream.supply(2, np.array([[6, 7]]))
    use(stream, 2, [6, 7])
    mend()
    stream.supply(3, np.array([[5, 6, 7]]))
    use(stream, 3, [5, 6, 7])
    assert_pool_whole(stream)


# ---- sweeps -----------------------------------------------------------------------------------------


def test_a_sweep_takes_what_the_pool_holds_and_leaves_it_as_it_was(
    tmp_path: Path, native: Any
) -> None:
    stream = make_stream(tmp_path, native, slots=4, sweep_slots=6)
    stream.supply(0, np.array([[5, 6]]))
    stream.supply(1, np.array([[1, 3]]))
    stream.wait(1)
    table = stream.slots.table.copy()
    parts = []
    for experts, slots, last in stream.sweep(LayerExperts(0, [0, 1, 2, 4, 5, 6, 7])):
        assert_whole(stream, 0, experts, slots)
        parts.append((experts.tolist(), last))
    assert sorted(e for part, _ in parts for e in part) == [0, 1, 2, 4, 5, 6, 7]
    assert [last for _, last in parts] == [False] * (len(parts) - 1) + [True]
    assert np.array_equal(stream.slots.table, table)
    assert (stream.stats.swept, stream.stats.swept_hits) == (5, 2)
    assert [(e.tolist(), last) for e, _, last in stream.sweep(LayerExperts(1, [1, 3]))] == [
        ([1, 3], True)
    ]
    assert list(stream.sweep(LayerExperts(2, []))) == []
    assert_pool_whole(stream)
    stream.close()


def test_what_follows_is_read_while_a_layer_is_computed(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=4, sweep_slots=4)
    for layer in range(LAYERS):
        following = LayerExperts(layer + 1, range(EXPERTS)) if layer + 1 < LAYERS else None
        seen: list[int] = []
        for experts, slots, last in stream.sweep(
            LayerExperts(layer, range(EXPERTS)), [2], following
        ):
            stream.store.lanes.drain()  # what follows may not have landed on what is computed
            assert_whole(stream, layer, experts, slots)
            seen += experts.tolist()
            assert last == (len(seen) == EXPERTS)
        assert sorted(seen) == list(range(EXPERTS))
        assert stream.pool.resident(layer, 2)
        stream.store.lanes.drain()
        assert (READY in stream.slots.state[list(stream.pool.sweep_slots)]) == bool(following)
    stats = stream.stats
    assert (stats.swept, stats.bytes_read) == (ALL, sum(EXPERTS * size for size in SIZES))
    assert stats.bytes_wasted == 0
    stream.end_step()
    assert_pool_whole(stream)
    stream.close()


@pytest.mark.parametrize("then", [[0, 7], [5], []])
def test_what_followed_in_vain_is_forgotten(tmp_path: Path, native: Any, then: list[int]) -> None:
    stream = make_stream(tmp_path, native, slots=4, sweep_slots=4)
    list(stream.sweep(LayerExperts(0, [1, 2]), (), LayerExperts(1, range(EXPERTS))))
    stream.store.lanes.drain()
    parts = [
        e.tolist() for e, _, _ in stream.sweep(LayerExperts(1, then), (), LayerExperts(2, [3]))
    ]
    assert sorted(e for part in parts for e in part) == then
    assert stream.stats.bytes_wasted == SIZES[1] * len(set(range(4)) - set(then))
    stream.end_step()
    assert_pool_whole(stream)
    for experts, slots, _ in stream.sweep(LayerExperts(3, [0, 1, 2, 3, 4])):
        assert_whole(stream, 3, experts, slots)
    stream.close()


def test_a_following_layer_that_cannot_be_read_fails_when_it_comes(damaged: Any) -> None:
    stream, mend = damaged
    list(stream.sweep(LayerExperts(2, [1, 2]), (), LayerExperts(3, [6, 7])))
    with pytest.raises(ExpertReadError, match="layer 3, expert 6"):
        list(stream.sweep(LayerExperts(3, [6])))
    assert_pool_whole(stream)
    mend()
    for experts, slots, _ in stream.sweep(LayerExperts(3, [6, 7])):
        assert_whole(stream, 3, experts, slots)


def test_the_admitted_stay(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=4, sweep_slots=4)
    for slots in (4, 2):
        stream.resize(slots)
        seen = [
            e
            for experts, _, _ in stream.sweep(LayerExperts(2, range(EXPERTS)), [6, 1, 3])
            for e in experts
        ]
        assert sorted(seen) == list(range(EXPERTS))
        resident = [e for e in range(EXPERTS) if stream.pool.resident(2, e)]
        assert len(resident) == min(slots, 3)
        assert set(resident) <= {1, 3, 6}
        assert_pool_whole(stream)
    stream.close()


@pytest.mark.parametrize("admit", [[0, 1, 2], [7, 5]])
def test_what_is_admitted_takes_no_slot_of_the_same_sweep(
    tmp_path: Path, native: Any, admit: list[int]
) -> None:
    stream = make_stream(tmp_path, native, slots=1, sweep_slots=2)
    for resident in (None, 5):
        if resident is not None:
            stream.supply(1, np.array([[resident]]))
            stream.end_step()
        for experts, slots, _ in stream.sweep(LayerExperts(1, range(EXPERTS)), admit):
            stream.store.lanes.drain()  # what the next part needs may be anywhere by now
            assert_whole(stream, 1, experts, slots)
        kept = [e for e in range(EXPERTS) if stream.pool.resident(1, e)]
        assert len(kept) == 1
        assert kept[0] in {*admit, resident}
    stream.close()


def test_a_sweep_that_is_left_early_leaves_nothing_in_flight(tmp_path: Path, native: Any) -> None:
    stream = make_stream(tmp_path, native, slots=4, sweep_slots=2, num_lanes=1)
    sweep = stream.sweep(LayerExperts(0, range(EXPERTS)), [0, 7])
    next(sweep)
    sweep.close()  # type: ignore[attr-defined]
    assert READING not in stream.slots.state
    assert_pool_whole(stream)
    assert sorted(
        e for es, _, _ in stream.sweep(LayerExperts(0, range(EXPERTS))) for e in es
    ) == list(range(EXPERTS))
    stream.close()


def test_the_hottest_are_the_most_chosen() -> None:
    routes = np.array([[3, 1], [3, 2], [1, 5], [3, 2]])
    assert hottest(routes, 8, 3) == [3, 1, 2]
    assert hottest(routes, 8, 8) == [3, 1, 2, 5]
    assert hottest(routes, 8, 0) == []


# ---- failures ---------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path, native: Any) -> Any:
    """A stream whose layer 3 has lost experts 6 and 7, and what mends it."""
    stream = make_stream(tmp_path, native, slots=10)
    path = tmp_path / "experts-00002.safetensors"
    data = path.read_bytes()
    os.truncate(path, GAP + EXPERTS * SIZES[2] + 6 * SIZES[3])
    yield stream, lambda: path.write_bytes(data)
    stream.close()


def test_a_read_that_fails_ends_its_request_and_no_other(damaged: Any) -> None:
    stream, mend = damaged
    stream.supply(3, np.array([[5, 6, 7]]))
    with pytest.raises(ExpertReadError, match="layer 3, expert [67]: .*ends at byte"):
        stream.wait(3)
    assert [stream.pool.resident(3, e) for e in (5, 6, 7)] == [True, False, False]
    assert FAILED not in stream.slots.state
    stream.supply(3, np.array([[4, 5]]))
    use(stream, 3, [4, 5])
    stream.supply(2, np.array([[6, 7]]))
    use(stream, 2, [6, 7])
    mend()
    stream.supply(3, np.array([[5, 6, 7]]))
    use(stream, 3, [5, 6, 7])
    assert_pool_whole(stream)


def test_a_forecast_that_fails_is_tried_again_when_it_is_needed(damaged: Any) -> None:
    stream, mend = damaged
    stream.prefetch(3, [6, 7, 0])
    stream.store.lanes.drain()
    stream.supply(0, np.array([[1]]))
    use(stream, 0, [1])
    mend()
    stream.supply(3, np.array([[0, 6]]))
    use(stream, 3, [0, 6])
    assert not stream.pool.resident(3, 7)
    assert_pool_whole(stream)


def test_a_sweep_that_fails_leaves_nothing_half_filled(damaged: Any) -> None:
    stream, mend = damaged
    with pytest.raises(ExpertReadError, match="layer 3, expert 6"):
        list(stream.sweep(LayerExperts(3, range(EXPERTS)), [0, 6]))
    assert not stream.pool.resident(3, 6)
    assert_pool_whole(stream)
    mend()
    for experts, slots, _ in stream.sweep(LayerExperts(3, range(EXPERTS)), [0, 6]):
        assert_whole(stream, 3, experts, slots)
    assert stream.pool.resident(3, 6)


# ---- recorded routes --------------------------------------------------------------------------------


def test_the_recorder_writes_what_was_supplied(tmp_path: Path) -> None:
    path, header = tmp_path / "routes", RouteHeader(LAYERS, EXPERTS, 2)
    stream = make_stream(tmp_path, None, recorder=RouteRecorder(path, header))
    stream.supply(1, np.array([[3, 1], [0, 7]]), np.array([10, 11]))
    stream.supply(2, np.array([[5, 4]]), np.array([12]))
    stream.close()
    read, routes = read_routes(path)
    assert read == header
    assert routes["position"].tolist() == [10, 11, 12]
    assert routes["layer"].tolist() == [1, 1, 2]
    assert routes["experts"].tolist() == [[3, 1], [0, 7], [5, 4]]
    path.write_bytes(path.read_bytes()[:-3])
    assert len(read_routes(path)[1]) == 2
