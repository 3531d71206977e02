"""What is drafted from a history, how many drafts pay, and what is asked for."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.speculate import (
    AUTO_DEPTH,
    COMPARED,
    FREE,
    MAX_DEPTH,
    NGRAMS,
    STALE,
    Depth,
    Lookup,
    Speculation,
    depth_of,
)
from headrace.errors import SettingError


def searched(history: list[int], limit: int) -> list[int]:
    """What `Lookup` has to find, without an index."""
    for n in NGRAMS:
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[-n:]:
                longer = list(history)
                for at in range(end, end + limit):
                    longer.append(longer[at])
                return longer[len(history) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
    st.integers(1, 12),
)
def test_the_latest_of_the_longest_is_found(
    tokens: list[int], steps: list[int], limit: int
) -> None:
    """However much the history grows between calls."""
    lookup, length = (
        Lookup(4096),
        0,
    )  # so large that no two n-grams share a place, or it would find less
    for step in steps:
        length = min(length + step, len(tokens))
        found = lookup.propose(tokens[:length], limit)
        assert found == searched(tokens[:length], limit) or found == []
        assert len(found) in (0, limit)


def test_what_shares_a_place_is_not_confused() -> None:
    lookup = Lookup(2)
    history: list[int] = []
    for token in (5, 6, 7, 5, 6, 9, 5, 6):
        history.append(token)
        assert lookup.propose(history, 2) in ([], searched(history, 2))


def test_a_longer_match_comes_before_a_later_one() -> None:
    history = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert Lookup(64).propose(history, 2) == [50, 9]
    assert Lookup(64).propose([*history[5:9], 8, 3, 4], 3) == [60, 8, 3]
    assert Lookup(64).propose([1, 2, 3], 4) == []


def test_a_repetition_goes_on() -> None:
    assert Lookup(64).propose([7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]
    assert Lookup(64).propose([7, 7, 7], 4) == [7, 7, 7, 7]


def test_drafts_that_are_right_and_cheap_are_read() -> None:
    depth = Depth()
    assert depth.best() == 0  # as long as nothing was timed
    depth.passed(1, 1.0)
    depth.judged(40, 0)
    for rows in range(1, AUTO_DEPTH + 1):
        assert depth.best() == rows  # one more than was timed
        depth.passed(1 + rows, 1.0 + 0.01 * rows)
    assert depth.best() == AUTO_DEPTH
    depth.judged(0, 40)
    assert depth.best() == 0


def test_dear_rows_are_not_read_until_they_are_timed_anew() -> None:
    depth = Depth()
    depth.passed(1, 1.0)
    depth.passed(2, 1.1)
    depth.passed(3, 20.0)
    depth.judged(99, 0)
    assert depth.best() == 1
    for _ in range(STALE):
        depth.passed(1, 1.0)
        depth.passed(2, 5.0)
    assert depth.best() == 0
    for _ in range(STALE):
        depth.passed(1, 1.0)
    assert depth.best() == 1  # once more
    depth.passed(2, 5.0)
    assert depth.best() == 0


def test_a_plain_pass_is_timed_now_and_then() -> None:
    depth = Depth()
    depth.passed(1, 1.0)
    depth.judged(99, 0)
    found = set()
    for _ in range(2 * STALE):
        found.add(depth.best())
        depth.passed(1 + depth.best(), 1.0)
    assert 0 in found
    assert AUTO_DEPTH in found


def test_a_time_of_nothing_divides_nothing() -> None:
    depth = Depth()
    depth.passed(1, 0.0)
    assert depth.best() >= 0


def timed(cost: float, share: int = 40) -> Depth:
    """Passes of 1 and 2 rows take 1.0 and 1.1, a draft `cost`; drafts were right `share` times of 40."""
    depth = Depth()
    depth.passed(1, 1.0)
    depth.drafted(1, 99.0, read=False)  # a prompt is read: not what a draft costs
    depth.passed(2, 1.1)
    depth.drafted(1, cost, read=True)
    for _ in range(3):
        depth.judged(share, 40 - share)
    return depth


def test_drafts_that_cost_more_than_they_save_are_not_read() -> None:
    assert timed(0.0).best() == 2  # one more than was timed
    assert timed(0.7).best() > 0
    assert timed(0.9).best() == 0
    assert timed(0.4, share=10).best() == 0
    assert timed(0.0).cost == timed(FREE / 2).cost == 0.0
    assert timed(0.25).cost == 0.25


def test_the_cost_of_one_that_lags_behind_is_not_that_of_a_draft() -> None:
    depth = timed(0.25)
    for _ in range(5):
        depth.passed(1, 1.0)
    depth.drafted(1, 7.0, read=False)
    assert depth.cost == 0.25
    depth.passed(1, 1.0)
    depth.drafted(4, 4.0, read=True)
    assert depth.cost == 0.25 + (1.0 - 0.25) / 4
    for _ in range(STALE):
        depth.passed(1, 1.0)
    assert depth.cost == 0.0  # to be measured anew


def test_a_dear_draft_is_compared_now_and_then() -> None:
    """In all for a small share of the passes' time."""
    depth, spent, passes = timed(0.9), 0.0, 2000
    start = depth.passes.seconds
    for _ in range(passes):
        if not depth.best() and depth.compares():
            spent += 0.9
            depth.drafted(1, 0.9, read=False)
        depth.passed(1, 1.0)
    total = depth.passes.seconds - start
    assert 0 < spent < 2 * COMPARED * total


class Said:
    """Drafts what it was told to."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)
        self.calls: list[int] = []
        self.closed = 0

    def propose(self, history: object, limit: int) -> list[int]:
        self.calls.append(limit)
        return self._tokens[:limit]

    def close(self) -> None:
        self.closed += 1


class Heard(Said):
    """And hears of passes."""

    def follow(self, start: int, tokens: object, hidden: object) -> None:
        self.calls.append(-start)


def test_the_first_that_says_something_is_read() -> None:
    silent, first, second = Said(), Said(3, 4), Said(5, 6, 7)
    several = Speculation([silent, first, second], 10, 3)
    assert several.propose([1, 2], 9) == [3, 4]
    assert (silent.calls, first.calls, second.calls) == ([3], [3], [])
    several.close()
    assert (silent.closed, first.closed, second.closed) == (1, 1, 1)
    assert Speculation([silent, silent], 10, 3).propose([1], 9) == []


def test_each_has_its_own_fate() -> None:
    """The first is always wrong, the second always right: with "auto" the second is read in the end."""
    wrong, right = Said(9), Said(1)
    both, history, read = Speculation([wrong, right], 10), [1], []
    for _ in range(60):
        both.begin_pass()
        drafts = both.propose(history, 4)
        read.append(drafts)
        time.sleep(0.002)
        both.end_pass(1, len(drafts))
        both.settle(len(drafts), int(drafts == [1])) if drafts else None
        history = [*history, 1]
    assert [1] in read[-20:]
    assert [9] not in read[-20:]


def test_who_hears_of_passes() -> None:
    heard = Heard(1)
    assert Speculation([Said(1), Same()], 10).hidden is None
    assert Speculation([Said(1), heard], 10).hidden == heard.follow
    assert Speculation(heard, 10).hidden == heard.follow


class Same:
    """Says that a token comes again."""

    def propose(self, history: object, limit: int) -> list[int]:
        assert isinstance(history, list)
        return [history[-1]] * (limit + 3)


def test_drafts_keep_to_their_limit_and_to_the_vocabulary() -> None:
    always = Speculation(Same(), 10, 4)
    assert always.propose([1, 2], 9) == [2] * 4
    assert always.propose([1, 2], 3) == [2] * 3
    assert always.propose([1, 2], 0) == always.propose([1, 2], -5) == []
    assert always.propose([1, 10], 9) == []
    assert always.propose([1, -1], 9) == []


def test_drafts_that_are_not_read_are_judged_all_the_same() -> None:
    adapts, history = Speculation(Same(), 10), [1]
    for _ in range(30):  # never timed, so never read
        history.append(1)
        assert adapts.propose(history, 8) == []
    adapts.begin_pass()
    adapts.end_pass(1, 0)
    assert adapts.propose(history, 8) == [1]
    assert (adapts.drafted, adapts.accepted) == (0, 0)


@pytest.mark.parametrize("given", [-1, MAX_DEPTH + 1, True, 1.0, "on", None])
def test_what_is_no_depth_is_refused(given: object) -> None:
    with pytest.raises(SettingError, match="speculate"):
        depth_of(given)  # type: ignore[arg-type]


def test_depths() -> None:
    assert [depth_of("auto"), depth_of("off"), depth_of(0), depth_of(8)] == [None, 0, 0, 8]
