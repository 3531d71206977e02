"""Drafts of the tokens to come, and how many of them pay. Knows tokens and passes' times, never logits.

What is drafted changes the time of a generation alone: a draft counts only where it is the token that is picked.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from itertools import takewhile
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

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
FREE = 50e-6  # seconds of a draft that count for nothing
COMPARED = 0.02  # of the passes' time that may go into drafts that are compared and not read


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow `history`, prompt and answer; none where it has no guess.

        One generation calls it with a history that only grows, and may leave tokens out between calls.
        """


@runtime_checkable
class Follower(Protocol):
    """A drafter that guesses from what the model's own passes compute."""

    def follow(self, start: int, tokens: Tokens[int], hidden: NDArray[np.int32]) -> None:
        """A pass has read `tokens` from position `start` on, drafts included: what it held of them before is void.

        hidden: i32[len(tokens), hidden], the states behind the last layer, before the final norm; the drafter's own.
        """


@runtime_checkable
class Closing(Protocol):
    """A drafter that holds something as long as its generation runs."""

    def close(self) -> None:
        """The generation has ended."""


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


class Passes:
    """What passes of so many rows take, lately."""

    def __init__(self) -> None:
        # Rows of a pass: seconds, and the number of the last such pass.
        self._times: dict[int, tuple[float, int]] = {}
        self.count = 0
        self.seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        before, _ = self._times.get(rows, (seconds, 0))
        self._times[rows] = before + (seconds - before) * TIME_RATE, self.count

    def known(self) -> dict[int, float]:
        """Seconds by rows, in ascending order, without those that are stale."""
        return {
            rows: seconds
            for rows, (seconds, last) in sorted(self._times.items())
            if self.count - last < STALE
        }


class Depth:
    """How many drafts to read: what promises most tokens a second, by times of passes, fates and costs of drafts."""

    def __init__(self, most: int = AUTO_DEPTH, passes: Passes | None = None) -> None:
        """passes: those of several depths of one generation, counted once."""
        self._most = most
        self.passes = Passes() if passes is None else passes
        self._share = 0.5  # of drafts that were right
        self._cost: tuple[float, int] | None = None  # seconds of one draft, measured at which pass
        self._asked: int | None = None  # passes that there were when the drafter was asked last
        self._compared = 0.0  # seconds of drafts that were not read

    def judged(self, right: int, wrong: int) -> None:
        """Drafts that were picked, and those that another token was picked for."""
        for hit in (1.0,) * right + (0.0,) * wrong:
            self._share += (hit - self._share) * SHARE_RATE

    def passed(self, rows: int, seconds: float) -> None:
        """A pass over one token and rows - 1 drafts."""
        self.passes.add(rows, seconds)

    def drafted(self, drafts: int, seconds: float, *, read: bool) -> None:
        """So many drafts were made in that time.

        What a drafter takes that lags behind is not what a draft costs; what it takes for the prompt is spent.
        """
        now = self.passes.count
        if self._asked is not None and not read:
            self._compared += seconds
        if self._asked is not None and self._asked >= now - 1:
            each = seconds / max(drafts, 1)
            before = each if self._cost is None else self._cost[0]
            self._cost = before + (each - before) * TIME_RATE, now
        self._asked = now

    @property
    def cost(self) -> float:
        """Seconds of one draft; 0 where that is not known, or not worth counting."""
        if self._cost is None or self.passes.count - self._cost[1] >= STALE:
            return 0.0
        return self._cost[0] if self._cost[0] > FREE else 0.0

    def compares(self) -> bool:
        """Whether a draft that will not be read is worth making: it costs nothing, or little in all."""
        cost = self.cost
        return not cost or self._compared + cost <= COMPARED * self.passes.seconds

    def best(self) -> int:
        """Drafts for the next pass; 0 where they would not pay, or where a plain pass has to be timed.

        At most one row more than was timed: what rows take has steps, and the first that does not pay is the end.
        """
        known = self.passes.known()
        if 1 not in known:
            return 0
        best, most = 0, GAIN / max(known[1], 1e-9)
        tokens, seconds, cost = 1.0, known[1], self.cost
        for depth in range(1, min(self._most, max(known)) + 1):
            tokens += self._share**depth
            seconds = max(seconds, _seconds(depth + 1, known))  # less is a clock's noise
            rate = tokens / max(seconds + depth * cost, 1e-9)
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


class _Source:
    """One drafter with what is known of it."""

    def __init__(self, drafter: Drafter, passes: Passes, fixed: int | None) -> None:
        self.drafter = drafter
        self.depth = Depth(passes=passes)
        self._fixed = fixed
        # Where a draft would be that was not read, and the draft.
        self._unread: tuple[int, int] | None = None

    def propose(self, history: Tokens[int], limit: int, vocab_size: int) -> list[int]:
        depth = self.depth.best() if self._fixed is None else self._fixed
        if not depth and (self._fixed is not None or not self.depth.compares()):
            return []
        count = min(limit, max(depth, 1))
        start = time.perf_counter()
        guess = self.drafter.propose(history, count)[:count]
        self.depth.drafted(len(guess), time.perf_counter() - start, read=depth > 0)
        drafts = list(takewhile(lambda token: 0 <= token < vocab_size, guess))
        if depth:
            return drafts
        self._unread = (len(history), drafts[0]) if drafts else None
        return []

    def compare(self, history: Tokens[int]) -> None:
        if self._unread is not None and self._unread[0] < len(history):
            right = history[self._unread[0]] == self._unread[1]
            self.depth.judged(int(right), int(not right))
        self._unread = None


class Speculation:
    """The drafts of one generation: asks drafters for them, and keeps count."""

    def __init__(
        self, drafters: Drafter | Tokens[Drafter], vocab_size: int, depth: int | None = None
    ) -> None:
        """drafters: one, or several in the order in which they are asked until one has drafts that pay.

        depth: how many always; None adapts. With none to read, the first is still compared where that costs little.
        """
        every = drafters if isinstance(drafters, Tokens) else (drafters,)
        self._passes = Passes()
        self._sources = [_Source(drafter, self._passes, depth) for drafter in every]
        self._read = self._sources[0]  # whose drafts were read last
        self._vocab_size = vocab_size
        self.fixed = depth
        self._start = 0.0
        self.drafted = 0
        self.accepted = 0

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        """At most `limit` drafts to read after `history`."""
        for source in self._sources:
            source.compare(history)
        for source in self._sources if limit > 0 else ():
            if drafts := source.propose(history, limit, self._vocab_size):
                self._read = source
                return drafts
        return []

    @property
    def hidden(self) -> Callable[[int, Tokens[int], NDArray[np.int32]], None] | None:
        """Who wants the states of passes; None where nobody does."""
        followers = [s.drafter for s in self._sources if isinstance(s.drafter, Follower)]
        return followers[0].follow if followers else None

    def begin_pass(self) -> None:
        self._start = time.perf_counter()

    def end_pass(self, due: int, drafts: int) -> None:
        """The pass that `begin_pass` began has ended: so many tokens that were due, and drafts behind them."""
        self.drafted += drafts
        if due == 1:
            self._passes.add(1 + drafts, time.perf_counter() - self._start)

    def settle(self, drafts: int, right: int) -> None:
        """So many drafts of a pass were what followed, and then, before the last, one was not."""
        self._read.depth.judged(right, int(right < drafts))

    def refuse(self) -> None:
        """One of the latest drafts cannot follow; it and those behind it are not read."""
        self._read.depth.judged(0, 1)

    def close(self) -> None:
        """The generation has ended."""
        for source in self._sources:
            if isinstance(source.drafter, Closing):
                source.drafter.close()


def depth_of(speculate: Speculate) -> int | None:
    """How many drafts always; None for "auto". Raises SettingError."""
    if speculate in ("auto", "off"):
        return None if speculate == "auto" else 0
    if type(speculate) is not int or not 0 <= speculate <= MAX_DEPTH:
        raise SettingError(
            f"speculate is {speculate!r:.60}; it must be auto, off or between 0 and {MAX_DEPTH}"
        )
    return speculate
