"""Stop strings in a stream of text. Knows nothing of tokens or engines."""

from __future__ import annotations

from collections.abc import Iterable


class _Matcher:
    """How much of one stop string the text seen so far ends with (Knuth-Morris-Pratt)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = _borders(pattern)

    def feed(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        while self.matched and self.pattern[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0], 0
    for char in pattern[1:]:
        while length and pattern[length] != char:
            length = borders[length - 1]
        length += pattern[length] == char
        borders.append(length)
    return borders


class StopStrings:
    """Lets text through up to the stop string that is completed first, and nothing after it.

    Text that could be the beginning of a stop string is held back until it is not. When two end at
    the same character the longer one counts. How the text is cut into pieces makes no difference.
    `stopped` is the stop string that was met, or None.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        # Longest first: of two that end together the longer is found first.
        ordered = sorted(set(filter(None, stops)), key=len, reverse=True)
        self._matchers = [_Matcher(s) for s in ordered]
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that can no longer be part of a stop string; empty once stopped."""
        if self.stopped is not None:
            return ""
        seen = self._held + text
        for index, char in enumerate(text, len(self._held) + 1):
            self.stopped = self._feed(char)
            if self.stopped is not None:
                self._held = ""
                return seen[: index - len(self.stopped)]
        cut = len(seen) - max((m.matched for m in self._matchers), default=0)
        self._held = seen[cut:]
        return seen[:cut]

    def would_stop(self, text: str) -> bool:
        """Whether `push` would meet a stop string in `text`. Changes nothing."""
        before = [m.matched for m in self._matchers]
        found = any(self._feed(char) is not None for char in text)
        for matcher, matched in zip(self._matchers, before, strict=True):
            matcher.matched = matched
        return found

    def _feed(self, char: str) -> str | None:
        done = [m.pattern for m in self._matchers if m.feed(char)]
        return done[0] if done else None

    def flush(self) -> str:
        """The held text, at the end of a stream that met no stop string."""
        held, self._held = self._held, ""
        return held
