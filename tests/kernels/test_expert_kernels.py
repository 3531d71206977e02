"""Layers with experts: every tier equals the reference, whatever the parts, the rows and the slots."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import ExpertReadError
from headrace.kernels import program as p
from headrace.kernels.select import TIERS, select, unavailable
from headrace.memory.facts import mixture_workspace
from kernels.models import CONFIG, ROUTED, VARIANTS, Model, batch

NATIVE = [tier for tier in TIERS if tier != "reference"]


class Run:
    """A runner over a model with a cache of its own."""

    def __init__(self, model: Model, tier: str, threads: int = 1, rows: int = 160) -> None:
        self.model = model
        self.runner = select(tier, threads=threads).compile(
            model.program, capacity=rows, logit_capacity=rows
        )
        raw = np.zeros(8 * model.program.shape.page_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.cache = raw[start:][: 8 * model.program.shape.page_bytes].reshape(8, -1)
        self.slots = model.slots()
        self.runner.bind_slots(self.slots)

    def read(self, rows: int, start: int = 0) -> bytes:
        """Logits of every row and the cache."""
        size = len(self.model.program.ops)
        assert self.runner.run(0, size, batch(rows, start), self.cache) == size
        return self.runner.logits(rows).tobytes() + self.cache.tobytes()

    def read_in_parts(self, rows: int, parts: list[list[int]]) -> bytes:
        """As `read`, with no expert in the table and every layer's experts run in parts."""
        ops, given = self.model.program.ops, batch(rows)
        table = self.slots.table.copy()
        self.slots.table[:] = -1
        at = 0
        while (at := self.runner.run(at, len(ops), given, self.cache)) < len(ops):
            index = next(i for i in range(at, len(ops)) if isinstance(ops[i], p.Experts))
            layer = ops[index].layer
            assert self.runner.run(at, index, given, self.cache) == index
            for number, part in enumerate(parts, start=1):
                experts = np.array(part, np.int32)
                last = number == len(parts)
                self.runner.run_experts(index, experts, table[layer, experts], last)
            at = index + 1
        self.slots.table[:] = table
        return self.runner.logits(rows).tobytes() + self.cache.tobytes()


@pytest.fixture(params=[1, 2, 5, 13, 26])
def max_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many pairs runners hold at once: nine rows have more, so layers are computed in groups."""
    native = pytest.importorskip("headrace.kernels.native")
    monkeypatch.setattr(native, "MAX_PAIRS", request.param)
    return int(request.param)


def skip_unless_here(tier: str) -> None:
    if reason := unavailable()[tier]:
        pytest.skip(f"tier {tier}: {reason}")


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(VARIANTS[request.param])


@pytest.fixture(scope="module")
def expected(model: Model) -> bytes:
    return Run(model, "reference").read(9)


@pytest.mark.parametrize("tier", NATIVE)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_tier_equals_the_reference(
    model: Model, expected: bytes, tier: str, threads: int
) -> None:
    skip_unless_here(tier)
    run = Run(model, tier, threads)
    assert run.read(9) == expected
    assert set(run.runner.saturations().values()) == {0}
    alone = Run(model, tier, threads)
    for row in range(8):
        alone.read(1, row)
    assert (
        alone.read(1, 8)[-len(alone.cache.tobytes()) :] == expected[-len(alone.cache.tobytes()) :]
    )


@pytest.mark.parametrize("tier", NATIVE)
def test_many_rows_equal_few(model: Model, tier: str) -> None:
    skip_unless_here(tier)
    many, few = Run(model, tier, 2), Run(model, tier)
    whole = many.read(150)
    for start in range(0, 150, 15):
        few.read(15, start)
    assert few.cache.tobytes() == whole[-len(few.cache.tobytes()) :]


@pytest.mark.parametrize("tier", [*NATIVE, "reference"])
def test_parts_in_any_order_equal_the_whole(model: Model, expected: bytes, tier: str) -> None:
    skip_unless_here(tier)
    experts = list(range(model.program.shape.num_experts))
    for parts in ([experts], [experts[::-2], experts[-2::-2]], [[e] for e in reversed(experts)]):
        assert Run(model, tier, 2).read_in_parts(9, parts) == expected


@pytest.mark.parametrize("tier", NATIVE)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_groups_of_pairs_equal_the_whole(
    model: Model, expected: bytes, max_pairs: int, tier: str, threads: int
) -> None:
    skip_unless_here(tier)
    experts = list(range(model.program.shape.num_experts))
    run = Run(model, tier, threads, rows=9)
    assert run.read(9) == expected
    for parts in ([experts], [experts[::-2], [], experts[-2::-2], []], [[e] for e in experts]):
        assert run.read_in_parts(9, parts) == expected
    assert set(run.runner.saturations().values()) == {0}
    for row in range(9):
        run.read(1, row)
    assert run.cache.tobytes() == expected[-run.cache.nbytes :]


@pytest.mark.parametrize("max_pairs", [5], indirect=True)
def test_a_pass_that_ends_between_parts_leaves_no_sums(max_pairs: int) -> None:
    model = Model(CONFIG)
    expected = Run(model, "reference").read(9)
    run, size = Run(model, "portable", 2), len(model.program.ops)
    run.read(9, 9)  # other rows, whose sums would differ
    run.runner.set_watched(True)
    at = run.runner.run(0, size, batch(9, 3), run.cache)
    index = next(i for i in range(at, size) if isinstance(model.program.ops[i], p.Experts))
    run.runner.run(at, index, batch(9, 3), run.cache)
    part = np.arange(3, dtype=np.int32)
    run.runner.run_experts(index, part, run.slots.table[0, part], False)
    run.slots.state[run.slots.table[0, 4]] = p.FAILED
    part = np.array([4, 5], np.int32)
    with pytest.raises(ExpertReadError, match="layer 0, expert 4"):
        run.runner.run_experts(index, part, run.slots.table[0, part], False)
    run.slots.state[:] = p.READY
    run.runner.set_watched(False)
    run.cache[:] = 0
    assert run.read(9) == expected
    assert run.read_in_parts(9, [[5, 4, 3], [2, 1, 0]]) == expected


def test_memory_is_as_planned(model: Model, max_pairs: int) -> None:
    for rows in (2, 5, 9, 40):
        runner = Run(model, "portable", 2, rows).runner._runner  # type: ignore[attr-defined]
        wanted = mixture_workspace(model.program.shape, max_pairs).nbytes(rows, 0)
        assert runner.expert_bytes() == wanted


def test_slots_in_any_order(model: Model, expected: bytes) -> None:
    run = Run(model, "portable")
    total = len(run.slots.state)
    run.slots = model.slots(np.random.default_rng(1).permutation(total))
    run.runner.bind_slots(run.slots)
    assert run.read(9) == expected


def test_eight_bits() -> None:
    model = Model(CONFIG, bits=8)
    wanted = Run(model, "reference").read(5)
    for tier in NATIVE:
        if not unavailable()[tier]:
            assert Run(model, tier, 2).read(5) == wanted


@pytest.mark.parametrize("tier", ["portable", "reference"])
def test_a_run_stops_where_an_expert_has_no_slot(tier: str) -> None:
    model = Model(CONFIG)
    run = Run(model, tier)
    table = run.slots.table.copy()
    run.slots.table[1] = -1
    size = len(model.program.ops)
    stopped = run.runner.run(0, size, batch(2), run.cache)
    assert isinstance(model.program.ops[stopped - 1], p.Route)
    assert model.program.ops[stopped - 1].layer == 1
    chosen = run.runner.routes()
    assert chosen.shape == (2, 3)
    run.slots.table[1, chosen] = table[1, chosen]
    assert run.runner.run(stopped, size, batch(2), run.cache) == size
    assert run.runner.logits(2).tobytes() + run.cache.tobytes() == Run(model, tier).read(2)


def test_lookahead_guesses_and_changes_nothing() -> None:
    model = Model(CONFIG)
    plain, guesses, counts = Run(model, "portable").read(2), [], []
    for tier in ("portable", "reference"):
        run = Run(model, tier)
        run.runner.set_lookahead(True)
        assert run.read(2) == plain
        run = Run(model, tier)
        run.runner.set_lookahead(True)
        table = run.slots.table.copy()
        run.slots.table[1] = -1
        size = len(model.program.ops)
        stopped = run.runner.run(0, size, batch(2), run.cache)
        assert model.program.ops[stopped - 1].layer == 0  # stops early, for the guess
        guesses.append(run.runner.forecast().tolist())
        run.slots.table[1] = table[1]
        assert run.runner.run(stopped, size, batch(2), run.cache) == size
        assert run.runner.logits(2).tobytes() + run.cache.tobytes() == plain
        counts.append(run.runner.foretold())
        assert run.read(9)
        assert run.runner.foretold() == counts[-1]
        assert len(run.runner.forecast()) == 0  # too many rows to guess for
    assert guesses[0] == guesses[1]
    assert counts[0] == counts[1]
    choices, right = counts[0]
    assert choices == 2 * 3 * (model.config.num_layers - 1)
    assert 0 < right <= choices
    assert len(guesses[0]) == 2


@pytest.mark.parametrize("tier", ["portable", "reference"])
def test_a_watched_run_stops_after_every_route(tier: str) -> None:
    model = Model(CONFIG)
    run = Run(model, tier)
    run.runner.set_watched(True)
    stops, at, size = [], 0, len(model.program.ops)
    while (at := run.runner.run(at, size, batch(3), run.cache)) < size:
        stops.append(model.program.ops[at - 1])
    assert [op.layer for op in stops if isinstance(op, p.Route)] == [0, 1]
    assert run.runner.logits(3).tobytes() + run.cache.tobytes() == Run(model, tier).read(3)


def test_equally_likely_experts_are_taken_in_order() -> None:
    model = Model(CONFIG)
    for op in model.program.ops:
        if isinstance(op, p.Route):
            op.router.codes[:] = op.router.codes[0]
    for tier in ["reference", *NATIVE]:
        if not unavailable()[tier]:
            run = Run(model, tier)
            run.read(3)
            assert run.runner.routes().tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("tier", ["portable", "reference"])
def test_a_failed_read_ends_the_run(tier: str) -> None:
    model = Model(CONFIG)
    run = Run(model, tier)
    run.slots.state[run.slots.table[1]] = p.FAILED
    with pytest.raises(ExpertReadError, match="layer 1, expert"):
        run.read(2)
    run.slots.state[:] = p.READY
    assert run.read(2) == Run(model, tier).read(2)


def test_used_slots_are_marked() -> None:
    model = Model(CONFIG)
    run = Run(model, "portable")
    run.read(1)
    assert run.runner.expert_uses() == model.config.num_layers * ROUTED.top_k
    assert run.slots.used.sum() == model.config.num_layers * ROUTED.top_k
    assert run.slots.used[run.slots.table[1, run.runner.routes()[0]]].all()
