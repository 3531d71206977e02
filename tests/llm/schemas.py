"""Schemas of every kind that is supported, by name."""

from __future__ import annotations

from typing import Any


def record(
    properties: dict[str, Any], *, required: list[str] | None = None, **rest: Any
) -> dict[str, Any]:
    """A closed object; all of its properties are required unless it is said which."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **rest}  # fmt: skip


SHORT = {"type": "string", "maxLength": 12}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": record(
            {"value": {"type": "integer", "minimum": 0, "maximum": 9}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}
        )
    },
}  # fmt: skip

SCHEMAS: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 1200},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "quarter": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 4},
    "large": {"type": "integer", "minimum": 9_007_199_254_740_000, "maximum": 9_007_199_254_740_992},
    "string": SHORT,
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{3}$"},
    "search": {"type": "string", "pattern": "ab", "maxLength": 8},
    "alternatives": {"type": "string", "pattern": "^(cat|dog)s?$"},
    "control": {"type": "string", "pattern": "^[\\n\\t\\x01]{2,4}$"},
    "quotes": {"type": "string", "pattern": '^["\\\\/]{1,5}$'},
    "wide": {"type": "string", "pattern": "^[éß日🙂]{1,5}$"},
    "date": {"type": "string", "format": "date"},
    "date and time": {"type": "string", "format": "date-time", "maxLength": 30},
    "time": {"type": "string", "format": "time", "maxLength": 20},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "enum": {"enum": ["red", 5, None, True, {"a": [1]}, "grün", "a\"b\\c\n", 2.5]},
    "const": {"const": {"k": ["v", 1.5, {"": "\u2028"}], "\u00fc": "\x7f"}},
    "types": {"type": ["integer", "null", "boolean"], "minimum": 1, "maximum": 3},
    "any of": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, SHORT, {"type": "null"}]},
    "one of types": {"oneOf": [{"type": "boolean"}, SHORT]},
    "one of kinds": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "r": {"type": "integer", "minimum": 1, "maximum": 99}}),
            record({"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1, "maximum": 99}}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}, {"multipleOf": 2}]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "exactly": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 3, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, SHORT], "items": False, "minItems": 2},
    "nested arrays": {"type": "array", "maxItems": 2, "items": {"type": "array", "maxItems": 2, "items": {"type": "null"}}},
    "record": record({"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 130}}),
    "optional": record({"a": SHORT, "b": {"type": "null"}, "c": {"type": "boolean"}}, required=["b"]),
    "empty": record({}),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "patterns": {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": {"type": "null"}}, "additionalProperties": False, "maxProperties": 2},
    "at least one": record({"x": {"type": "null"}, "y": {"type": "null"}}, required=[], minProperties=1),
    "strange keys": record({"ключ": {"type": "null"}, "a\"b\\": {"type": "null"}, "\n\u0007": {"type": "null"}, "🙂 x": {"type": "null"}, "": {"type": "null"}}),
    "tree": TREE,
    "person": record(
        {
            "name": {"type": "string", "minLength": 1, "maxLength": 20},
            "address": record({"street": SHORT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}),
            "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}, "maxItems": 3},
            "score": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        }
    ),
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"flag": {"type": "boolean"}},
        "type": "array",
        "items": [{"$ref": "#/definitions/flag"}, {"type": "null"}],
        "additionalItems": False,
        "minItems": 2,
    },
}  # fmt: skip
