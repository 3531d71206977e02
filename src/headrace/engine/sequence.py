"""A sequence is a timeline: the tokens that the cache holds, and the pages that hold them.

Nobody else changes a sequence's state. A rewind at any position is exact, because a position's keys
and values depend on the tokens up to it alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.pages import PagePool, pages_for
from headrace.errors import ContextError


class Sequence:
    """One timeline over pages of a shared pool."""

    def __init__(self, pool: PagePool, context_tokens: int) -> None:
        self._pool = pool
        self._context_tokens = context_tokens
        self._pages: list[int] = []
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def room(self) -> int:
        """Positions that are left in the context."""
        return self._context_tokens - len(self._tokens)

    def page_table(self) -> NDArray[np.int32]:
        return np.array(self._pages, dtype=np.int32)

    def sync(self, tokens: Tokens[int]) -> list[int]:
        """Rewind to the longest common prefix with `tokens`; return what is left to read."""
        if len(tokens) > self._context_tokens:
            raise ContextError(len(tokens), self._context_tokens)
        common = 0
        for ours, theirs in zip(self._tokens, tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        self.rewind(common)
        return list(tokens[common:])

    def reserve(self, count: int) -> None:
        """Make room for `count` more positions. Raises PagesExhaustedError, changing nothing."""
        if count > self.room:
            raise ContextError(len(self) + count, self._context_tokens)
        missing = pages_for(len(self) + count) - len(self._pages)
        if missing > 0:
            self._pages += self._pool.take(missing)

    def commit(self, tokens: Tokens[int]) -> None:
        """The cache now holds `tokens` at the next positions."""
        self._tokens += tokens

    def rewind(self, length: int) -> None:
        """Forget every position from `length` on."""
        del self._tokens[length:]
        keep = pages_for(length)
        self._pool.give(self._pages[keep:])
        del self._pages[keep:]

    def release(self) -> None:
        self.rewind(0)


@dataclass(frozen=True)
class Work:
    """Tokens to read at the end of a sequence, and whether the logits of all or the last are wanted.

    more: further tokens of the same prompt follow in the next pass.
    """

    sequence: Sequence
    tokens: Tokens[int]
    all_logits: bool = False
    more: bool = False
