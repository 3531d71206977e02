"""What one rendering may use: steps, characters and seconds. Knows nothing of templates.

Every operation of a template pays here before or after it runs, in proportion to its operands, so
the bound holds without threads, signals or tracing. Steps and characters are counted, so the same
template and messages are refused on every machine; the clock is only for what the counts miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass

CHARS_PER_STEP = 1024
SLACK = 16  # how far an estimate may exceed the longest text
QUOTED = 12  # a character inside a container can be written \U0001f600, with quotes around it
MAX_BITS = 4096  # of an integer
LOOK_SECONDS = 0.02  # between two looks at whether the rendering is still wanted

Look = Callable[[], None]  # raises to end a rendering that nobody wants any more


_View = (KeysView, ValuesView, ItemsView)


class LimitError(Exception):
    """A template used more than it may."""


@dataclass(frozen=True)
class Limits:
    """`string` is the longest text (and the longest output), in characters; `chars` their sum."""

    steps: int = 300_000
    string: int = 1 << 20
    chars: int = 1 << 25
    seconds: float = 10.0

    def scaled(self, items: int, chars: int) -> Limits:
        """Room for an input of `items` values and `chars` characters."""
        return Limits(
            self.steps + 1000 * items,
            self.string + 4 * chars,
            self.chars + 256 * chars,
            self.seconds,
        )


class Meter:
    """Counts down; raises LimitError at zero and ever after. look: is called now and then, and may raise as well."""

    def __init__(self, limits: Limits, look: Look | None = None) -> None:
        self._limits = limits
        self._steps = limits.steps
        self._chars = limits.chars
        self._look = look
        self._next = time.monotonic()  # when to look
        self._deadline = self._next + limits.seconds

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise LimitError(f"it takes more than {self._limits.steps:,} steps")
        now = time.monotonic()
        if now > self._deadline:
            raise LimitError(f"it takes longer than {self._limits.seconds:g} seconds")
        if self._look is not None and now >= self._next:
            self._next = now + LOOK_SECONDS
            self._look()

    def room(self, estimate: int) -> None:
        """Refuse before it is made what could be far too long; `estimate` may be generous."""
        if estimate > SLACK * self._limits.string:
            raise LimitError(f"it makes a text of more than {self._limits.string:,} characters")

    def output(self, length: int) -> None:
        """The rendered text is this long so far."""
        if length > self._limits.string:
            raise LimitError(f"it writes more than {self._limits.string:,} characters")

    def result(self, value: object) -> None:
        """Pay for a new value."""
        if isinstance(value, str):
            self._text(len(value))
        elif isinstance(value, list | tuple | dict | set):
            self.items(len(value))

    def _text(self, length: int) -> None:
        if length > self._limits.string:
            raise LimitError(f"it makes a text of more than {self._limits.string:,} characters")
        self._chars -= length
        if self._chars < 0:
            raise LimitError(f"it makes more than {self._limits.chars:,} characters of text")
        self.step(1 + length // CHARS_PER_STEP)

    def items(self, length: int) -> None:
        """Pay for a new list of this many items."""
        if length > self._limits.string:
            raise LimitError(f"it makes a list of more than {self._limits.string:,} items")
        self.step(1 + length // 4)

    def integer(self, bits: int) -> None:
        if bits > MAX_BITS:
            raise LimitError(f"it makes an integer of more than {MAX_BITS} bits")

    def shallow(self, value: object) -> None:
        """Pay for going over a value's own items."""
        if isinstance(value, str):
            self.step(1 + len(value) // CHARS_PER_STEP)
        elif isinstance(value, list | tuple | dict | range | set | frozenset):
            self.step(1 + len(value) // 64)

    def deep(self, value: object) -> int:
        """Pay for reading all that a value holds. Returns a bound on the length of its text."""
        if isinstance(value, str):
            self.step(1 + len(value) // CHARS_PER_STEP)
            return len(value)
        if isinstance(value, (list, tuple, dict, set, frozenset, range, *_View)):
            return self._nested(value)
        self.step()
        return value.bit_length() // 3 + 2 if isinstance(value, int) else 330

    def _nested(self, value: object) -> int:
        total, stack = 0, [value]
        while stack:
            item = stack.pop()
            self.step()
            total += QUOTED * len(item) if isinstance(item, str) else 24
            self.room(total // QUOTED)
            stack.extend(_children(item))
        return total

    def ticking(self, values: Iterable[object]) -> Iterator[object]:
        """The same values, each paid for as it is taken."""
        for value in values:
            self.step()
            yield value


def _children(item: object) -> Iterable[object]:
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, list | tuple | set | frozenset | range):
        return item
    if isinstance(item, _View):
        return list(item)
    return ()


def size_of(value: object) -> tuple[int, int]:
    """Number of values and of characters in plain data (a conversation, a list of tools)."""
    items, chars, stack = 0, 0, [value]
    while stack:
        item = stack.pop()
        items += 1
        chars += len(item) if isinstance(item, str) else 0
        stack.extend(_children(item))
    return items, chars
