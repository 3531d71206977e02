"""What a caller of the Python API may ask of a generation, by keyword."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from headrace.engine.speculate import Speculate
from headrace.text.schema import Schema

if TYPE_CHECKING:
    from headrace.text.grammar import Grammar

CONSTRAINTS = ("schema", "regex", "grammar")


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of the generating methods; see `SamplingParams`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    repetition_penalty: float
    seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]


class GenerateOptions(SamplingOptions, total=False):
    """And what the answer has to be: at most one of schema, regex and grammar. See `LLM.compile`.

    speculate: how many tokens are drafted from the prompt and the answer and read along: a number, "auto" for as many
    as pay, or "off". The answer is the same. adapter: the name of one that is loaded.
    """

    schema: Schema | None
    regex: str | None
    grammar: str | Grammar | None
    speculate: Speculate
    adapter: str | None


class How(TypedDict, total=False):
    """What the engine gets beside a prompt and how to pick."""

    grammar: Grammar | None
    speculate: Speculate
    adapter: str | None
