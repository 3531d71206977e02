"""The bodies of calls as families write them, read as they come: JSON objects, JSON arguments behind a name, elements.

A body reads from a text at a place and returns how far it came; what it leaves it wants to see again together with
what follows, and that is never more than a tag or a name. Knows nothing of what is around a body.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.text import schema as schemas
from headrace.text.tools import arguments
from headrace.text.tools.json_text import JsonText, whole
from headrace.text.tools.pieces import CallBegun, CallDone, CallPiece, Piece
from headrace.values import Tool

MAX_NAME = 256  # characters
MAX_GAP = 64  # of whitespace between tags

_SPACE = re.compile(r"[ \t\n\r]*")


class Calls:
    """The calls of one answer: which tools there are, and how many calls were begun."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.count = 0


class Body(ABC):
    """What is between the tags of a call. error: why it is none. over: nothing of it can follow. enough: it could end
    here."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.error = ""
        self.over = False
        self.pieces: list[Piece] = []
        self.index: int | None = None
        self._strict = False  # the tool's arguments follow its schema
        self._parts: list[str] = []

    @property
    def enough(self) -> bool:
        return self.over

    @property
    def begun(self) -> bool:
        """Whether a call was told of."""
        return self.index is not None

    @abstractmethod
    def feed(self, text: str, at: int) -> int:
        """Read from a place of the text; returns how far it came."""

    def closed(self) -> list[Piece]:
        """What is told once the closing tag is there."""
        return [] if self.index is None else [CallDone(self.index, "".join(self._parts))]

    def _begin(self, name: str) -> None:
        if name not in self.calls.tools:
            self.error = f"the tool {name[:80]!r} is not declared"
            return
        self.index = self.calls.count
        self._strict = self.calls.tools[name].strict
        self.calls.count += 1
        self.pieces.append(CallBegun(self.index, name))

    def _put(self, fragment: str) -> None:
        if fragment and self.index is not None:
            self._parts.append(fragment)
            self.pieces.append(CallPiece(self.index, fragment))


class Named(Body):
    """Arguments as a JSON object; the name came before."""

    def __init__(self, calls: Calls, name: str) -> None:
        super().__init__(calls)
        self._begin(name)
        self._value = JsonText(strict=self._strict)

    def feed(self, text: str, at: int) -> int:
        at = self._value.feed(text, at)
        if self._value.kind not in ("", "{"):
            self.error = "the arguments are no JSON object"
            return at
        self._put(self._value.out())
        self.error, self.over = self._value.error, self._value.done
        return at


class Object(Body):
    """A JSON object with the name and the arguments, in any order; other keys mean nothing.

    doubtful: nothing else says that it is a call, and so a key that calls do not have says that it is none.
    """

    def __init__(self, calls: Calls, *, doubtful: bool = False) -> None:
        super().__init__(calls)
        self._doubtful = doubtful
        self._expect = "open"
        self._key: str | None = None  # of the value that is read
        self._value: JsonText | None = None
        self._said = False  # arguments were there
        self._early: list[str] = []  # arguments that came before the name
        self._new_key = ""

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not (self.over or self.error):
            if self._value is not None:
                at = self._read(self._value, text, at)
            else:
                at = self._mark(text, _end_of_space(text, at))
        return at

    def _mark(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        char = text[at]
        if self._expect in ("open", "comma", "colon") and char == _MARKS[self._expect]:
            self._expect = _NEXT[self._expect]
            if self._expect == "value":
                self._value = JsonText(strict=self._strict)
            return at + 1
        if self._expect in ("key", "first key") and char == '"':
            self._key, self._value = None, JsonText()
            return at
        if self._expect in ("comma", "first key") and char == "}":
            self._finish()
            return at + 1
        self.error = f"{char!r} is not where a call has it"
        return at

    def _read(self, value: JsonText, text: str, at: int) -> int:
        at = value.feed(text, at)
        self.error = value.error
        if self._key in ("arguments", "parameters") and value.kind == "{":
            self._arguments(value.out())
        elif value.done:
            self._whole(self._key, value.out())
        if value.done:
            self._expect = "colon" if self._key is None else "comma"
            self._key = self._new_key if self._key is None else self._key
            self._value = None
        return at

    def _arguments(self, fragment: str) -> None:
        if self.index is None:
            self._early.append(fragment)
        else:
            self._put(fragment)
        self._said = True

    def _whole(self, key: str | None, text: str) -> None:
        """A key, or a value that is not passed on as it comes."""
        if key is None:
            self._new_key = str(json.loads(text))
            if self._said and self._new_key in ("arguments", "parameters"):
                self.error = "the arguments are there twice"
            elif self._doubtful and self.index is None and self._new_key not in _KEYS:
                self.error = f"a call has no {self._new_key[:80]!r}"
        elif key == "name" and self.index is None:
            if text[:1] != '"':
                self.error = "the name is no string"
                return
            self._begin(str(json.loads(text)))
            self._put("".join(self._early))
        elif key in ("arguments", "parameters") and text != "null":
            twice = text[:1] == '"'  # some encode them so
            inside = whole(json.loads(text), strict=self._strict) if twice else None
            if inside is None or inside.error or inside.kind != "{":
                self.error = "the arguments are no JSON object"
                return
            self._arguments(inside.out())

    def _finish(self) -> None:
        if self.index is None:
            self.error = "it has no name"
            return
        if not self._said:
            self._put("{}")
        self.over = True


_KEYS = frozenset(("name", "arguments", "parameters", "type", "id"))
_MARKS = {"open": "{", "comma": ",", "colon": ":"}
_NEXT = {"open": "first key", "comma": "key", "colon": "value"}


class Objects(Body):
    """One such object, or a list of them. eager: a call is complete with its object, no closing tag follows."""

    def __init__(self, calls: Calls, *, eager: bool, doubtful: bool = False) -> None:
        super().__init__(calls)
        self._eager = eager
        self._doubtful = doubtful
        self._listed: bool | None = None
        self._one: Object | None = None
        self._comma = False  # one has ended
        self._held: list[Piece] = []

    @property
    def enough(self) -> bool:
        return self.over or (self._comma and self._one is None)

    @property
    def begun(self) -> bool:
        return self.index is not None or (self._one is not None and self._one.begun)

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and not (self.over or self.error):
            at = self._item(text, at) if self._one is not None else self._between(text, at)
        return at

    def _item(self, text: str, at: int) -> int:
        assert self._one is not None
        at = self._one.feed(text, at)
        if self._one.index is not None and self._one.pieces:
            self.index = self._one.index
            self.pieces += self._held + self._one.pieces
            self._held, self._one.pieces = [], []
        self.error = self._one.error
        if self._one.over:
            done, self._one, self._comma = self._one.closed(), None, True
            self.over = not self._listed
            if self._eager:
                self.pieces += done
            else:
                self._held = done
        return at

    def _between(self, text: str, at: int) -> int:
        at = _end_of_space(text, at)
        if at == len(text):
            return at
        char = text[at]
        if self._listed is None and char == "[":
            self._listed = True
        elif char == "{" and not self._comma:
            self._listed = bool(self._listed)
            self._one = Object(self.calls, doubtful=self._doubtful)
            return at
        elif self._listed and self._comma and char in ",]":
            self._comma = self.over = char == "]"
        else:
            self.error = f"{char!r} where a call was expected"
            return at
        return at + 1

    def closed(self) -> list[Piece]:
        held, self._held = self._held, []
        return held


FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


def unclosed(close: str) -> str:
    """A pattern of the ends of a function and of its call."""
    return rf"{END_FUNCTION}[ \t\n\r]{{0,{MAX_GAP}}}{re.escape(close)}"


class Elements(Body):
    """`<function=f>` with a `<parameter=p>` for every argument, whose text is typed by the tool's schema.

    A parameter ends at its closing tag only where another parameter, or the function's end, follows. close: the tag
    behind the function, if text can spell it; both ends within a parameter say that its own closing tag is missing.
    """

    def __init__(self, calls: Calls, close: str = "") -> None:
        super().__init__(calls)
        self._close = close
        self._ends = re.compile(unclosed(close) if close else r"(?!)")
        self._step = self._function
        self._root: dict[str, Any] = {}
        self._keys: set[str] = set()
        self._allowed: frozenset[str] | None = None
        self._fresh = False  # of a value nothing was read
        self._text: list[str] | None = None  # of a value that is not passed on as it comes

    def feed(self, text: str, at: int) -> int:
        while not (self.over or self.error):
            before, step = at, self._step
            at = self._step(text, at)
            if at == before and self._step == step:
                break
        return at

    def _function(self, text: str, at: int) -> int:
        at = _end_of_space(text, at)
        name, stop = self._named(FUNCTION, text, at)
        if name is None:
            return at
        self._begin(name)
        if not self.error:
            self._root = dict(self.calls.tools[name].parameters)
            self._step = self._inside
        return stop

    def _named(self, tag: str, text: str, at: int) -> tuple[str | None, int]:
        """The name of an opening tag, and where it ends; None while it is not all there, or is none."""
        start = at + len(tag)
        if not text.startswith(tag, at):
            if not tag.startswith(text[at:start]):
                self.error = f"{text[at]!r} where {tag}…> was expected"
            return None, at
        stop = text.find(">", start, start + MAX_NAME + 1)
        if stop < 0:
            if len(text) - start > MAX_NAME:
                self.error = f"a name of more than {MAX_NAME} characters"
            return None, at
        return text[start:stop].strip(), stop + 1

    def _inside(self, text: str, at: int) -> int:
        at = _end_of_space(text, at)
        if text.startswith(END_FUNCTION, at):
            self._put("}" if self._keys else "{}")
            self.over = True
            return at + len(END_FUNCTION)
        if END_FUNCTION.startswith(text[at : at + len(END_FUNCTION)]):
            return at
        key, stop = self._named(PARAMETER, text, at)
        if key is None:
            return at
        if key in self._keys:
            self.error = f"the parameter {key[:80]!r} is there twice"
            return at
        self._allowed = arguments.types(self._root, _declared(self._root, key))
        passed = arguments.is_text(self._allowed)
        opening = ", " if self._keys else "{"
        self._put(f"{opening}{arguments.quoted(key)}: " + '"' * passed)
        self._keys.add(key)
        self._text, self._fresh, self._step = None if passed else [], True, self._value
        return stop

    def _value(self, text: str, at: int) -> int:
        if self._fresh and at < len(text):
            self._fresh = False
            at += text[at] == "\n"
        stop = text.find(END_PARAMETER, at)
        if ends := self._ends.search(text, at, stop if stop >= 0 else len(text)):
            self._some(text[at : ends.start()])
            self.error = "a parameter is not closed"
            return ends.start()
        if stop < 0:
            end = self._before_an_end(text, at)
            self._some(text[at:end])
            return end
        last = stop - (stop > at and text[stop - 1] == "\n")
        follows = self._follows(text, stop + len(END_PARAMETER))
        if follows is False:
            self._some(text[at : stop + len(END_PARAMETER)])
            return stop + len(END_PARAMETER)
        self._some(text[at:last])
        if follows is None:
            return last
        if self._text is None:
            self._put('"')
        else:
            text_of_it = "".join(self._text)
            self._put(arguments.typed(self._allowed, text_of_it, strict=self._strict))
        self._step = self._inside
        return stop + len(END_PARAMETER)

    def _before_an_end(self, text: str, at: int) -> int:
        """Where what may be the beginning of an end begins."""
        tags = (END_PARAMETER, "\n" + END_PARAMETER, END_FUNCTION)
        end = len(text) - max(_overlap(text, tag, at) for tag in tags)
        last = text.rfind(END_FUNCTION, at)
        gap = last + len(END_FUNCTION)
        rest = _end_of_space(text, gap)
        if last >= 0 and rest - gap <= MAX_GAP and self._close.startswith(text[rest:] or "<"):
            return min(end, last)
        return end

    def _some(self, text: str) -> None:
        if self._text is None:
            self._put(arguments.inner(text))
        else:
            self._text.append(text)

    def _follows(self, text: str, at: int) -> bool | None:
        """Whether what follows a closing tag makes it one; None while that is not all there."""
        stop = _end_of_space(text, at)
        if stop - at > MAX_GAP:
            return False
        rest = text[stop : stop + len(PARAMETER)]
        if rest in (PARAMETER, END_FUNCTION):
            return True
        return None if PARAMETER.startswith(rest) or END_FUNCTION.startswith(rest) else False


def _declared(root: dict[str, Any], key: str) -> object:
    """The schema of a parameter, or None."""
    node: Any = root
    for _ in range(8):
        if not isinstance(node, Mapping):
            return None
        properties = node.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return properties[key]
        if not isinstance(node.get("$ref"), str):
            return node.get("additionalProperties")
        node = schemas.resolve(root, node["$ref"])[1]
    return None


def _end_of_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


def _overlap(text: str, tag: str, at: int) -> int:
    """How much of the text's end, from `at` on, could be the beginning of a tag."""
    most = min(len(tag) - 1, len(text) - at)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)
