"""Pages have owners: N sequences on one prefix cost one prefix, and a refusal changes nothing."""

from __future__ import annotations

import pytest

from headrace.engine.pages import PagePool, PagesExhaustedError
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.sequence import Sequence
from headrace.errors import ContextError, InputError

CONTEXT = 1024
copies: list[tuple[int, int]] = []


def pool_of(num_pages: int) -> PagePool:
    copies.clear()
    return PagePool(num_pages, lambda *pages: copies.append(pages))


def copied(sequence: Sequence) -> bool:
    """Whether the next position needed a copy of a page."""
    before = len(copies)
    sequence.reserve(1)
    return len(copies) > before


def filled(pool: PagePool, tokens: list[int], sequence: Sequence | None = None) -> Sequence:
    """A sequence that has read `tokens`."""
    sequence = sequence or Sequence(pool, CONTEXT)
    sequence.reserve(len(tokens))
    sequence.commit(tokens)
    return sequence


def test_sequences_on_one_prefix_cost_one_prefix() -> None:
    pool = pool_of(100)
    first = filled(pool, [1] * 640)
    forks = [first.fork() for _ in range(20)]
    assert pool.num_used == 10
    for index, fork in enumerate(forks):
        filled(pool, [2 + index] * 65, fork)
    assert pool.num_used == 10 + 20 * 2
    for sequence in (first, *forks[1:]):
        sequence.release()
    assert pool.num_used == len(forks[0].page_table()) == 12
    forks[0].release()
    assert pool.num_free == 100


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 100, 128, 130])
def test_a_fork_shares_whole_pages_and_copies_the_last_when_it_is_written(length: int) -> None:
    pool = pool_of(10)
    first = filled(pool, list(range(130)))
    fork = first.fork(length)
    shared = list(fork.page_table())
    assert pool.num_used == 3
    assert copied(fork) == (length % 64 != 0)
    assert pool.num_used == 4
    whole = length // 64
    assert list(fork.page_table())[:whole] == shared[:whole]
    if length % 64:
        assert copies == [(shared[whole], fork.page_table()[whole])]
    assert not copied(fork)
    assert not copied(first)


def test_the_first_owner_copies_too_when_it_goes_on_first() -> None:
    pool = pool_of(4)
    first = filled(pool, list(range(70)))
    fork = first.fork(66)
    assert copied(first)
    assert not copied(fork)  # has it alone now
    assert pool.num_used == 3


def test_a_rewind_of_one_owner_leaves_the_other_its_pages() -> None:
    pool = pool_of(4)
    first = filled(pool, list(range(130)))
    fork = first.fork()
    first.rewind(10)
    assert (pool.num_used, len(fork.page_table())) == (3, 3)
    assert copied(first)
    first.release()
    first.release()  # twice is once
    assert (pool.num_used, len(fork)) == (3, 130)


def test_a_refusal_changes_nothing() -> None:
    pool = pool_of(3)
    first = filled(pool, list(range(100)))
    fork = first.fork(90)
    before = list(fork.page_table())
    with pytest.raises(PagesExhaustedError):
        fork.reserve(100)  # a copy and one more
    with pytest.raises(ContextError):
        fork.reserve(CONTEXT)
    with pytest.raises(InputError, match="a fork at 91 of a sequence of 90"):
        fork.fork(91)
    assert (list(fork.page_table()), pool.num_used, len(fork)) == (before, 2, 90)
    assert copied(fork)
    fork.trim()
    assert (pool.num_used, len(fork)) == (3, 90)


def test_pages_of_the_cache_are_those_of_whom_runs() -> None:
    """One sequence over the whole pool is never refused for what the cache holds, its own tail included."""
    pool = pool_of(4)
    cache = PrefixCache(pool)
    first = filled(pool, list(range(250)))
    cache.keep(first)
    first.release()
    assert (pool.num_free, cache.num_pages) == (0, 4)
    again = Sequence(pool, 256)
    assert cache.adopt(again, list(range(250))) == 250
    again.reserve(6)  # no page is left for a copy: the cache gives its claim up
    assert not copies
    assert (pool.num_used, cache.num_pages) == (4, 3)
    with pytest.raises(PagesExhaustedError):
        Sequence(pool, 256).reserve(1)
    assert cache.num_pages == 3
