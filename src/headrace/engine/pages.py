"""Which pages of the KV cache belong to whom: pure bookkeeping, no memory is touched here."""

from __future__ import annotations

from headrace.errors import HeadraceError

PAGE_TOKENS = 64  # positions in one page of all layers and heads


class PagesExhaustedError(HeadraceError):
    """More positions are needed than the cache was planned for."""

    code = "cache_exhausted"
    http_status = 503


class PagePool:
    """A fixed number of pages, lent and taken back."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Lend `count` pages, or none: PagesExhaustedError leaves the pool as it was."""
        if count > len(self._free):
            raise PagesExhaustedError(f"{count} KV pages are needed, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def pages_for(num_tokens: int) -> int:
    """How many pages hold num_tokens positions."""
    return -(-num_tokens // PAGE_TOKENS)
