"""The text of an argument as JSON, typed by the tool's schema; for formats that write arguments without quotes.

What the schema lets be a string stays one, whatever it looks like: `00123`, `false`, `null`, `1e5`. Without any type,
text that is a JSON object or array is that, everything else a string. Where no string is allowed the text is read as
what is, and kept as a string where it can't be: that tells the client more than a refusal, and its own validation
sees it. A number that no double holds is kept as a string, too (`json_text`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.text import schema as schemas
from headrace.text.tools import json_text

MAX_VISITS = 1000  # of schemas, for one argument's types
MAX_DEPTH = 64

TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_NUMERIC = {"integer": "number"}
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
_IMPLIED = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"),
}


def types(root: Mapping[str, Any], schema: object) -> frozenset[str] | None:
    """What a value may be, of `TYPES`; None where the schema does not say. root: what `$ref` points into."""
    return _Types(dict(root)).of(schema) or None


class _Types:
    """The least set: a reference that is being followed adds nothing to it. Beyond the bounds nothing is looked at."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._following: set[str] = set()
        self._visits = 0
        self._depth = 0

    def of(self, schema: object) -> frozenset[str] | None:
        self._visits += 1
        if not isinstance(schema, Mapping) or self._visits > MAX_VISITS or self._depth == MAX_DEPTH:
            return None
        self._depth += 1
        try:
            return self._of(schema)
        finally:
            self._depth -= 1

    def _of(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        found = [self._named(schema), self._valued(schema), self._referred(schema)]
        found += [self._any(schema.get("anyOf")), self._any(schema.get("oneOf"))]
        every = schema.get("allOf")
        found += [self.of(one) for one in every] if isinstance(every, list) else []
        said = [one for one in found if one]
        if said:
            return frozenset.intersection(*said)
        return frozenset() if frozenset() in found else self._implied(schema)

    def _named(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        name = schema.get("type")
        names = [name] if isinstance(name, str) else name if isinstance(name, list) else []
        known = frozenset(_NUMERIC.get(n, n) for n in names if isinstance(n, str)) & TYPES
        if known and schema.get("nullable") is True:
            known |= {"null"}
        return known or None

    def _valued(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        if "const" in schema:
            return frozenset((_kind(schema["const"]),))
        values = schema.get("enum")
        return frozenset(map(_kind, values)) if isinstance(values, list) and values else None

    def _referred(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return None
        if ref in self._following:
            return frozenset()
        self._following.add(ref)
        try:
            return self.of(schemas.resolve(self._root, ref)[1])
        finally:
            self._following.discard(ref)

    def _any(self, options: object) -> frozenset[str] | None:
        if not isinstance(options, list) or not options:
            return None
        found = [self.of(one) for one in options]
        said = [one for one in found if one is not None]
        return frozenset.union(*said) if said and len(said) == len(found) else None

    def _implied(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        found = [kind for kind, keys in _IMPLIED.items() if any(key in schema for key in keys)]
        return frozenset(found) if len(found) == 1 else None


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def is_text(allowed: frozenset[str] | None) -> bool:
    """Whether a value of these types is a string whatever it looks like, and can so be passed on as it comes."""
    return allowed is not None and "string" in allowed


def typed(allowed: frozenset[str] | None, text: str, *, strict: bool = False) -> str:
    """An argument's text as JSON text; allowed: `types`; strict: see `json_text.JsonText`."""
    if is_text(allowed):
        return quoted(text)
    bare = text.strip()
    if allowed is None:
        allowed = frozenset(("object", "array"))
    word = bare.lower()
    if "boolean" in allowed and word in ("true", "false"):
        return word
    if "null" in allowed and word in ("null", "none"):
        return "null"
    value = json_text.whole(bare, strict=strict)
    if value.error or _KINDS.get(value.kind, "number") not in allowed:
        return quoted(text)
    return value.out()


def quoted(text: str) -> str:
    """As a string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def inner(text: str) -> str:
    """As a part of a string of JSON."""
    return quoted(text)[1:-1]
