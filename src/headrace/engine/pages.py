"""Which pages of the KV cache belong to whom: bookkeeping; the memory is the engine's.

A page may have several owners, which then only read it. Who wants to write into one takes a page of its own first
(`Sequence.reserve`), so a page that is written has one owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from headrace.errors import HeadraceError

PAGE_TOKENS = 64  # positions in one page of all layers and heads


class PagesExhaustedError(HeadraceError):
    """More positions are needed than the cache was planned for."""

    code = "cache_exhausted"
    http_status = 503


class Keeper(Protocol):
    """Who owns pages that nobody runs on, and gives them up for those who do."""

    def give_up(self, count: int) -> None:
        """Make at least `count` pages free; where that many are not its alone, change nothing."""

    def forget(self, page: int) -> None:
        """Own `page` no longer, and nothing that lies behind it."""


class PagePool:
    """A fixed number of pages, lent, shared and taken back."""

    def __init__(self, num_pages: int, copy: Callable[[int, int], None]) -> None:
        """copy(source, target): gives a page the content of another."""
        self.copy = copy
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self.keeper: Keeper | None = None

    @property
    def num_pages(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that have an owner; one that many share counts once."""
        return len(self._owners) - len(self._free)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def take(self, count: int) -> list[int]:
        """Lend `count` pages, or none: PagesExhaustedError leaves the pool as it was."""
        if count > len(self._free) and self.keeper is not None:
            self.keeper.give_up(count - len(self._free))
        if count > len(self._free):
            raise PagesExhaustedError(f"{count} KV pages are needed, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        return taken

    def take_beside(self, page: int, count: int) -> list[int]:
        """`count` pages and, where `page` has other owners still, one more to copy it to.

        The keeper drops `page` rather than that a sequence goes without.
        """
        try:
            return self.take(count + 1)
        except PagesExhaustedError:
            if self.keeper is None:
                raise
            self.keeper.forget(page)
            return self.take(count + (self._owners[page] > 1))

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of these pages."""
        for page in pages:
            assert self._owners[page] > 0, "a free page cannot be shared"
            self._owners[page] += 1

    def recount(self, held: Iterable[Iterable[int]]) -> None:
        """Make the owners what they are said to be, each with its pages, whatever was in the books."""
        owners = [0] * len(self._owners)
        for pages in held:
            for page in pages:
                owners[page] += 1
        self._owners = owners
        self._free = [page for page in reversed(range(len(owners))) if not owners[page]]

    def give(self, pages: list[int]) -> None:
        """One owner less for each of these pages; one without owners is free."""
        for page in reversed(pages):
            self._owners[page] -= 1
            assert self._owners[page] >= 0, "a free page was given back"
            if not self._owners[page]:
                self._free.append(page)


def pages_for(num_tokens: int) -> int:
    """How many pages hold num_tokens positions."""
    return -(-num_tokens // PAGE_TOKENS)
