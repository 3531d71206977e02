"""A list of tools as a schema: one that takes nothing breaks neither the list nor the others."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from headrace.errors import GrammarError
from headrace.llm import LLM

NOTHING: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "required": []},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {}, "maxProperties": 0},
]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


def call(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("nothing", NOTHING, ids=str)
def test_a_tool_that_takes_nothing(wild: LLM, nothing: dict[str, Any]) -> None:
    schema = {"anyOf": [call("weather", WEATHER), call("now", nothing)]}
    found = set()
    for seed in range(12):
        text = wild.generate("x", schema=schema, temperature=2.0, seed=seed, max_tokens=300).text
        if wild.last is not None and wild.last.finish_reason == "stop":
            value = json.loads(text)
            jsonschema.validate(value, schema)
            found.add(value["name"])
    assert "weather" in found or "now" in found
    alone = wild.generate("x", schema=call("now", nothing), temperature=0.0, max_tokens=300)
    assert alone.text.startswith('{"name"')


@pytest.mark.parametrize("way", ["generate", "stream", "think"])
def test_a_schema_that_cannot_be_compiled_is_never_ignored(wild: LLM, way: str) -> None:
    """Not even in a list of tools that are fine: it is named before anything runs."""
    bad = {"anyOf": [call("weather", WEATHER), call("bad", {"not": {"type": "string"}})]}
    with pytest.raises(GrammarError, match="not"):
        getattr(wild, way)("x", schema=bad)
