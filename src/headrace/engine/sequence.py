"""A sequence is a timeline: the tokens that the cache holds, and the pages that hold them.

Nobody else changes a sequence's state. A rewind and a fork at any position are exact, because a position's keys
and values depend on the tokens up to it alone. Sequences with a common beginning share its pages; the last, partly
filled one is copied when one of its owners goes on.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.adapters import History
from headrace.engine.pages import PAGE_TOKENS, PagePool, pages_for
from headrace.errors import ContextError, InputError


class Sequence:
    """One timeline over pages of a shared pool."""

    def __init__(self, pool: PagePool, context_tokens: int, salt: bytes | History = b"") -> None:
        """salt: of the adapter that it is computed under, empty for the plain model; or a history of several."""
        self._pool = pool
        self._context_tokens = context_tokens
        self.history = History(((0, salt),)) if isinstance(salt, bytes) else salt
        self._pages: list[int] = []
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def salt(self) -> bytes:
        """What its keys and values depend on besides the model and the tokens; empty for the plain model."""
        return self.history.salt

    def set_adapter(self, salt: bytes) -> None:
        """Compute the positions from here on under another adapter, or with an empty salt under none.

        What is there stays as it is: it was computed under the adapter of its time, and the salt says so from now on.
        """
        self.history = self.history.then(len(self), salt)

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

    def fork(self, length: int | None = None) -> Sequence:
        """A new sequence of the first `length` tokens, by default all, over the same pages."""
        length = len(self) if length is None else length
        if not 0 <= length <= len(self):
            raise InputError(f"a fork at {length} of a sequence of {len(self)} tokens")
        other = Sequence(self._pool, self._context_tokens, self.history.cut(length))
        other.adopt(self._tokens[:length], self._pages[: pages_for(length)])
        return other

    def adopt(self, tokens: Tokens[int], pages: list[int]) -> None:
        """Begin an empty sequence with `tokens`, which `pages` of other owners hold."""
        assert not self._tokens, "only an empty sequence adopts"
        self._pool.share(pages)
        self.release()  # of what may be reserved
        self._pages = list(pages)
        self._tokens = list(tokens)

    def reserve(self, count: int) -> None:
        """Make room for `count` more positions, in pages that nobody else reads.

        Raises PagesExhaustedError, ContextError, changing nothing.
        """
        if count > self.room:
            raise ContextError(len(self) + count, self._context_tokens)
        missing = max(0, pages_for(len(self) + count) - len(self._pages))
        last = len(self) // PAGE_TOKENS  # the page of the next position
        source = self._pages[last] if last < len(self._pages) else None
        if count == 0 or source is None or self._pool.owners(source) == 1:
            self._pages += self._pool.take(missing)
            return
        taken = self._pool.take_beside(source, missing)
        if len(taken) > missing:
            own = taken.pop()
            self._pool.copy(source, own)
            self._pages[last] = own
            self._pool.give([source])
        self._pages += taken

    def trim(self) -> None:
        """Give back pages that were reserved and hold nothing."""
        self.rewind(len(self))

    def commit(self, tokens: Tokens[int]) -> None:
        """The cache now holds `tokens` at the next positions."""
        self._tokens += tokens

    def rewind(self, length: int) -> None:
        """Forget every position from `length` on."""
        if length < len(self._tokens):
            self.history = self.history.cut(length)
        del self._tokens[length:]
        keep = pages_for(length)
        self._pool.give(self._pages[keep:])
        del self._pages[keep:]

    def release(self) -> None:
        self.rewind(0)


@dataclass(frozen=True)
class Work:
    """Tokens to read at the end of a sequence, and whether the logits of all or the last `wanted` are wanted.

    more: further tokens of the same prompt follow in the next pass.
    """

    sequence: Sequence
    tokens: Tokens[int]
    all_logits: bool = False
    more: bool = False
    wanted: int = 1
