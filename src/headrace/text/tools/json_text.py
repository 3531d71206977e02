"""One JSON value, checked and put right as it comes, without recursion and without looking back.

Owns what of a model's JSON is forgiven: line ends and other control characters inside strings, which are escaped;
halves of surrogate pairs, which become U+FFFD, because no UTF-8 can hold them; and numbers that no double holds (1e999,
integers of hundreds of digits), because JSON readers refuse them, or read infinity: they become strings of their text,
and the largest double in arguments that a grammar held to a schema. Everything else that is not JSON is an error.
"""

from __future__ import annotations

import json
import math
import re
import sys

MAX_DEPTH = 90  # a message that is replayed with its calls is nested deeper, and conversations are bounded at 100
MAX_NUMBER = 1 << 16  # characters

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_PART = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_UNPAIRED = "\\ufffd"
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonText:
    """Reads one value. `feed` what came since; `out` has its text, `done` and `error` say how it stands.

    strict: the value is one that a schema's grammar allowed, and stays one.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self.done = False
        self.error = ""
        self.kind = ""  # the value's first character
        self.number: list[str] = []  # of a number that has not ended
        self._size = 0
        self._out: list[str] = []
        self._open = bytearray()  # 1 for an object, 0 for an array
        self._expect = "value"
        self._word = ""
        self._hex = ""  # digits of an escape
        self._high = ""  # the first half of a surrogate pair, while the second may follow
        self._is_key = False

    def out(self) -> str:
        """The text since the last time this was asked."""
        text = "".join(self._out)
        self._out.clear()
        return text

    def feed(self, text: str, at: int) -> int:
        """Read from `at`; returns where it stopped: the text's end, or behind the value, or at the error."""
        while at < len(text) and not self.done and not self.error:
            if self._expect == "string":
                at = self._string(text, at)
            elif self._expect == "number":
                at = self._digits(text, at)
            else:
                at = self._between(text, at)
        return at

    def end(self) -> None:
        """Nothing follows: a number on its own ends here."""
        if self._expect == "number" and not self.error:
            self._close_number()

    def _between(self, text: str, at: int) -> int:
        if self._expect in ("word", "escape", "hex"):
            return self._letter(text, at)
        stop = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if stop > at:
            if self._open:
                self._out.append(text[at:stop])
            return stop
        char = text[at]
        if self._expect == "comma" and char in ",}]" and self._after(char):
            return at + 1
        if self._expect == "colon" and char == ":":
            return self._put(char, "value", at)
        if self._expect in ("value", "first item") and self._begins(char):
            return at + (self._expect != "number")
        if self._expect in ("first item", "first key") and char in "]}" and self._after(char):
            return at + 1
        if self._expect in ("key", "first key") and char == '"':
            self._is_key = True
            return self._put(char, "string", at)
        self.error = self.error or f"{char!r} where {_NAMES[self._expect]} was expected"
        return at

    def _put(self, text: str, expect: str, at: int) -> int:
        self._out.append(text)
        self._expect = expect
        return at + 1

    def _after(self, char: str) -> bool:
        """A comma or a closing bracket; False for the wrong one."""
        if char == ",":
            self._expect = "key" if self._open[-1] else "value"
        elif (char == "}") == bool(self._open[-1]):
            self._open.pop()
            self._ended()
        else:
            return False
        self._out.append(char)
        return True

    def _begins(self, char: str) -> bool:
        if not self.kind:
            self.kind = char
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                self.error = f"nested deeper than {MAX_DEPTH}"
                return False
            self._open.append(char == "{")
            self._expect = "first key" if char == "{" else "first item"
        elif char == '"':
            self._is_key = False
            self._expect = "string"
        elif char in _WORDS:
            self._word = _WORDS[char][1:]
            self._expect = "word"
        elif char in "-0123456789":
            self._size = 0
            self._expect = "number"
            return True
        else:
            return False
        self._out.append(char)
        return True

    def _ended(self) -> None:
        """A value that is not a key has ended."""
        self._expect = "comma"
        self.done = not self._open

    def _string(self, text: str, at: int) -> int:
        stop = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
        if self._high and (stop > at or text[at] != "\\"):
            self._unpaired()
        self._out.append(text[at:stop])
        if stop == len(text):
            return stop
        char = text[stop]
        if char == '"':
            self._out.append(char)
            if self._is_key:
                self._expect = "colon"
            else:
                self._ended()
        elif char == "\\":
            self._expect = (
                "escape"  # put out with what follows, so that a fragment ends between characters
            )
        else:
            self._out.append(json.dumps(char)[1:-1])
        return stop + 1

    def _letter(self, text: str, at: int) -> int:
        char = text[at]
        if self._expect == "word" and char == self._word[:1]:
            self._out.append(char)
            self._word = self._word[1:]
            if not self._word:
                self._ended()
        elif self._expect == "escape" and char in '"\\/bfnrtu':
            self._expect = "hex" if char == "u" else "string"
            if char != "u":
                self._unpaired()
                self._out.append("\\" + char)
        elif self._expect == "hex" and char in _HEX:
            self._hex += char
            if len(self._hex) == 4:
                self._unit()
        else:
            self.error = f"{char!r} in a {'word' if self._expect == 'word' else 'string'}"
            return at
        return at + 1

    def _unit(self) -> None:
        """An escape of a UTF-16 unit is complete."""
        digits, self._hex, self._expect = self._hex, "", "string"
        code, high = int(digits, 16), self._high
        if 0xDC00 <= code <= 0xDFFF:
            self._high = ""
            self._out.append(f"{high}\\u{digits}" if high else _UNPAIRED)
            return
        self._unpaired()
        if 0xD800 <= code <= 0xDBFF:
            self._high = f"\\u{digits}"
        else:
            self._out.append(f"\\u{digits}")

    def _unpaired(self) -> None:
        if self._high:
            self._high = ""
            self._out.append(_UNPAIRED)

    def _digits(self, text: str, at: int) -> int:
        stop = _NUMBER_PART.match(text, at).end()  # type: ignore[union-attr]
        self.number.append(text[at:stop])
        self._size += stop - at
        if self._size > MAX_NUMBER:
            self.error = f"a number of more than {MAX_NUMBER:,} characters"
        elif stop < len(text):
            self._close_number()
        return stop

    def _close_number(self) -> None:
        text = "".join(self.number)
        self.number.clear()
        if not _NUMBER.fullmatch(text):
            self.error = f"{text[:40]!r} is no number"
            return
        self._out.append(number(text, strict=self._strict))
        self._ended()


_NAMES = {
    "value": "a value",
    "first item": "a value",
    "key": "a key",
    "first key": "a key",
    "colon": "a colon",
    "comma": "a comma or an end",
}


def number(text: str, *, strict: bool = False) -> str:
    """A number of JSON as it is. Where a double would be infinite, a string; with `strict` the largest double."""
    if math.isfinite(float(text)):
        return text
    return f"{'-' * text.startswith('-')}{sys.float_info.max!r}" if strict else f'"{text}"'


def whole(text: str, *, strict: bool = False) -> JsonText:
    """A value that is all there; its error is set unless it is one value and nothing else."""
    value = JsonText(strict=strict)
    at = value.feed(text, 0)
    value.end()
    if not value.error and (not value.done or text[at:].strip(" \t\n\r")):
        value.error = "the value is incomplete" if not value.done else "text follows the value"
    return value
