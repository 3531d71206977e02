"""The numbers of a schema: what a grammar takes is what the schema allows, and what it cannot follow is refused."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from typing import Any

import jsonschema
import pytest

import tiny
from headrace.errors import ConstraintError, GrammarError
from headrace.text import numbers
from headrace.text.grammar import Grammar, GrammarCompiler
from headrace.text.tokenizer import Tokenizer

WHOLES = ("0", "1", "2", "5", "9", "10", "11", "99", "100")
TAILS = ("", ".0", ".00", ".05", ".05000", ".1", ".10", ".125", ".2", ".20", ".25", ".250", ".49", ".5", ".50", ".500", ".9", ".90", ".99", ".990", "e0", "e1", "E-1", ".5e1")  # fmt: skip
ODD = ("00", "01", "-01", "+1", ".5", "1.", "-", "-.5", "0e0", "-0.0", "0.0001", "0.00000000000000000001", "1e999")  # fmt: skip
TEXTS = [*map("".join, itertools.product(("", "-"), WHOLES, TAILS)), *ODD]
TOKENIZER = Tokenizer.from_json(tiny.tokenizer_json(), eos=(258,))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER)


def follows(grammar: Grammar, text: str) -> bool:
    walk = grammar.start()
    try:
        for token in TOKENIZER.encode(text):
            walk.advance(token)
    except ConstraintError:
        return False
    return walk.can_end


def read(text: str) -> int | float | None:
    try:
        value: int | float = json.loads(text)
    except ValueError:
        return None
    return value


BOUNDS: list[dict[str, Any]] = [
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"exclusiveMinimum": 0, "maximum": 0.05},
    {"exclusiveMinimum": 0, "maximum": 0.9},
    {"exclusiveMinimum": 2, "maximum": 2.5},
    {"exclusiveMinimum": 10, "maximum": 10.2},
    {"exclusiveMinimum": 1, "exclusiveMaximum": 1.25, "multipleOf": 0.125},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.25, "multipleOf": 0.125},
    {"minimum": -0.5, "exclusiveMaximum": 0},
    {"minimum": -2.5, "exclusiveMaximum": -2},
    {"exclusiveMinimum": -0.5, "exclusiveMaximum": 0.5},
    {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"exclusiveMinimum": 0},
    {"exclusiveMaximum": 0},
    {"exclusiveMinimum": -1},
    {"exclusiveMaximum": 1},
    {"exclusiveMinimum": 0, "minimum": 1},
    {"exclusiveMinimum": 5, "minimum": 1, "maximum": 9},
    {"exclusiveMinimum": 5, "multipleOf": 5, "maximum": 100},
    {"minimum": -10, "exclusiveMaximum": 0, "multipleOf": 5},
    {"minimum": 0, "exclusiveMaximum": 10, "multipleOf": 2.5},
    {"minimum": 0.05, "maximum": 0.5},
    {"minimum": -0.0, "maximum": 1},
    {"maximum": 0},
    {"minimum": 0, "maximum": 0},
]


@pytest.mark.parametrize("bounds", BOUNDS, ids=json.dumps)
@pytest.mark.parametrize("kind", ["number", "integer"])
@pytest.mark.parametrize("apart", [False, True])
def test_texts_that_a_grammar_takes_are_numbers_of_the_schema(
    compiler: GrammarCompiler, bounds: dict[str, Any], kind: str, apart: bool
) -> None:
    """Every value that the schema allows has a text, and no text has another; also where keywords stand apart."""
    schema = {"type": kind, **bounds}
    if apart:
        schema = {"allOf": [{"type": kind}, *({key: value} for key, value in bounds.items())]}
    valid = jsonschema.Draft202012Validator(schema).is_valid
    allowed = {text for text in TEXTS if (value := read(text)) is not None and valid(value)}
    try:
        grammar = compiler.schema(schema)
    except GrammarError as error:
        assert "imum" in error.message
        assert not allowed
        return
    taken = {text for text in TEXTS if follows(grammar, text)}
    assert taken <= allowed
    plain = [text for text in allowed if "e" not in text.lower() and len(text) < 5]
    assert {Fraction(text) for text in plain} <= {Fraction(text) for text in taken}


@pytest.mark.parametrize("bounds", [{"exclusiveMinimum": 2}, {"exclusiveMaximum": -2}])
def test_what_a_reader_rounds_onto_a_bound(
    compiler: GrammarCompiler, bounds: dict[str, Any]
) -> None:
    grammar = compiler.schema({"type": "number", **bounds})
    sign = "-" if "exclusiveMaximum" in bounds else ""
    assert not follows(grammar, f"{sign}2.00000000000000000001")
    assert follows(grammar, f"{sign}2.00000000000001")


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, [-(2**53) - 2], [-(2**53)]),
        ({"type": "number", "maximum": 2**57}, [2**57 - 1000], [2**57 + 1]),
        ({"type": "integer", "minimum": 5, "maximum": 1e300}, [5, 10**18], [4]),
        ({"type": "number", "minimum": -1e300, "maximum": 5}, [-(10**18), 5], [6]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 100, "multipleOf": 7.5}, [15, 90], [0, 30.0, 7]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, [1.25], [1]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": False, "maximum": 1.5}, [1, 1.25], [2]),
    ],
)  # fmt: skip
def test_bounds_that_doubles_would_move(
    compiler: GrammarCompiler, schema: dict[str, Any], taken: list[int], refused: list[int]
) -> None:
    grammar = compiler.schema(schema)
    assert [follows(grammar, str(value)) for value in taken] == [True] * len(taken)
    assert [follows(grammar, str(value)) for value in refused] == [False] * len(refused)


@pytest.mark.parametrize("step", [0, 0.0, -3, -0.5])
@pytest.mark.parametrize("below", [False, True])
def test_a_multiple_of_nothing(compiler: GrammarCompiler, step: float, below: bool) -> None:
    schema: dict[str, Any] = {"multipleOf": step}
    with pytest.raises(GrammarError, match="multipleOf: .* is not above zero") as caught:
        compiler.schema({"properties": {"a": schema}} if below else schema)
    assert caught.value.place == "/properties/a/multipleOf"[0 if below else 13 :]


@pytest.mark.parametrize("step", [1025, 12007, 65536, 100_000, 100_003, 300.25])
def test_multiples_with_too_many_remainders(compiler: GrammarCompiler, step: float) -> None:
    schema = {"type": "number", "multipleOf": step, "minimum": 0, "maximum": 10**9}
    with pytest.raises(GrammarError, match="multipleOf: .* remainders") as caught:
        compiler.schema({"items": schema})
    assert caught.value.place == "/items/multipleOf"


def many(steps: Any) -> dict[str, Any]:
    return {f"p{step}": {"type": "integer", "multipleOf": step} for step in steps}


def test_several_multiples(compiler: GrammarCompiler) -> None:
    """Of one value their product counts, which the library reckons in 32 bits; of several their sum."""
    for key in ("allOf", "anyOf"):
        with pytest.raises(GrammarError, match="multipleOf: several") as caught:
            compiler.schema({"type": "integer", key: [{"multipleOf": 1000}, {"multipleOf": 999}]})
        assert caught.value.place == f"/{key}/1/multipleOf"
    with pytest.raises(GrammarError, match="multipleOf: several"):
        compiler.schema(
            {"allOf": [{"properties": {"a": {"multipleOf": k}}} for k in (1000, 2.0**-6)]}
        )
    grammar = compiler.schema({"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]})
    assert [n for n in range(50) if follows(grammar, str(n))] == [0, 12, 24, 36, 48]
    apart = {"properties": {**many((1000, 999)), "x": {"$ref": "#/$defs/x", "title": "x"}}}
    compiler.schema({"type": "object", **apart, "$defs": {"x": {"type": "string"}}})
    with pytest.raises(GrammarError, match="multipleOf: the schema"):
        compiler.schema({"type": "object", "properties": many(range(990, 1025))})


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_multiples_at_the_limit(compiler: GrammarCompiler, kind: str) -> None:
    """What compiles can be followed to its end."""
    step = numbers.MAX_RESIDUES - 1
    schema = {"type": kind, "multipleOf": step, "minimum": -(10**12) + 3, "maximum": 10**15 + 7}
    grammar = compiler.schema(schema)
    for digits in range(1, 16):
        value = step * math.ceil(10 ** (digits - 1) / step)
        assert follows(grammar, str(value))
        assert not follows(grammar, str(value + 1))
        walk = grammar.start()
        for token in TOKENIZER.encode(str(value)):
            assert walk.mask()[token // 32] >> (token % 32) & 1
            walk.advance(token)
