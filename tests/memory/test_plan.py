"""A plan accounts for every byte, stays in its budget, and grows with it; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.errors import InputError, MemoryBudgetError, UnsupportedError
from headrace.memory.inputs import ModelFacts, PlanOptions, Workspace
from headrace.memory.ledger import Plan, Refusal
from headrace.memory.machine import MAX_BYTES, Limit, Machine, simulated
from headrace.memory.plan import plan
from headrace.memory.sizing import BASE_WINDOW, Sizer
from memory.model import DENSE, GB, MACHINE, MB, MIXTURE

HUGE = Machine(physical_bytes=1 << 60, available_bytes=1 << 60, cores=1)


@st.composite
def facts(draw: st.DrawFn) -> ModelFacts:
    """Models of every size, dense and mixed."""
    layers = draw(st.integers(0, 60))
    experts = draw(st.integers(1, 256)) if layers else 0
    return ModelFacts(
        dense_bytes=draw(st.integers(0, 8 * GB)),
        kv_bytes_per_token=draw(st.integers(0, 200_000)),
        context=draw(st.integers(1, 1 << 20)),
        workspace=Workspace(
            draw(st.integers(0, 300 * MB)),
            draw(st.integers(0, MB)),
            draw(st.integers(0, 1000)),
            draw(st.integers(0, 50_000)),
            draw(st.integers(0, 16)),
            draw(st.integers(0, 4096)),
            draw(st.integers(0, 40_000)),
        ),
        expert_slot_bytes=draw(st.integers(1, 50 * MB)) if layers else 0,
        num_moe_layers=layers,
        num_experts=experts,
        top_k=draw(st.integers(1, experts)) if layers else 0,
        text_bytes=draw(st.integers(0, 100 * MB)),
    )


gigabytes = st.floats(0.01, 200, allow_nan=False)
contexts = st.one_of(st.just("auto"), st.integers(1, 1 << 20))


@given(facts(), gigabytes, contexts)
@settings(max_examples=200, deadline=None)
def test_the_ledger_is_exact_and_inside_the_target(
    model: ModelFacts, gb: float, context: str
) -> None:
    made = plan(HUGE, model, PlanOptions(memory_gb=gb, max_context=context))
    assume(isinstance(made, Plan))
    assert made.ledger.total == made.target_bytes == round(gb * 1e9)
    assert all(nbytes >= 0 for nbytes in made.ledger.rows().values())
    assert made.ledger.committed <= made.target_bytes
    assert made.ledger.pool == made.pool_slots * model.expert_slot_bytes
    beside = made.lookahead_slots + made.sweep_slots
    assert made.ledger.lookahead == beside * model.expert_slot_bytes
    assert made.pool_slots >= model.top_k
    assert made.resident or made.lookahead_slots > model.top_k
    assert made.pool_slots <= model.num_slots
    assert 1 <= made.chunk_rows <= made.window <= model.context
    assert [c.window for c in made.candidates if c.taken] == [made.window]


@given(facts(), gigabytes, gigabytes, contexts)
@settings(max_examples=200, deadline=None)
def test_a_larger_budget_takes_nothing_away(
    model: ModelFacts, one: float, other: float, context: str
) -> None:
    """Neither experts, in any window and in auto, nor context, nor the plan itself."""
    low, high = sorted((one, other))
    small, large = (
        plan(HUGE, model, PlanOptions(memory_gb=gb, max_context=context)) for gb in (low, high)
    )
    assume(isinstance(small, Plan))
    assert isinstance(large, Plan)
    assert large.pool_slots >= small.pool_slots
    assert large.window >= small.window
    if large.window == small.window and not (large.resident and not small.resident):
        assert (
            large.chunk_rows >= small.chunk_rows
        )  # with all experts in memory long passes gain nothing


@given(facts(), st.integers(1, 1 << 20), st.integers(0, 20 * MB))
@settings(max_examples=200, deadline=None)
def test_the_least_budget_is_exact(model: ModelFacts, window: int, more: int) -> None:
    """Refused one byte below what the refusal names, planned from there on."""
    window = min(window, model.context)
    sizer = Sizer(HUGE, model, PlanOptions(max_context=window))
    needed = sizer.needed(window)
    assert sizer.fit(needed - 1, window) is None
    assert sizer.fit(needed + more, window) is not None


@given(facts(), gigabytes, contexts)
@settings(max_examples=200, deadline=None)
def test_refused_only_when_nothing_fits(model: ModelFacts, gb: float, context: str) -> None:
    made = plan(HUGE, model, PlanOptions(memory_gb=gb, max_context=context))
    sizer = Sizer(HUGE, model, PlanOptions(memory_gb=gb, max_context=context))
    possible = sizer.least_window <= model.context and sizer.needed(sizer.least_window) <= round(
        gb * 1e9
    )
    assert isinstance(made, Plan) == possible
    if isinstance(made, Refusal) and sizer.least_window <= model.context:
        assert made.budget_bytes < made.needed_bytes
        nearest = re.search(r"--memory-gb ([\d.]+)", made.hint)
        assert nearest
        again = PlanOptions(memory_gb=float(nearest[1]), max_context=context)
        assert isinstance(plan(HUGE, model, again), Plan)


@given(facts(), st.integers(1, 200 * GB), st.integers(0, 200 * GB), st.booleans())
@settings(max_examples=200, deadline=None)
def test_automatic_sizes_leave_room(
    model: ModelFacts, physical: int, available: int, limited: bool
) -> None:
    machine = Machine(physical, min(physical, available), 1)
    made = plan(machine, model, PlanOptions(memory_limit_gb=5 if limited else None))
    if isinstance(made, Refusal):
        assert made.budget_bytes < made.needed_bytes
        return
    assert made.ledger.total == made.target_bytes <= machine.budget_bytes
    assert made.ledger.headroom >= 0
    assert made.limit_bytes == (5 * GB if limited else None)
    assert made.target_bytes <= (5 * GB if limited else physical * 7 // 10)


def test_more_memory_becomes_experts_before_context() -> None:
    plans = [
        plan(MACHINE, MIXTURE, PlanOptions(memory_gb=gb)) for gb in (1.2, 2, 3, 4, 5, 6, 8, 20)
    ]
    assert all(isinstance(p, Plan) for p in plans)
    slots = [p.pool_slots for p in plans]
    windows = [p.window for p in plans]
    assert slots == sorted(slots)
    assert windows[:5] == [BASE_WINDOW] * 5
    assert slots[-1] == MIXTURE.num_slots
    assert windows[-1] == MIXTURE.context
    assert plans[-1].lookahead_slots == 0
    assert plans[-1].notes


@given(facts(), gigabytes, contexts)
@settings(max_examples=200, deadline=None)
def test_long_passes_cost_the_pool_little(model: ModelFacts, gb: float, context: str) -> None:
    made = plan(HUGE, model, PlanOptions(memory_gb=gb, max_context=context))
    assume(isinstance(made, Plan))
    if made.chunk_rows > 512:
        work = model.workspace
        more = work.nbytes(made.chunk_rows, made.window) - work.nbytes(512, made.window)
        assert 100 * more <= 3 * made.ledger.pool
        assert not made.resident


def test_passes_grow_with_a_pool_that_is_not_whole() -> None:
    rows = []
    for slots in (*range(400, 3072, 200), 3072):
        made = plan(MACHINE, MIXTURE, PlanOptions(pool_gb=slots * 1_300_000 / GB))
        assert isinstance(made, Plan)
        rows.append(made.chunk_rows)
    assert sorted(set(rows)) == [512, 1024, 2048]
    assert rows[:-1] == sorted(rows[:-1])
    assert rows[-1] == 512  # all experts are in memory
    streaming = [plan(MACHINE, MIXTURE, PlanOptions(memory_gb=gb)) for gb in (1.5, 2.4, 4.6)]
    assert [p.chunk_rows for p in streaming if isinstance(p, Plan)] == [512, 1024, 2048]
    short = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=4, max_context=1500))
    assert isinstance(short, Plan)
    assert short.chunk_rows == 1024
    dense = plan(MACHINE, DENSE, PlanOptions())
    assert isinstance(dense, Plan)
    assert dense.chunk_rows == 512


def test_pairs_take_bounded_memory() -> None:
    work = Workspace(7, 100, 3, per_pair=1000, pairs_per_row=8, max_pairs=40, sums_per_row=50)
    assert work.nbytes(1, 2) == 7 + 100 + 6 + 8_000
    assert work.nbytes(5, 0) == 7 + 500 + 40_000
    assert work.nbytes(6, 0) == 7 + 600 + 40_000 + 300


def test_every_candidate_has_its_reason() -> None:
    made = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=3))
    assert isinstance(made, Plan)
    reasons = {c.window: c.reason for c in made.candidates}
    assert list(reasons) == [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]
    assert reasons[4096] == "smaller than the one taken"
    assert reasons[8192].startswith("taken")
    assert "experts in memory" in reasons[16384]
    assert reasons[131072].startswith("needs ")


def test_auto_takes_no_more_than_the_model_can_use() -> None:
    made = plan(MACHINE, DENSE, PlanOptions())
    assert isinstance(made, Plan)
    assert made.window == DENSE.context
    assert made.target_bytes < 2 * GB
    assert not made.adaptive
    assert made.resident


def test_auto_keeps_to_its_share() -> None:
    made = plan(
        Machine(8 * GB, 8 * GB, 1), dataclasses.replace(MIXTURE, num_experts=512), PlanOptions()
    )
    assert isinstance(made, Plan)
    assert made.target_bytes == 56 * GB // 10
    assert made.adaptive
    less = plan(Machine(8 * GB, 8 * GB, 1), MIXTURE, PlanOptions(max_ram_percent=25))
    assert isinstance(less, Plan)
    assert less.target_bytes == 2 * GB


def test_a_limit_is_kept_and_adapts() -> None:
    busy = Machine(8 * GB, 3 * GB, 1)
    made = plan(busy, MIXTURE, PlanOptions(memory_limit_gb=6))
    assert isinstance(made, Plan)
    assert made.limit_bytes == 6 * GB
    assert made.target_bytes == 3 * GB - 8 * GB // 20
    assert made.adaptive
    lower = plan(busy, MIXTURE, PlanOptions(memory_limit_gb=6, max_ram_percent=20))
    assert isinstance(lower, Plan)
    assert lower.target_bytes == 16 * GB // 10


def test_precedence_of_the_sizes() -> None:
    def made(**options: float) -> Plan:
        result = plan(MACHINE, MIXTURE, PlanOptions(**options))
        assert isinstance(result, Plan)
        return result

    both = made(experts_per_layer=32, pool_gb=1, memory_gb=2)
    assert (both.source, both.pool_slots) == ("experts_per_layer", 32 * 24)
    assert len(both.notes) == 2
    pool = made(pool_gb=1, memory_gb=2)
    assert (pool.source, pool.pool_slots) == ("pool_gb", GB // 1_300_000)
    assert pool.ledger.total == pool.target_bytes
    assert not pool.adaptive
    assert made(pool_gb=50).pool_slots == MIXTURE.num_slots
    assert made(experts_per_layer=128).lookahead_slots == 0
    assert made(memory_gb=2).target_bytes == 2 * GB


def test_a_pool_that_cannot_be() -> None:
    def refused(model: ModelFacts = MIXTURE, **options: float) -> Refusal:
        result = plan(Machine(4 * GB, 3 * GB, 1), model, PlanOptions(**options))
        assert isinstance(result, Refusal)
        return result

    assert "this model has none" in refused(DENSE, pool_gb=1).message
    assert "--experts-per-layer 128" in refused(experts_per_layer=129).hint
    for options in ({"pool_gb": 0.001}, {"pool_gb": 3.0}, {"experts_per_layer": 128}):
        refusal = refused(**options)
        flag, value = re.search(r"--([a-z-]+) ([\d.]+)", refusal.hint).groups()  # type: ignore[union-attr]
        number = int(value) if flag.startswith("experts") else float(value)
        again = PlanOptions(**{flag.replace("-", "_"): number})
        assert isinstance(plan(Machine(4 * GB, 3 * GB, 1), MIXTURE, again), Plan), refusal


def test_a_budget_that_the_machine_has_not() -> None:
    machine = Machine(8 * GB, 3 * GB, 1)
    refusal = plan(machine, MIXTURE, PlanOptions(memory_gb=4))
    assert isinstance(refusal, Refusal)
    assert "4.00 GB" in refusal.message
    assert "3.00 GB can be had" in refusal.message
    assert isinstance(plan(machine, MIXTURE, PlanOptions(memory_gb=3)), Plan)
    assert isinstance(plan(machine, DENSE, PlanOptions(memory_gb=4)), Plan)


def test_a_window_of_its_own_choice_gives_way() -> None:
    """The budget would hold a longer context than the machine; the model itself fits."""
    tight = plan(Machine(16 * GB, 6 * GB, 1), MIXTURE, PlanOptions(memory_gb=8.5))
    roomy = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=8.5))
    assert isinstance(tight, Plan)
    assert isinstance(roomy, Plan)
    assert tight.resident
    assert roomy.window == MIXTURE.context > tight.window > BASE_WINDOW
    assert tight.ledger.committed <= 6 * GB
    assert tight.ledger.total == 85 * GB // 10
    asked = PlanOptions(memory_gb=8.5, max_context=MIXTURE.context)
    assert isinstance(plan(Machine(16 * GB, 6 * GB, 1), MIXTURE, asked), Refusal)


def test_a_window_that_does_not_fit_names_the_nearest() -> None:
    refusal = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=2, max_context=131072))
    assert isinstance(refusal, Refusal)
    window = int(re.search(r"--max-context (\d+)", refusal.hint)[1])  # type: ignore[index]
    assert isinstance(plan(MACHINE, MIXTURE, PlanOptions(memory_gb=2, max_context=window)), Plan)
    too_far = PlanOptions(memory_gb=2, max_context=window + 1)
    assert isinstance(plan(MACHINE, MIXTURE, too_far), Refusal)
    beyond = plan(MACHINE, MIXTURE, PlanOptions(max_context=131073))
    assert isinstance(beyond, Refusal)
    assert "131072" in beyond.message


def test_a_refusal_is_a_typed_error() -> None:
    refusal = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=0.1))
    assert isinstance(refusal, Refusal)
    with pytest.raises(MemoryBudgetError) as told:
        refusal.for_loading()
    assert told.value.needed_bytes > told.value.budget_bytes == 100 * MB
    assert told.value.exit_code == 2
    assert told.value.hint


def test_a_simulated_plan_loads_nothing() -> None:
    made = plan(simulated(64 * GB, None, 2), MIXTURE, PlanOptions(memory_gb=4))
    assert isinstance(made, Plan)
    with pytest.raises(UnsupportedError, match="simulated"):
        made.for_loading()
    real = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=4))
    assert real.for_loading() is real
    assert dataclasses.replace(real, simulated=True) == made


def test_what_the_process_holds_already_counts() -> None:
    """An application that holds 2 GB of its own has that much less for a model."""
    holder = dataclasses.replace(MACHINE, own_bytes=2 * GB)
    made = plan(holder, MIXTURE, PlanOptions(memory_gb=4))
    assert isinstance(made, Plan)
    assert made.ledger.base >= 2 * GB
    assert isinstance(plan(holder, MIXTURE, PlanOptions(memory_gb=2)), Refusal)


@pytest.mark.parametrize(
    "change",
    [
        {"dense_bytes": -1},
        {"dense_bytes": MAX_BYTES + 1},
        {"kv_bytes_per_token": 1 << 64},
        {"context": 0},
        {"top_k": 129},
        {"top_k": 0},
        {"expert_slot_bytes": 0},
        {"num_experts": 1 << 30},
        {"workspace": Workspace(per_row=-1)},
        {"dense_bytes": 1.5},
    ],
)
def test_impossible_facts(change: dict[str, int]) -> None:
    with pytest.raises(InputError, match="model facts"):
        dataclasses.replace(MIXTURE, **change)


def test_the_largest_facts_do_not_wrap() -> None:
    """Sums far beyond 64 bits are refused as what they are."""
    most = ModelFacts(
        MAX_BYTES, MAX_BYTES, 1 << 24, Workspace(MAX_BYTES, MAX_BYTES, MAX_BYTES), MAX_BYTES,
        1 << 24, 1 << 24, 1 << 24, MAX_BYTES,
    )  # fmt: skip
    for options in (PlanOptions(), PlanOptions(memory_gb=4e9), PlanOptions(experts_per_layer=1)):
        refusal = plan(HUGE, most, options)
        assert isinstance(refusal, Refusal)
        assert refusal.needed_bytes > MAX_BYTES


def test_retained_conversations_have_their_row() -> None:
    made = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=4, retained_contexts=2))
    assert isinstance(made, Plan)
    assert made.ledger.retained == 2 * made.ledger.kv
    assert made.ledger.total == made.target_bytes


def test_a_budget_beyond_the_machine_is_refused_with_the_nearest() -> None:
    """Of what the machine has at all, whatever the model would use of it; a group's limit is part of the machine."""
    group = Limit("/g", 3 * GB, 0)
    for machine in (Machine(8 * GB, 7 * GB, 1), Machine(64 * GB, 60 * GB, 1, limits=(group,))):
        capacity = machine.capacity_bytes
        for gb in (capacity / 1e9 + 0.01, 1000, 4e9):
            refusal = plan(machine, DENSE, PlanOptions(memory_gb=gb))
            assert isinstance(refusal, Refusal)
            assert "more than this machine has" in refusal.message
            assert ("/g" in refusal.message) == bool(machine.limits)
            nearest = float(re.search(r"--memory-gb ([\d.]+)", refusal.hint)[1])  # type: ignore[index]
            assert isinstance(plan(machine, DENSE, PlanOptions(memory_gb=nearest)), Plan)
        assert isinstance(plan(machine, DENSE, PlanOptions(memory_gb=capacity / 1e9)), Plan)
    pages = Machine(64 * GB, 60 * GB, 1, limits=(Limit("/g", 4 * GB // 4096 * 4096, 0),))
    assert isinstance(plan(pages, DENSE, PlanOptions(memory_gb=4)), Plan)


def test_a_pool_beyond_the_machine_is_refused_with_the_nearest() -> None:
    refusal = plan(Machine(8 * GB, 7 * GB, 1), MIXTURE, PlanOptions(pool_gb=9))
    assert isinstance(refusal, Refusal)
    nearest = float(re.search(r"--pool-gb ([\d.]+)", refusal.hint)[1])  # type: ignore[index]
    made = plan(Machine(8 * GB, 7 * GB, 1), MIXTURE, PlanOptions(pool_gb=nearest))
    assert isinstance(made, Plan)
    assert made.pool_slots == MIXTURE.num_slots


@given(st.integers(0, 60 * MB), st.integers(0, 40 * MB), st.integers(80, 400))
@settings(max_examples=100, deadline=None)
def test_a_group_of_a_budgets_size_has_it(anonymous: int, beside: int, above: int) -> None:
    """What the group charges for this process is in the plan's base, and is not counted again."""
    least = Sizer(MACHINE, MIXTURE, PlanOptions()).needed(512)
    limit = least + above * MB
    used = anonymous + beside
    machine = Machine(
        64 * GB, 60 * GB, 1, limits=(Limit("/g", limit, used),), own_bytes=anonymous, charged_bytes=used,
    )  # fmt: skip
    made = plan(machine, MIXTURE, PlanOptions(memory_gb=limit / 1e9))
    assert isinstance(made, Plan)
    assert made.ledger.base >= used
    assert made.ledger.committed <= limit


def test_a_window_gives_way_where_not_all_experts_are_in_memory() -> None:
    """Near the least budget the margin is small: what the group lacks is taken from an automatic window."""
    gb = 1.0
    while plan(MACHINE, MIXTURE, PlanOptions(memory_gb=gb)).window >= 6000:  # type: ignore[union-attr]
        gb -= 0.01
    roomy = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=gb))
    assert isinstance(roomy, Plan)
    busy = Machine(64 * GB, 60 * GB, 1, limits=(Limit("/g", round(gb * 1e9), 30 * MB),))
    made = plan(busy, MIXTURE, PlanOptions(memory_gb=gb))
    assert isinstance(made, Plan)
    assert made.window < roomy.window
    assert made.pool_slots == roomy.pool_slots
    assert made.ledger.committed <= busy.budget_bytes
    asked = plan(busy, MIXTURE, PlanOptions(memory_gb=gb, max_context=roomy.window))
    assert isinstance(asked, Refusal)


def test_a_hint_says_what_helps() -> None:
    """A small group of one's own is not helped by closing other programs."""
    least = Sizer(MACHINE, MIXTURE, PlanOptions(max_context=512)).needed(512)
    options = PlanOptions(memory_gb=-(-least // 10_000_000) / 100, max_context=512)

    def hint(limit: int, used: int, available: int = 60 * GB) -> str:
        refusal = plan(
            Machine(64 * GB, available, 1, limits=(Limit("/g", limit, used),)), MIXTURE, options
        )
        assert isinstance(refusal, Refusal)
        return refusal.hint

    assert "raise the limit of /g" in hint(least // 2, 0)
    assert "end other programs of /g" in hint(2 * least, 2 * least - least // 2)
    assert "close other programs" in hint(2 * least, 0, available=least // 2)
