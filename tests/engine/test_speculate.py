"""What is drafted from a history, how many drafts pay, and what is asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.speculate import (
    AUTO_DEPTH,
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
