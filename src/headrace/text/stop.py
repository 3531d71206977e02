"""Stop strings in a stream of text. Knows nothing of tokens or engines."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class _Pattern:
    """One stop string, and how much of it a text ends with (Knuth-Morris-Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallback = _borders(text)

    def step(self, matched: int, char: str) -> int:
        """How much of it a text ends with after one more character; `matched`, below all of it, before."""
        while matched and self.text[matched] != char:
            matched = self._fallback[matched - 1]
        return matched + (self.text[matched] == char)


def _borders(pattern: str) -> Sequence[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders, length = array("l", [0]), 0
    for char in pattern[1:]:
        while length and pattern[length] != char:
            length = borders[length - 1]
        length += pattern[length] == char
        borders.append(length)
    return borders


_Begun = dict[_Pattern, int]  # of the stop strings that a text ends with some of: how much


class StopStrings:
    """Lets text through up to the stop string that is completed first, and nothing after it.

    Text that could be the beginning of a stop string is held back until it is not. When two end at
    the same character the longer one counts. How the text is cut into pieces makes no difference.
    `stopped` is the stop string that was met, or None.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._starting: dict[str, list[_Pattern]] = {}  # by the first character
        for stop in sorted(set(filter(None, stops))):
            self._starting.setdefault(stop[0], []).append(_Pattern(stop))
        self._begun: _Begun = {}
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that can no longer be part of a stop string; empty once stopped."""
        if self.stopped is not None:
            return ""
        seen = self._held + text
        for index, char in enumerate(text, len(self._held) + 1):
            self._begun = self._step(self._begun, char)
            self.stopped = _complete(self._begun)
            if self.stopped is not None:
                self._held = ""
                return seen[: index - len(self.stopped)]
        cut = len(seen) - max(self._begun.values(), default=0)
        self._held = seen[cut:]
        return seen[:cut]

    def would_stop(self, text: str) -> bool:
        """Whether `push` would meet a stop string in `text`. Changes nothing."""
        begun = self._begun
        for char in text:
            begun = self._step(begun, char)
            if _complete(begun) is not None:
                return True
        return False

    def _step(self, begun: _Begun, char: str) -> _Begun:
        """What is begun after one more character. Costs nothing for stop strings that are not."""
        after = {p: n for p, matched in begun.items() if (n := p.step(matched, char))}
        for pattern in self._starting.get(char, ()):
            after.setdefault(pattern, 1)
        return after

    def flush(self) -> str:
        """The held text, at the end of a stream that met no stop string."""
        held, self._held = self._held, ""
        return held


def _complete(begun: _Begun) -> str | None:
    """The longest stop string that is complete."""
    done = [pattern.text for pattern, n in begun.items() if n == len(pattern.text)]
    return max(done, key=len, default=None)
