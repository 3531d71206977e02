"""Arguments written without quotes: what the schema lets be a string stays one, numbers stay what clients can read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.text.tools.arguments import typed, types
from headrace.text.tools.formats import QWEN_XML
from headrace.text.tools.json_text import MAX_DEPTH, whole
from headrace.text.tools.pieces import CallDone
from headrace.values import Tool
from text.tools.models import parsed

LOOKS = ["00123", "false", "null", "1e5", "True", "[1]", '{"a": 1}', '"q"', "12", " x ", ""]
STRINGS: dict[str, Any] = {
    "type": {"type": "string"},
    "type list": {"type": ["string", "null"]},
    "list with a number": {"type": ["integer", "string"]},
    "nullable": {"type": "string", "nullable": True},
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "oneOf": {"oneOf": [{"type": "null"}, {"type": "string", "minLength": 1}]},
    "$ref": {"$ref": "#/$defs/name"},
    "$ref to $ref": {"$ref": "#/$defs/other"},
    "anyOf of $ref": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
    "allOf": {"allOf": [{"$ref": "#/$defs/name"}, {"minLength": 1}]},
    "enum": {"enum": ["false", "00123", "1e5"]},
    "const": {"const": "null"},
    "pattern": {"pattern": "^[0-9]+$"},
}
ROOT = {"$defs": {"name": {"type": "string"}, "other": {"$ref": "#/$defs/name"}, "loop": {"$ref": "#/$defs/pool"}, "pool": {"anyOf": [{"$ref": "#/$defs/loop"}]}, "tree": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/tree"}]}}}  # fmt: skip


@pytest.mark.parametrize("text", LOOKS)
@pytest.mark.parametrize("name", STRINGS)
def test_a_string_stays_a_string(name: str, text: str) -> None:
    assert json.loads(typed(types(ROOT, STRINGS[name]), text)) == text


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "-0", 0),
        ({"type": "integer"}, "00123", "00123"),
        ({"type": "integer"}, "12345678901234567890", 12345678901234567890),
        ({"type": "integer"}, "9" * 400, "9" * 400),
        ({"type": "integer"}, "9" * 100_000, "9" * 100_000),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "1e5", 1e5),
        ({"type": "number"}, "1e20", 1e20),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "-1e999", "-1e999"),
        ({"type": "number"}, "inf", "inf"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "null"}, "None", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, "true", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({"type": "object"}, '{"a": [1e999]}', {"a": ["1e999"]}),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/tree"}, "3", 3),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({}, '{"a": 1}', {"a": 1}),
        ({}, "[1]", [1]),
        ({}, "00123", "00123"),
        ({}, "5", "5"),
        (None, "true", "true"),
        (True, "x", "x"),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_the_schema_says_what_it_is(schema: Any, text: str, value: Any) -> None:
    found = json.loads(typed(types(ROOT, schema), text))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("name", ["loop", "pool", "missing"])
def test_references_that_lead_nowhere_say_nothing(name: str) -> None:
    assert types(ROOT, {"$ref": f"#/$defs/{name}"}) is None
    assert types(ROOT, {"$ref": "https://example.com/schema"}) is None


def test_references_that_branch_are_bounded() -> None:
    """Each definition twice in the next one: two to the power of sixty ways."""
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)
    }
    assert types({"$defs": defs}, {"$ref": "#/$defs/d0"}) is None


def test_schemas_nested_without_end_are_bounded() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert types({}, deep) is None
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    assert types({"$defs": chain}, {"$ref": "#/$defs/d0"}) is None


def test_a_call_with_arguments_of_every_type() -> None:
    schema = {"type": "object", **ROOT, "properties": {"a": STRINGS["$ref"], "b": {"type": "integer"}, "c": {"type": "array"}}}  # fmt: skip
    values = {"a": "00123", "b": "7", "c": "[true]", "d": "undeclared"}
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    out = parsed(QWEN_XML, f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>", [Tool("f", parameters=schema)])  # fmt: skip
    assert isinstance(out[-1], CallDone)
    assert json.loads(out[-1].arguments) == {"a": "00123", "b": 7, "c": [True], "d": "undeclared"}


@pytest.mark.parametrize(
    ("written", "value"),
    [("x", "x"), ("\nx\n", "x"), ("\n\nx\n\n", "\nx\n"), ("\n", ""), ("\n\n", ""), ("", ""), ("  x ", "  x ")],
)  # fmt: skip
def test_one_line_end_on_each_side_is_the_tags_own(written: str, value: str) -> None:
    tool = Tool("f", parameters={"properties": {"a": {"type": "string"}}})
    text = f"<tool_call><function=f><parameter=a>{written}</parameter></function></tool_call>"
    for size in (1, 1000):
        out = parsed(QWEN_XML, text, [tool], size=size)
        assert json.loads(out[-1].arguments) == {"a": value}  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ['{"a": 1}', "[]", "[[1], {}, null, true, -1.5e-3]", '"\\u00e9\\n"', "0", " 1 ", "{}"])  # fmt: skip
def test_json_is_left_as_it_is(text: str) -> None:
    value = whole(text)
    assert not value.error
    assert json.loads(value.out()) == json.loads(text)


@pytest.mark.parametrize("text", ["", "{", "[1", "[1,]", "{,}", '{"a"}', '{"a":}', "{1: 2}", "[}", "{]", "01", "1.", "+1", ".5", "1e", "-", "tru", "nulll", "1 2", '"\\x"', '"\\u12g4"', '"', "{} {}", "'a'", "NaN", "Infinity"])  # fmt: skip
def test_what_is_no_json_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".|$"):
        json.loads(text, parse_constant=lambda name: int(name))
    assert whole(text).error


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\ud83d\ude42"', "🙂"),
        (r'"\ud83d"', "\ufffd"),
        (r'"\ud83dx"', "\ufffdx"),
        (r'"\ude42"', "\ufffd"),
        (r'"\ud83d\ud83d\ude42"', "\ufffd🙂"),
        (r'"\ud83d\n"', "\ufffd\n"),
        (r'"\ud83d\u0041"', "\ufffdA"),
    ],
)
def test_halves_of_pairs_are_replaced(text: str, value: str) -> None:
    """No UTF-8 can hold them, and so no reply."""
    found = whole(text)
    assert not found.error
    assert json.loads(found.out()) == value


def test_depth_is_bounded() -> None:
    assert not whole("[" * MAX_DEPTH + "]" * MAX_DEPTH).error
    assert "nested" in whole("[" * (MAX_DEPTH + 1)).error
