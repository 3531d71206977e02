"""Marks: private stand-ins for control tokens inside text that headrace itself produced.

A control token enters an encoding only through its mark. A mark holds a random number drawn when
the tokenizer is loaded, so no prompt, message or template can spell one; the ids that come out do
not depend on it. Owns the marks and where they go; knows no vocabulary beyond the names given.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

_OPEN, _CLOSE = "\U0010fffe", "\U0010ffff"  # noncharacters: never changed by Unicode normalisation


@dataclass(frozen=True)
class AddedName:
    """One entry of a tokenizer's added vocabulary."""

    id: int
    content: str
    special: bool
    single_word: bool = False
    normalized: bool = False


class Marks:
    """Replaces the text of control tokens by marks, longest name first, as the tokenizer would."""

    def __init__(self, added: list[AddedName], nonce: str | None = None) -> None:
        self._nonce = nonce or secrets.token_hex(8)
        self._special = {a.content: a for a in added if a.special}
        # Added tokens that are sought in normalised text come after those that are not.
        self._pattern = _alternation([a for a in added if a.special or not a.normalized])
        self._specials_only = _alternation([a for a in added if a.special])

    @property
    def by_id(self) -> Mapping[int, str]:
        """The mark of every control token."""
        return {a.id: self._mark(f"{a.id:x}") for a in self._special.values()}

    def of_byte(self, value: int) -> str:
        """The mark of one byte that is not part of valid UTF-8."""
        return self._mark(f"x{value:02x}")

    def _mark(self, name: str) -> str:
        return f"{_OPEN}{self._nonce}{name}{_CLOSE}"

    def mark(self, text: str) -> str:
        """`text` with every control token's name replaced by its mark. For trusted text only."""
        return self._pattern.sub(self._replace, text) if self._pattern else text

    def _replace(self, match: re.Match[str]) -> str:
        added = self._special.get(match[0])
        return match[0] if added is None else self._mark(f"{added.id:x}")

    def count(self, text: str) -> int:
        """Marks in a text that holds no other text in this form."""
        return text.count(_OPEN + self._nonce)

    def names_in(self, text: str) -> list[tuple[int, int]]:
        """Spans of `text` that spell a control token's name."""
        if self._specials_only is None:
            return []
        return [m.span() for m in self._specials_only.finditer(text)]

    @property
    def alphabet(self) -> frozenset[str]:
        """Every character that occurs in a control token's name."""
        return frozenset("".join(self._special))


def _alternation(added: list[AddedName]) -> re.Pattern[str] | None:
    ordered = sorted((a for a in added if a.content), key=lambda a: -len(a.content))
    return re.compile("|".join(map(_branch, ordered))) if ordered else None


def _branch(added: AddedName) -> str:
    text = re.escape(added.content)
    return rf"(?<!\w){text}(?!\w)" if added.single_word else text
