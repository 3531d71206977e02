"""Answer and reasoning as they are told: without the whitespace around them, and without the tags between them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.text.tools.formats import Format
from headrace.text.tools.pieces import Piece, Reasoning, Said

JOINT = "\n\n"  # between messages of one answer


class Prose:
    """Tells answer and reasoning, without the whitespace around them: between parts, and before and behind calls.

    An answer without calls and reasoning keeps what it begins and ends with.
    """

    def __init__(self, out: list[Piece]) -> None:
        self._out = out
        self._space: list[str] = []
        self._trims = False  # leading whitespace
        self._thinks = False
        self._joint = ""
        self._told: set[type[Piece]] = set()

    def say(self, text: str) -> None:
        self._thinks = False
        self._tell(Said, text)

    def think(self, text: str) -> None:
        if not self._thinks:
            self._thinks = self._trims = True
        self._tell(Reasoning, text)

    def joint(self, kind: type[Piece]) -> None:
        """A message of its own begins."""
        self._joint = JOINT if kind in self._told else ""

    def turn(self) -> None:
        """Something else begins."""
        self._space.clear()
        self._trims, self._thinks = True, False

    @property
    def held(self) -> str:
        """Whitespace of the answer that is told only if more of the answer follows."""
        return "" if self._thinks else "".join(self._space)

    def flush(self) -> None:
        if self._space and not self._thinks:
            self._out.append(Said("".join(self._space)))

    def _tell(self, kind: type[Said] | type[Reasoning], text: str) -> None:
        if self._trims:
            text = text.lstrip()
        bare = text.rstrip()
        if bare:
            self._out.append(kind(self._joint + "".join(self._space) + bare))
            self._told.add(kind)
            self._space, self._trims, self._joint = [], False, ""
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])


class Tags:
    """Tags that are ordinary text here: where the next one is, and how much of a text's end may begin one."""

    def __init__(self, tags: Sequence[str], form: Format) -> None:
        self._tags = sorted({t for t in tags if t not in form.controls}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._tags)) or r"(?!)")
        self._begins = frozenset(tag[:n] for tag in self._tags for n in range(1, len(tag)))
        self._firsts = frozenset(tag[:1] for tag in self._tags)
        self._longest = max(map(len, self._tags), default=0)

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Where the text before the first tag ends, and the tag; or before what may begin one, and nothing."""
        found = self._pattern.search(text, at)
        if found:
            return found.start(), found[0]
        most = min(self._longest - 1, len(text) - at)
        if self._firsts.isdisjoint(text[len(text) - most :]):
            return len(text), ""
        held = next((n for n in range(most, 0, -1) if text[len(text) - n :] in self._begins), 0)
        return len(text) - held, ""

    def at(self, text: str, at: int) -> str:
        """The tag that stands there, or nothing."""
        found = self._pattern.match(text, at)
        return found[0] if found else ""

    def may_begin(self, text: str, at: int) -> bool:
        """Whether all of the text from there on may be the beginning of a tag."""
        return text[at : at + self._longest] in self._begins
