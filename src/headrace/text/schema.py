"""What is checked of a JSON Schema before a library compiles it, and where in it a refusal's keyword stands.

Owns the bounds, and the schemas that a library would take although no text of finite length, or not only valid ones,
would follow: see `check`. Knows no tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NoReturn
from urllib.parse import unquote

from headrace.errors import GrammarError
from headrace.text import numbers

MAX_BYTES = 512 << 10
MAX_DEPTH = 100
MAX_CAUSE = 2000  # characters of a message that are searched for keywords
MAX_SQUARED_PROPERTIES = (
    4_000_000  # compiling an object takes time with the square of its properties
)
MAX_VISITS = 300_000  # of schemas, in looking for endless recursion
KIND = "schema"

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
# Beside these keywords a reference is alone.
_SILENT = (
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
)  # fmt: skip
# What a message that does not name its keyword is about.
_MEANT = {
    "regex": "pattern",
    "Regex": "pattern",
    "Pointer": "$ref",
    "Resource": "$ref",
    "anyOf is empty": "enum",
    "integer interval": "minimum",
}
_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
_WORD = re.compile(r"\$?[A-Za-z]+")
# Dates of the years 1 to 9999, exactly: every date but 29 February, or 29 February of a leap year.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
# What a text of a format matches besides what the library has for it. Leap seconds are left out.
_FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt][0-9:]{{6}}[0-5]",
    "time": "^[0-9:]{6}[0-5]",
}

Json = dict[str, Any]
Place = tuple[
    Any, ...
]  # () is the root, else the place above and a key: a pointer is only spelled when it is told
Schema = Mapping[str, Any] | bool | str


def read(schema: Schema) -> Json:
    """A schema given as a value or as JSON text, checked. Raises GrammarError."""
    text = schema if isinstance(schema, str) else _dumped(schema)
    if len(text) > MAX_BYTES:
        raise GrammarError(KIND, "", f"has {len(text):,} characters; at most {MAX_BYTES:,}")
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(KIND, "", f"is not JSON: {error!s:.200}") from None
    if value is False:
        raise GrammarError(KIND, "", "is false: nothing satisfies it")
    root = {} if value is True else value
    if not isinstance(root, dict):
        raise GrammarError(KIND, "", "is neither an object nor a boolean")
    check(root)
    return root


def _dumped(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(KIND, "", f"is not JSON: {error!s:.200}") from None


def _once(pairs: list[tuple[str, Any]]) -> Json:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return out


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def check(root: Json) -> None:
    """Refuse what is out of bounds, what only endless texts satisfy, and what a grammar cannot say exactly."""
    _check_values(root)
    squares = 0
    for place, node in walk(root):
        _check_object(place, node)
        properties = node.get("properties")
        squares += len(properties) ** 2 if isinstance(properties, dict) else 0
        if squares > MAX_SQUARED_PROPERTIES:
            raise _refusal((place, "properties"), "properties: there are too many")
    _check_multiples(root)
    if not _Finite(root).holds():
        raise _refusal(((), "$ref") if "$ref" in root else (), _ENDLESS)


_ENDLESS = "only endless texts satisfy it: what it requires leads back to itself"


def _refusal(place: Place, cause: str) -> GrammarError:
    return GrammarError(KIND, pointer(place), cause)


def pointer(place: Place) -> str:
    """A place as a JSON pointer."""
    parts: list[str] = []
    while place:
        place, key = place
        parts.append(str(key).replace("~", "~0").replace("/", "~1")[:80])
    return "".join(f"/{part}" for part in reversed(parts))


def _check_values(root: Json) -> None:
    """Depth, and numbers that a grammar, which holds them as doubles, would change."""
    stack: list[tuple[Place, Any, int]] = [((), root, 1)]
    while stack:
        place, value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise GrammarError(KIND, "", f"is nested deeper than {MAX_DEPTH}")
        if isinstance(value, dict):
            stack += (((place, k), v, depth + 1) for k, v in value.items())
        elif isinstance(value, list):
            stack += (((place, i), v, depth + 1) for i, v in enumerate(value))
        elif isinstance(value, int) and not _exact(value):
            raise _refusal(place, "the number is no double")
        elif isinstance(value, float) and not math.isfinite(value):
            raise _refusal(place, "the number is too large for a double")


def _exact(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _check_object(place: Place, node: Json) -> None:
    """Repeated keys count once, and a grammar cannot forbid them where they are not named."""
    if found := numbers.fault(node):
        raise _refusal((place, found[0]), found[1])
    least, required = node.get("minProperties"), node.get("required")
    if not isinstance(least, int) or node.get("additionalProperties") is False:
        return
    named = len(set(map(str, required))) if isinstance(required, list) else 0
    if least - named > 1:
        cause = f"minProperties: at most one more than is required ({named}) where keys are free"
        raise _refusal((place, "minProperties"), cause)


def _check_multiples(root: Json) -> None:
    """Bound the multiples of all numbers, and of those that are followed at once."""
    steps = _steps(root, (), root)
    total = 0
    for step, place in steps.items():
        total += numbers.states(step) or 0
        if total > numbers.MAX_ALL_STATES:
            cause = "multipleOf: the schema's multiples have too many remainders together"
            raise _refusal(place, cause)
    if not numbers.joined_fault(steps):
        return
    visits = 0
    for place, node in walk(root):
        if not _joins(node):
            continue
        visits += sum(1 for _ in walk(root, place, node))
        if visits > MAX_VISITS:
            raise GrammarError(KIND, "", "multipleOf: it stands below too many choices")
        inside = _steps(root, place, node)
        if cause := numbers.joined_fault(inside):
            raise _refusal(next(reversed(inside.values())), cause)


def _steps(root: Json, place: Place, node: Json) -> dict[Fraction, Place]:
    """The multiples that a subschema and all below it ask for, each with its first place."""
    found: dict[Fraction, Place] = {}
    for at, below in walk(root, place, node):
        if (step := numbers.step_of(below)) is not None:
            found.setdefault(step, (at, "multipleOf"))
    return found


def _joins(node: Json) -> bool:
    """Whether several parts of a subschema are followed at once."""
    told = [key for key in node if key not in _SILENT]
    return any(key in told for key in ("allOf", "anyOf", "oneOf")) or (
        "$ref" in told and len(told) > 1
    )


def walk(root: Json, start: Place = (), node: Json | None = None) -> Iterator[tuple[Place, Json]]:
    """Every subschema that is an object, once, with its place; the root first, last what references alone reach.

    start, node: another subschema to begin with.
    """
    stack: list[tuple[Place, Any]] = [(start, root if node is None else node)]
    refs: dict[str, None] = {}  # those that are not followed yet
    known: set[str] = set()
    seen: set[int] = set()
    while stack or refs:
        if not stack:
            known |= set(refs)
            stack = [resolve(root, ref) for ref in reversed(refs)]
            refs = {}
        place, node = stack.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield place, node
        if isinstance(node.get("$ref"), str) and node["$ref"] not in known:
            refs[node["$ref"]] = None
        stack += reversed(list(_below(place, node)))


def _below(place: Place, node: Json) -> Iterator[tuple[Place, Any]]:
    yield from (((place, k), node[k]) for k in _SINGLE if k in node)
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from ((((place, key), i), v) for i, v in enumerate(node[key]))
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from ((((place, key), k), v) for k, v in node[key].items())


def resolve(root: Json, ref: str) -> tuple[Place, Any]:
    """The place and the schema of a pointer into this document; None for what the library has to judge."""
    if not ref.startswith("#") or (len(ref) > 1 and ref[1] != "/"):
        return (), None
    place: Place = ()
    node: Any = root
    for part in unquote(ref).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        place = (place, part)
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return (), None
    return place, node


def exact(text: str) -> str:
    """A checked schema, as JSON text, whose numbers, dates and times are what its keywords mean."""
    root = json.loads(text)
    for _, node in walk(root):
        numbers.tighten(node)
        name, every = node.get("format"), node.get("allOf", [])
        if isinstance(name, str) and name in _FORMATS and isinstance(every, list):
            node["allOf"] = [*every, {"pattern": _FORMATS[name]}]
    return json.dumps(root, ensure_ascii=False)


def find(root: Json, cause: str) -> Place:
    """The first keyword that a cause names, best with the value that it quotes; the root where there is none."""
    cause = cause[:MAX_CAUSE]
    nodes = list(walk(root))
    meant = [keyword for sign, keyword in _MEANT.items() if sign in cause]
    words = dict.fromkeys([*meant, *_WORD.findall(cause)])
    words |= {_EXCLUSIVE[word]: None for word in words if word in _EXCLUSIVE}  # they were made one
    keywords = [w for w in words if any(w in node for _, node in nodes)]
    for quoted in (True, False):
        for keyword in keywords:
            for place, node in nodes:
                if keyword in node and (not quoted or _quotes(cause, node[keyword])):
                    return (place, keyword)
    return ()


def _quotes(cause: str, value: Any) -> bool:
    return isinstance(value, str | int | float) and str(value).strip("#")[:100] in cause


class _Finite:
    """Whether a text of finite length can satisfy a schema: the least set of references that have one."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._visits = 0
        refs = {n["$ref"]: None for _, n in walk(root) if isinstance(n.get("$ref"), str)}
        self._targets = {ref: resolve(root, ref)[1] for ref in refs}
        self._known = {ref for ref, node in self._targets.items() if node is None}

    def holds(self) -> bool:
        order = [ref for ref in self._targets if ref not in self._known]
        while True:
            left = [ref for ref in order if not self._found(ref)]
            if len(left) == len(order):
                return self._node(self._root)
            order = left[::-1]

    def _found(self, ref: str) -> bool:
        if self._node(self._targets[ref]):
            self._known.add(ref)
        return ref in self._known

    def _node(self, node: Any) -> bool:
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise GrammarError(KIND, "", "$ref: references lead through too many schemas")
        if not isinstance(node, dict):
            return True  # false, too: the library refuses it, and knows why
        if "const" in node or "enum" in node:
            return True
        if isinstance(node.get("$ref"), str) and node["$ref"] not in self._known:
            return False
        if not all(map(self._node, listed(node, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            options = listed(node, key)
            if options and not any(map(self._node, options)):
                return False
        types = node.get("type", _TYPES)
        return any(self._type(node, t) for t in ([types] if isinstance(types, str) else types))

    def _type(self, node: Json, name: str) -> bool:
        if name == "object":
            named = node.get("properties")
            known = named if isinstance(named, dict) else {}
            rest = node.get("additionalProperties", True)
            return all(self._node(known.get(key, rest)) for key in listed(node, "required"))
        if name == "array" and isinstance(node.get("minItems"), int):
            first, items = listed(node, "prefixItems"), node.get("items", True)
            if isinstance(items, list):
                first, items = items, node.get("additionalItems", True)
            needed = first[: node["minItems"]]
            return all(map(self._node, needed)) and (
                len(first) >= node["minItems"] or self._node(items)
            )
        return True


def listed(node: Json, key: str) -> list[Any]:
    value = node.get(key)
    return value if isinstance(value, list) else []
