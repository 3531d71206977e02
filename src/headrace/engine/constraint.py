"""What a generation asks of a grammar, and what it makes of the answers: forced spans, and ids that may be picked.

Knows tokens, never text. Whoever implements `Constraint` knows how a grammar is written.
"""

from __future__ import annotations

import time
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConstraintError


class Constraint(Protocol):
    """Where one generation is in its grammar. Not shared; raises ConstraintError where it cannot go on."""

    @property
    def can_end(self) -> bool:
        """Whether what was generated is whole."""

    @property
    def ended(self) -> bool:
        """Whether it is whole and nothing can follow."""

    def mask(self) -> NDArray[np.uint32]:
        """Tokens that may come next: bit i % 32 of word i // 32 is token i's. End tokens only where it can end."""

    def forced(self) -> list[int]:
        """Tokens that come next because the grammar allows one text only: at each, `mask` has that one bit.

        Empty where it leaves a choice, or where it is not known that it leaves none.
        """

    def advance(self, token: int) -> None:
        """Take a token that the mask allows."""

    def fork(self) -> Self:
        """An independent copy, to look ahead with."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""


class Choices:
    """What may be picked next: the bits of a mask, unpacked where all of them are asked for."""

    def __init__(self, words: NDArray[np.uint32], vocab_size: int) -> None:
        """words: as `Constraint.mask`, taken over; bits at `vocab_size` and beyond are no tokens."""
        self._words = words
        self._vocab_size = vocab_size
        self._array: NDArray[np.bool_] | None = None
        if words.size * 32 > vocab_size:
            last, rest = divmod(vocab_size, 32)
            words[last + 1 :] = 0
            words[last] &= np.uint32((1 << rest) - 1)

    def __len__(self) -> int:
        """How many."""
        return int(np.bitwise_count(self._words).sum())

    def __getitem__(self, token: int) -> bool:
        """Whether this one."""
        return token < self._words.size * 32 and bool(self._words[token // 32] >> token % 32 & 1)

    def first(self) -> int:
        """The lowest."""
        word = int(self._words.astype(np.bool_).argmax())
        bits = int(self._words[word])
        return word * 32 + (bits & -bits).bit_length() - 1

    def __array__(
        self, dtype: np.dtype[np.bool_] | None = None, copy: bool | None = None
    ) -> NDArray[np.bool_]:
        """bool[vocab]."""
        if self._array is None:
            packed = self._words.view(np.uint8)
            bits = np.unpackbits(packed, bitorder="little", count=self._vocab_size)
            self._array = bits.view(np.bool_)
        return self._array


class Guide:
    """Leads one generation through its grammar, or, without one, lets everything through."""

    def __init__(
        self, constraint: Constraint | None, vocab_size: int, end_tokens: frozenset[int]
    ) -> None:
        self._constraint = constraint
        self._vocab_size = vocab_size
        self._ends = end_tokens
        self._allowed: Choices | None = None
        self._failed: ConstraintError | None = None
        self.seconds = 0.0
        self.forced_tokens = 0
        self.forced_spans = 0

    @property
    def finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._constraint is not None and self._failed is None and self._constraint.ended

    @property
    def allowed(self) -> Choices | None:
        """What may be picked next, more than one; None for all. Raises what the last span ran into."""
        if self._failed is not None:
            raise self._failed
        return self._allowed

    def span(self, limit: int) -> list[int]:
        """The tokens that must come next, at most `limit`, already taken; at the end of a text the lowest end token.

        After it, `allowed` says what may be picked next, unless it is `finished`.
        """
        if self._constraint is None:
            return []
        start = time.perf_counter()
        span: list[int] = []
        try:
            while len(span) < limit and (more := self._forced(self._constraint, limit - len(span))):
                span += more
                if more[-1] in self._ends:
                    break
        except ConstraintError as error:
            self._failed = error
        self.forced_tokens += len(span)
        self.forced_spans += bool(span)
        self.seconds += time.perf_counter() - start
        return span

    def take(self, token: int) -> None:
        """A picked token."""
        if self._constraint is not None:
            start = time.perf_counter()
            self._constraint.advance(token)
            self.seconds += time.perf_counter() - start

    def permitted(self, drafts: list[int]) -> list[int]:
        """Drafts of what comes next, up to the first that the grammar forbids."""
        if self._constraint is None or self._allowed is None or not drafts:
            return drafts
        if not self._allowed[drafts[0]]:
            return []
        if len(drafts) == 1:
            return drafts
        start, ahead, count = time.perf_counter(), self._constraint.fork(), 0
        try:
            for token in drafts:
                ahead.advance(token)
                count += 1
        except ConstraintError:
            pass
        self.seconds += time.perf_counter() - start
        return drafts[:count]

    def _forced(self, constraint: Constraint, limit: int) -> list[int]:
        """Some forced tokens, taken; none where there is a choice, which `allowed` then holds."""
        if constraint.ended:
            return sorted(self._ends)[:1]
        choices = Choices(constraint.mask(), self._vocab_size)
        count = len(choices)
        if count > 1:
            self._allowed = choices
            return []
        if not count:
            raise ConstraintError("no token of the vocabulary can follow", dead_end=True)
        tokens = constraint.forced()[:limit] or [choices.first()]
        for token in tokens:
            constraint.advance(token)
        return tokens
