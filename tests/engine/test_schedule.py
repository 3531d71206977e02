"""The policy as a pure function: who goes into a pass, who begins, and that nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.schedule import (
    READING_PART,
    Admission,
    Claim,
    Grant,
    Holder,
    admit,
    fill,
    share,
)

CLAIMS = st.lists(
    st.builds(
        Claim,
        due=st.integers(1, 700),
        drafts=st.integers(0, 15),
        reading=st.booleans(),
        served=st.integers(0, 9),
        most=st.none() | st.integers(1, 300),
    ),
    min_size=1,
    max_size=40,
)


@given(CLAIMS, st.integers(1, 512), st.integers(1, 64))
def test_a_pass_holds_what_it_grants(claims: list[Claim], capacity: int, logits: int) -> None:
    grants = share(claims, capacity, logits)
    assert sum(g.rows + g.drafts for g in grants) <= capacity
    assert sum(1 + g.drafts for g in grants) <= logits
    assert len({g.index for g in grants}) == len(grants) == min(len(claims), capacity, logits)
    for g in grants:
        claim = claims[g.index]
        assert 1 <= g.rows <= min(claim.due, claim.most or claim.due)
        assert 0 <= g.drafts <= claim.drafts


@given(CLAIMS, st.integers(1, 64), st.integers(1, 20))
def test_nobody_waits_for_ever(claims: list[Claim], capacity: int, logits: int) -> None:
    """As many passes as there are claims serve every one, whatever the others want."""
    waiting = set(range(len(claims)))
    for number in range(10, 10 + len(claims)):
        for grant in share(claims, capacity, logits):
            waiting.discard(grant.index)
            claims[grant.index] = replace(claims[grant.index], served=number)
    assert not waiting


def test_who_writes_has_a_row_and_its_drafts_whatever_is_read() -> None:
    claims = [Claim(9000, reading=True), Claim(1, 3), Claim(1), Claim(9000, reading=True)]
    assert share(claims, 64, 16) == [Grant(1, 1, 3), Grant(2, 1), Grant(0, 8), Grant(3, 8)]


def test_prompts_have_the_whole_pass_while_nobody_writes() -> None:
    claims = [Claim(9000, reading=True), Claim(10, reading=True), Claim(9000, reading=True)]
    assert share(claims, 100, 16) == [Grant(0, 45), Grant(1, 10), Grant(2, 45)]
    assert share(claims[:1], 100, 16) == [Grant(0, 100)]


def test_prompts_have_a_place_whoever_writes() -> None:
    claims = [Claim(1) for _ in range(20)] + [Claim(50, reading=True)]
    grants = share(claims, 512, 16)
    assert len(grants) == 16
    assert grants[-1] == Grant(20, 50)
    assert READING_PART * 50 < 512


def test_a_prompt_whose_readers_gave_up_has_short_passes() -> None:
    assert share([Claim(9000, reading=True, most=7)], 512, 16) == [Grant(0, 7)]


def test_shares_are_equal_but_for_those_who_want_less() -> None:
    assert fill([5, 1, 100, 9], 20) == [5, 1, 7, 7]
    assert fill([3, 3], 0) == [0, 0]
    assert fill([], 9) == []
    assert sum(fill([100, 100, 100], 10)) == 10


def test_whoever_fits_begins_in_order_of_arrival() -> None:
    assert admit([4, 3, 1], [Holder(2)], 10) == Admission(3)
    assert admit([4, 5, 1], [Holder(2)], 10) == Admission(1)  # the last does not overtake
    assert admit([9, 1], [Holder(2)], 10) == Admission(0)
    assert admit([], [Holder(2)], 10) == Admission(0)


def test_who_stands_still_gives_way_where_that_helps() -> None:
    holders = [Holder(4, paused=True), Holder(2), Holder(4, paused=True)]
    assert admit([4], holders, 10) == Admission(1, (2,))
    assert admit([8], holders, 10) == Admission(1, (2, 0))
    assert admit([9], holders, 10) == Admission(0)
    assert admit([4, 4], holders, 10) == Admission(2, (2, 0))


@given(
    st.lists(st.integers(1, 20), max_size=10),
    st.lists(st.builds(Holder, pages=st.integers(1, 20), paused=st.booleans()), max_size=10),
    st.integers(1, 200),
)
def test_nothing_more_is_promised_than_there_is(
    waiting: list[int], holders: list[Holder], num_pages: int
) -> None:
    before = sum(h.pages for h in holders)
    decision = admit(waiting, holders, max(num_pages, before))
    left = [h for i, h in enumerate(holders) if i not in decision.evicted]
    held = sum(h.pages for h in left) + sum(waiting[: decision.count])
    assert held <= max(num_pages, before)
    assert all(holders[i].paused for i in decision.evicted)
    assert bool(decision.count) or not decision.evicted
