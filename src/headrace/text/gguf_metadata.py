"""The `tokenizer.ggml.*` keys of a GGUF file, typed and checked. A trust boundary.

Owns reading; knows nothing of what is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from headrace.errors import FileError

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 22
MAX_PIECE = 1024  # characters of one token


class Kind(IntEnum):
    """What a token is (GGUF's token_type)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Entry:
    """One token of the vocabulary."""

    id: int
    text: str
    kind: Kind


class Metadata:
    """Reads one key at a time; FileError names the file and the key."""

    def __init__(self, values: Mapping[str, object], path: str | Path) -> None:
        self._values = values
        self._path = path

    def error(self, key: str, cause: str) -> FileError:
        return FileError(self._path, PREFIX + key, cause)

    def has(self, key: str) -> bool:
        return PREFIX + key in self._values

    def text(self, key: str) -> str:
        value = self._values.get(PREFIX + key)
        if not isinstance(value, str):
            raise self.error(key, "it is missing" if value is None else "it is not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(PREFIX + key, default)
        if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
            raise self.error(key, "it is not a boolean")
        return bool(value)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._number(key) if self.has(key) else None
        if value is not None and not 0 <= value < num_tokens:
            raise self.error(key, f"it is {value}, the vocabulary has {num_tokens} tokens")
        return value

    def _number(self, key: str) -> int:
        value = self._values[PREFIX + key]
        item = getattr(value, "item", None)
        number = item() if callable(item) and not isinstance(value, int) else value
        if type(number) is not int:
            raise self.error(key, "it is not an integer")
        return number

    def items(self, key: str, limit: int) -> list[Any]:
        value = self._values.get(PREFIX + key)
        to_list = getattr(value, "tolist", None)
        found = to_list() if callable(to_list) else value
        if not isinstance(found, Sequence) or isinstance(found, str | bytes):
            raise self.error(key, "it is missing" if value is None else "it is not an array")
        if len(found) > limit:
            raise self.error(key, f"it holds {len(found)} items, more than {limit}")
        return list(found)

    def strings(self, key: str, limit: int) -> list[str]:
        found = self.items(key, limit)
        for index, value in enumerate(found):
            if not isinstance(value, str) or len(value) > MAX_PIECE or not _encodable(value):
                cause = f"item {index} is not UTF-8 text of at most {MAX_PIECE} characters"
                raise self.error(key, cause)
        return found

    def scores(self, count: int) -> list[float]:
        found = self.items("scores", MAX_TOKENS)
        self._same_length("scores", found, count)
        for index, value in enumerate(found):
            if type(value) not in (float, int) or not math.isfinite(value):
                raise self.error("scores", f"item {index} is not a finite number")
        return [float(v) for v in found]

    def entries(self) -> list[Entry]:
        """The vocabulary. Two tokens of the same text are refused, unless they are unused."""
        texts = self.strings("tokens", MAX_TOKENS)
        if not texts:
            raise self.error("tokens", "it is empty")
        kinds = self._kinds(len(texts))
        entries = [Entry(i, text, kinds[i]) for i, text in enumerate(texts)]
        self._refuse_duplicates(entries)
        return entries

    def _kinds(self, count: int) -> list[Kind]:
        if not self.has("token_type"):
            return [Kind.NORMAL] * count
        found = self.items("token_type", MAX_TOKENS)
        self._same_length("token_type", found, count)
        known = {k.value: k for k in Kind}
        for index, value in enumerate(found):
            if type(value) is not int or value not in known:
                raise self.error("token_type", f"item {index} is {value!r:.40}, not one of 1 to 6")
        return [known[value] for value in found]

    def _same_length(self, key: str, found: Sequence[object], count: int) -> None:
        if len(found) != count:
            raise self.error(key, f"it holds {len(found)} items, tokens holds {count}")

    def _refuse_duplicates(self, entries: list[Entry]) -> None:
        seen: dict[str, int] = {}
        for entry in entries:
            if entry.kind == Kind.UNUSED:
                continue
            first = seen.setdefault(entry.text, entry.id)
            if first != entry.id:
                cause = f"items {first} and {entry.id} are both {entry.text!r:.60}"
                raise self.error("tokens", cause)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
