"""Drafts of the tokens to come, and how many of them pay. Knows tokens and passes' times, never logits.

What is drafted changes the time of a generation alone: a draft counts only where it is the token that is picked.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence as Tokens
from itertools import takewhile
from typing import Literal, Protocol

from headrace.errors import SettingError
from headrace.kernels.program import LOGIT_ROWS

Speculate = Literal["auto", "off"] | int  # a number is that many drafts, always

DEFAULT_SPECULATE: Speculate = "off"
MAX_DEPTH = (
    LOGIT_ROWS - 1
)  # drafts of one pass: the pass gives logits for each, and for the token in front
AUTO_DEPTH = 8  # most that "auto" tries
NGRAMS = (4, 3, 2)  # tokens that have to come again, the longest first

SHARE_RATE = 1 / 8  # how fast what was measured forgets
TIME_RATE = 1 / 4
STALE = 128  # passes after which a time is measured anew
ROW_COST = 0.2  # of a further row beside the first, as long as none was measured
GAIN = 1.05  # what drafting has to promise


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `history`, prompt and answer; none where it has no guess.

        One generation calls it with a history that only grows, and may leave tokens out between calls.
        """


class Lookup:
    """Takes what followed the last time that the latest tokens came, of the longest n-gram that came before.

    Tables of 12 to 24 bytes for a position of the context, filled as the history grows; a later n-gram in the same
    place of a table replaces an earlier one, so what is found is compared.
    """

    def __init__(self, context_tokens: int) -> None:
        """context_tokens: the longest history."""
        self._mask = (1 << (context_tokens - 1).bit_length()) - 1
        self._tables: dict[int, array[int]] = {}  # of n: ends of n-grams, 0 for none
        self._indexed = 0

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        self._index(history)
        start = next(filter(None, (self._found(history, n) for n in NGRAMS)), 0)
        if not start:
            return []
        drafts: list[int] = []
        for at in range(start, start + limit):  # beyond the end, a repetition goes on
            drafts.append(history[at] if at < len(history) else drafts[at - len(history)])
        return drafts

    def _index(self, history: Tokens[int]) -> None:
        """Every n-gram that ends before the history does."""
        for n in NGRAMS:
            if n not in self._tables:
                self._tables[n] = array("i", bytes(4 * (self._mask + 1)))
            table = self._tables[n]
            for end in range(max(n, self._indexed), len(history)):
                table[hash(tuple(history[end - n : end])) & self._mask] = end
        self._indexed = max(self._indexed, len(history))

    def _found(self, history: Tokens[int], n: int) -> int:
        """Where the last n tokens ended before, 0 where they did not."""
        tail = history[-n:]
        end = self._tables[n][hash(tuple(tail)) & self._mask]
        return end if end and history[end - n : end] == tail else 0


class Depth:
    """How many drafts to read along: what promises most tokens a second, by passes' times and drafts' fates."""

    def __init__(self, most: int = AUTO_DEPTH) -> None:
        self._most = most
        self._share = 0.5  # of drafts that were right
        # Rows of a pass: seconds, and the number of the last such pass.
        self._times: dict[int, tuple[float, int]] = {}
        self._passes = 0

    def judged(self, right: int, wrong: int) -> None:
        """Drafts that were picked, and those that another token was picked for."""
        for hit in (1.0,) * right + (0.0,) * wrong:
            self._share += (hit - self._share) * SHARE_RATE

    def passed(self, rows: int, seconds: float) -> None:
        """A pass over one token and rows - 1 drafts."""
        self._passes += 1
        before, _ = self._times.get(rows, (seconds, 0))
        self._times[rows] = before + (seconds - before) * TIME_RATE, self._passes

    def best(self) -> int:
        """Drafts for the next pass; 0 where they would not pay, or where a plain pass has to be timed.

        At most one row more than was timed: what rows take has steps, and the first that does not pay is the end.
        """
        known = {
            rows: seconds
            for rows, (seconds, last) in sorted(self._times.items())
            if self._passes - last < STALE
        }
        if 1 not in known:
            return 0
        best, most = 0, GAIN / max(known[1], 1e-9)
        tokens = 1.0
        for depth in range(1, min(self._most, max(known)) + 1):
            tokens += self._share**depth
            rate = tokens / max(_seconds(depth + 1, known), 1e-9)
            if rate > most:
                best, most = depth, rate
        return best


def _seconds(rows: int, known: dict[int, float]) -> float:
    """What a pass takes, between and beyond those that are known, of one row at least; in ascending order."""
    low = max(r for r in known if r <= rows)
    high = min((r for r in known if r >= rows), default=None)
    if high == low:
        slope = 0.0
    elif high is not None:
        slope = (known[high] - known[low]) / (high - low)
    elif low > 1:
        slope = (known[low] - known[1]) / (low - 1)
    else:
        slope = ROW_COST * known[1]
    return known[low] + max(slope, 0.0) * (rows - low)


class Speculation:
    """The drafts of one generation: asks a drafter for them, and keeps count."""

    def __init__(self, drafter: Drafter, vocab_size: int, depth: int | None = None) -> None:
        """depth: how many always; None adapts. With none to read, the first is still compared, which costs nothing."""
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.fixed = depth
        self._depth = Depth()
        self._unread: tuple[int, int] | None = (
            None  # where a draft would be that was not read, and the draft
        )
        self._start = 0.0
        self.drafted = 0
        self.accepted = 0

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        """At most `limit` drafts to read after `history`."""
        self._compare(history)
        depth = self._depth.best() if self.fixed is None else self.fixed
        count = min(limit, max(depth, self.fixed is None))
        if count < 1:
            return []
        guess = self._drafter.propose(history, count)[:count]
        drafts = list(takewhile(lambda token: 0 <= token < self._vocab_size, guess))
        if depth:
            return drafts
        self._unread = (len(history), drafts[0]) if drafts else None
        return []

    def begin_pass(self) -> None:
        self._start = time.perf_counter()

    def end_pass(self, due: int, drafts: int) -> None:
        """The pass that `begin_pass` began has ended: so many tokens that were due, and drafts behind them."""
        self.drafted += drafts
        if due == 1:
            self._depth.passed(1 + drafts, time.perf_counter() - self._start)

    def settle(self, drafts: int, right: int) -> None:
        """So many drafts of a pass were what followed, and then, before the last, one was not."""
        self._depth.judged(right, int(right < drafts))

    def _compare(self, history: Tokens[int]) -> None:
        if self._unread is not None and self._unread[0] < len(history):
            right = history[self._unread[0]] == self._unread[1]
            self._depth.judged(int(right), int(not right))
        self._unread = None


def depth_of(speculate: Speculate) -> int | None:
    """How many drafts always; None for "auto". Raises SettingError."""
    if speculate in ("auto", "off"):
        return None if speculate == "auto" else 0
    if type(speculate) is not int or not 0 <= speculate <= MAX_DEPTH:
        raise SettingError(
            f"speculate is {speculate!r:.60}; it must be auto, off or between 0 and {MAX_DEPTH}"
        )
    return speculate
