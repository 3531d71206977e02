"""How tokens are picked where a client does not say, and values out of range."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.serve.model.profiles import sampling_params
from headrace.serve.request import Format, Request, Sampling, ToolChoice
from headrace.values import SamplingParams, Tool

TOOL = Tool("f")
OFF: dict[str, Any] = {
    "top_k": 20,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def params(**asked: Any) -> SamplingParams:
    return sampling_params(Request("m", **asked), 9)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5}),
        ({"raw": "x"}, {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5}),
        ({"tools": (TOOL,)}, {"temperature": 0.2, "top_p": 0.9}),
        ({"tools": (TOOL,), "effort": "low"}, {"temperature": 0.2, "top_p": 0.9}),
        (
            {"tools": (TOOL,), "choice": ToolChoice("none")},
            {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.5},
        ),
        ({"effort": "high"}, {"temperature": 1.0, "top_p": 0.95}),
        ({"answer": Format("json")}, {"temperature": 0.7, "top_p": 0.8}),
        ({"answer": Format("schema", {})}, {"temperature": 0.7, "top_p": 0.8}),
    ],
    ids=str,
)
def test_the_table(asked: dict[str, Any], wanted: dict[str, float]) -> None:
    assert params(**asked) == SamplingParams(**{**OFF, **wanted}, seed=None, max_tokens=9)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("temperature", 0.0, 0.0),
        ("temperature", -1.0, 0.0),
        ("temperature", 2.5, 2.0),
        ("temperature", math.inf, 2.0),
        ("temperature", -math.inf, 0.0),
        ("temperature", math.nan, 0.7),
        ("temperature", 10**400, 2.0),
        ("top_p", 0.0, 0.0),
        ("top_p", -(10**400), 0.0),
        ("top_p", 1.5, 1.0),
        ("top_p", math.nan, 0.8),
        ("top_k", 0, 0),
        ("top_k", -1, 0),
        ("top_k", 7, 7),
        ("top_k", 10**400, 2**31 - 1),
        ("min_p", -0.1, 0.0),
        ("min_p", math.inf, 1.0),
        ("presence_penalty", -9.0, -2.0),
        ("presence_penalty", 9, 2.0),
        ("repetition_penalty", 0.0, 0.01),
        ("repetition_penalty", -1.0, 0.01),
        ("repetition_penalty", math.inf, 100.0),
        ("seed", 0, 0),
        ("seed", -1, 2**64 - 1),
        ("seed", 2**64, 0),
        ("seed", 10**400, 10**400 % 2**64),
    ],
)
def test_a_value_is_brought_into_its_range(name: str, given: float, taken: float) -> None:
    found = getattr(params(sampling=Sampling(**{name: given})), name)  # type: ignore[arg-type]
    assert found == taken


def test_a_value_that_is_given_beats_the_table() -> None:
    every: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.25,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
        "seed": 3,
    }
    found = params(sampling=Sampling(**every), tools=(TOOL,))
    assert found == SamplingParams(**every, max_tokens=9)
