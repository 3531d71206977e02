"""Schemas that cannot be followed exactly are refused, with the keyword and its place."""

from __future__ import annotations

import calendar
import json
import re
from itertools import pairwise
from typing import Any

import pytest

import tiny
from headrace.errors import ConstraintError, GrammarError
from headrace.text import schema as schemas
from headrace.text.grammar import GrammarCompiler
from headrace.text.tokenizer import Tokenizer

LOOP = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.from_json(tiny.tokenizer_json(), eos=(258,)))


def at(schema: Any, depth: int = 2) -> dict[str, Any]:
    """A schema below properties, where its place is /properties/p/properties/p."""
    for _ in range(depth):
        schema = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    return schema


REFUSED: list[tuple[Any, str, str]] = [
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if", "/if"),
    ({"not": {"type": "string"}}, "not", "/not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
    ({"type": "array", "contains": {"type": "string"}}, "contains", "/contains"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames", "/propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", "/dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", "/unevaluatedProperties"),
    ({"$dynamicRef": "#x"}, "dynamicRef", "/$dynamicRef"),
    ({"type": "string", "format": "iri-reference"}, "format", "/format"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "/oneOf"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum", "/minimum"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems", "/minItems"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength", "/minLength"),
    ({"enum": []}, "", "/enum"),
    ({"type": "strin"}, "type", "/type"),
    ({"type": "integer", "minimum": "x"}, "minimum", "/minimum"),
    ({"type": "object", "required": "a"}, "required", "/required"),
    ({"type": "object", "required": ["a"], "properties": {"a": False}}, "required", "/required"),
    ({"$ref": "https://example.com/other.json"}, "other.json", "/$ref"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around", "/pattern"),
    ({"type": "string", "pattern": "("}, "unclosed", "/pattern"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "", "/pattern"),
    ({"const": 2**53 + 1}, "double", "/const"),
    ({"enum": [1, 10**400]}, "double", "/enum/1"),
    ({"type": "number", "multipleOf": 0.01}, "multipleOf", "/multipleOf"),
    ({"type": "object", "minProperties": 2, "additionalProperties": {"type": "integer"}}, "minProperties", "/minProperties"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda c: str(c[0])[:50])
@pytest.mark.parametrize("depth", [0, 2])
def test_refused_with_keyword_and_place(
    compiler: GrammarCompiler, case: tuple[Any, str, str], depth: int
) -> None:
    schema, keyword, place = case
    with pytest.raises(GrammarError) as caught:
        compiler.schema(at(schema, depth))
    assert keyword in caught.value.message
    assert caught.value.code == "schema_unsupported"
    assert caught.value.exit_code == 2
    if place:
        assert caught.value.place == "/properties/p" * depth + place


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "5", '"x"', "false", "null", '{"type": "string", "type": "integer"}', '{"minimum": NaN}',
     '{"minimum": 1e999}', "[" * 100_000, '{"title": "' + "x" * schemas.MAX_BYTES + '"}'],
)  # fmt: skip
def test_what_is_no_schema(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(GrammarError):
        compiler.schema(text)


@pytest.mark.parametrize(
    "value", [{"enum": [object()]}, {"minimum": float("nan")}, {1: {2}}, {"enum": ["\ud800"]}]
)
def test_values_that_are_no_json(compiler: GrammarCompiler, value: Any) -> None:  # fmt: skip
    with pytest.raises(GrammarError):
        compiler.schema(value)


ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/x", "$defs": {"x": LOOP}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": LOOP, "y": {"$ref": "#/$defs/x"}}},
    {"allOf": [{"type": "object"}, {"$ref": "#/$defs/x"}], "$defs": {"x": LOOP}},
    {"type": "object", "required": ["k"], "additionalProperties": {"$ref": "#"}},
]  # fmt: skip
ENDING: list[dict[str, Any]] = [
    {"type": "array", "items": {"$ref": "#"}},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": LOOP}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"type": "null"}}},
    {"$ref": "#/$defs/x~1y~0z", "$defs": {"x/y~z": {"type": "null"}}},
    {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 1},
]  # fmt: skip


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
def test_schemas_of_endless_texts_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="endless"):
        schemas.read(schema)


@pytest.mark.parametrize("schema", ENDING, ids=str)
def test_recursion_that_can_end_is_not(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    compiler.schema(schema)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("count", [100, 3000, 7000])
def test_long_chains_of_references(compiler: GrammarCompiler, forward: bool, count: int) -> None:
    """In whatever order they stand, they are not too much for a stack."""
    walk = compiler.schema(chain(count, forward)).start()
    for token in Tokenizer.from_json(tiny.tokenizer_json()).encode("null"):
        walk.advance(token)
    assert walk.can_end


def chain(count: int, forward: bool) -> dict[str, Any]:
    """A schema that is reached over `count` references."""
    names = [f"d{i}" for i in range(count)]
    links: dict[str, Any] = {a: {"$ref": f"#/$defs/{b}"} for a, b in pairwise(names)}
    links[names[-1]] = {"type": "null"}
    ordered = dict(links.items() if forward else reversed(links.items()))
    return {"$ref": "#/$defs/d0", "$defs": ordered}


def test_long_keys_above_many_schemas(compiler: GrammarCompiler) -> None:
    """Places are spelled only when they are told."""
    below = {f"p{i}": {"type": "null"} for i in range(1900)}
    schema: dict[str, Any] = {"type": "object", "properties": below}
    for _ in range(20):
        schema = {"type": "object", "properties": {"k" * 15_000: schema}}
    compiler.schema(schema)
    with pytest.raises(GrammarError) as caught:
        compiler.schema({**schema, "required": ["a"], "properties": {"k" * 15_000: {"not": {}}}})
    assert len(caught.value.message) < 1000


def test_a_bound_on_properties(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="too many"):
        compiler.schema({"properties": {f"p{i}": {"type": "null"} for i in range(2500)}})


def test_a_bound_on_depth(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="deeper"):
        compiler.schema(at({}, 60))


def test_names_of_properties_are_no_keywords(compiler: GrammarCompiler) -> None:
    names = ("not", "if", "uniqueItems", "$ref", "minProperties", "enum", "format")
    compiler.schema({"type": "object", "properties": {n: {"type": "null"} for n in names}})


@pytest.mark.parametrize("schema", [{}, True, "true", {"type": "object"}, {"type": "object", "properties": {}}, '{"title": "x", "deprecated": true}'])  # fmt: skip
def test_schemas_that_ask_for_little(compiler: GrammarCompiler, schema: Any) -> None:
    compiler.schema(schema)


@pytest.mark.parametrize("step", [3, 7.0, 0.25, 0.75, 2.0**-6])
def test_multiples_that_doubles_hold(compiler: GrammarCompiler, step: float) -> None:
    compiler.schema({"type": "number", "multipleOf": step})


def test_multiples_behind_references(compiler: GrammarCompiler) -> None:
    """Also where no keyword leads."""
    with pytest.raises(GrammarError) as caught:
        compiler.schema({"items": {"$ref": "#/x%20y/0"}, "x y": [{"multipleOf": 0.1}]})
    assert caught.value.place == "/x y/0/multipleOf"


def test_dates_are_those_of_the_calendar() -> None:
    date = re.compile(json.loads(schemas.exact('{"format": "date"}'))["allOf"][0]["pattern"])
    for year in range(10_000):
        leap = year > 0 and calendar.isleap(year)
        assert bool(date.search(f"{year:04}-02-29")) == leap
        assert bool(date.search(f"{year:04}-02-28")) == (year > 0)
    for year in (2023, 2024):
        for month in range(14):
            last = calendar.monthrange(year, month)[1] if 1 <= month <= 12 else 0
            for day in range(34):
                assert bool(date.search(f"{year}-{month:02}-{day:02}")) == (1 <= day <= last)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"format": "date", "type": "string"}, ["2024-02-29", "0001-01-01"], ["0000-01-01", "2023-02-29"]),
        ({"format": "date", "type": ["string", "null"], "pattern": "1$", "allOf": [{"pattern": "^2"}]},
         ["2024-12-31"], ["2024-12-30", "1999-12-31", "2100-02-29"]),
        ({"$ref": "#/x", "x": {"type": "string", "format": "date"}}, ["2000-02-29"], ["1900-02-29"]),
        ({"format": "date-time", "type": "string"}, ["2024-02-29T23:59:59.5+01:00", "0001-01-01T00:00:00Z"],
         ["0000-01-01T00:00:00Z", "2023-02-29T00:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01"]),
        ({"format": "time", "type": "string"}, ["23:59:59Z"], ["00:00:60Z"]),
    ],
)  # fmt: skip
def test_dates_and_times(
    compiler: GrammarCompiler, schema: dict[str, Any], taken: list[str], refused: list[str]
) -> None:
    grammar = compiler.schema(schema)
    tokenizer = Tokenizer.from_json(tiny.tokenizer_json())

    def follows(text: str) -> bool:
        walk = grammar.start()
        try:
            for token in tokenizer.encode(json.dumps(text)):
                walk.advance(token)
        except ConstraintError:
            return False
        return walk.can_end

    assert [follows(text) for text in taken] == [True] * len(taken)
    assert [follows(text) for text in refused] == [False] * len(refused)
