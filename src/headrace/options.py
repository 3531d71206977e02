"""What a caller of the Python API may ask of a generation, by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypedDict

from headrace.engine.damped import DampedParams, check_greedy
from headrace.engine.speculate import Speculate, depth_of
from headrace.errors import SettingError
from headrace.text.schema import Schema
from headrace.values import SamplingParams

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
    as pay, or "off". The answer is the same. adapter: the name of one that is loaded. damped: greedy decoding that what
    it repeats costs (R17); True takes the defaults. reuse: whether what earlier prompts left in the KV cache is used,
    and this one leaves anything; the answer is the same. shared_prefix_tokens: so many of the prompt are what others
    will begin with, and outlive it in the cache; None: its system message; 0: none.
    """

    schema: Schema | None
    regex: str | None
    grammar: str | Grammar | None
    speculate: Speculate
    adapter: str | None
    damped: DampedParams | bool
    reuse: bool
    shared_prefix_tokens: int | None


class How(TypedDict, total=False):
    """What the engine gets beside a prompt and how to pick."""

    grammar: Grammar | None
    speculate: Speculate
    adapter: str | None
    damped: DampedParams | None
    reuse: bool
    shared_prefix_tokens: int | None


def split(options: GenerateOptions, vocab_size: int) -> tuple[SamplingParams, How]:
    """Options but for a grammar as values. Raises SettingError."""
    check_names(options, GenerateOptions)
    others = {*CONSTRAINTS, *How.__annotations__}
    sampling = {k: v for k, v in options.items() if k not in others}
    how: How = {}
    if "speculate" in options:
        depth_of(options["speculate"])
        how["speculate"] = options["speculate"]
    if damped := options.get("damped"):
        how["damped"] = DampedParams.for_vocab(vocab_size) if damped is True else damped
        sampling.setdefault("temperature", 0.0)
    if "adapter" in options:
        how["adapter"] = options["adapter"]
    if "reuse" in options:
        how["reuse"] = options["reuse"]
    if "shared_prefix_tokens" in options:
        how["shared_prefix_tokens"] = options["shared_prefix_tokens"]
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    check_how(params, how)
    return params, how


def check_names(options: Mapping[str, object], known: type, whose: str = "") -> None:
    """Raises SettingError for a name that is none of a TypedDict's, with the one that is most like it."""
    names = list(known.__annotations__)
    for name in options:
        if name not in names:
            near = get_close_matches(str(name), names, 1, 0)[0]
            there = f"no option {whose}".rstrip()
            raise SettingError(f"{name!s:.60} is {there}; the nearest is {near}")


def check_how(params: SamplingParams, how: How) -> None:
    """Raises SettingError for values that cannot be, or not together."""
    depth_of(how.get("speculate", "off"))
    damped, shared = how.get("damped"), how.get("shared_prefix_tokens")
    if damped is not None and not isinstance(damped, DampedParams):
        raise SettingError(f"damped is {damped!r:.60}; it must be True or DampedParams")
    if damped is not None:
        check_greedy(params)
    if shared is not None and (type(shared) is not int or shared < 0):
        raise SettingError(f"shared_prefix_tokens is {shared!r:.60}; it must be a whole number")
