"""Calls and answers of real generations: what is demanded is there, parses and validates, whatever the seed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from headrace.llm import LLM
from headrace.text.grammar import GrammarCompiler
from headrace.text.template import ChatTemplate, encode_chat
from headrace.text.tools.constraint import answer_grammar
from headrace.text.tools.formats import detect
from headrace.text.tools.pieces import CallBegun, CallDone, Malformed, Piece, Said
from headrace.text.tools.prompt import conversation
from headrace.text.tools.stream import StreamParser
from headrace.values import Tool

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}}, "required": ["city", "unit"], "additionalProperties": False}  # fmt: skip
TREE = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "below": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, "required": ["name"], "additionalProperties": False}  # fmt: skip
WEATHER = Tool("get_weather", "Tells the weather of a city.", CITY, strict=True)
NOW = Tool("now", "Tells the time.")
GROW = Tool("grow", "Grows a tree.", TREE, strict=True)
TOOLS = (WEATHER, NOW, GROW)
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
ASK = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is the weather in Paris?"}]  # fmt: skip


class Caller:
    """A model with its format, as whatever serves it uses them."""

    def __init__(self, llm: LLM, *, asks: bool = True) -> None:
        self._llm = llm
        self._format = detect(llm.artifact.template, llm.tokenizer.control_names)
        self._template = (
            ChatTemplate(llm.artifact.template) if asks and llm.artifact.template else None
        )
        self._compiler = GrammarCompiler(llm.tokenizer)

    def answer(
        self, tools: tuple[Tool, ...] = TOOLS, *, choice: str, seed: int, tokens: int = 60, **options: Any
    ) -> tuple[list[Piece], bool]:  # fmt: skip
        """The pieces of an answer, and whether it was cut."""
        ids = self._llm.tokenize("x")
        if self._template is not None:
            turns, native = conversation(self._format, ASK, tools, choice=choice)
            ids = encode_chat(self._llm.tokenizer, self._template, turns, tools=native)
        grammar = answer_grammar(self._compiler, self._format, tools=tools, choice=choice, **options)  # fmt: skip
        assert grammar is not None
        done = self._llm.generate_ids(
            ids, grammar=grammar, max_tokens=tokens, seed=seed, temperature=0.0 if seed == 0 else 1.0
        )  # fmt: skip
        parser = StreamParser(self._format, tools, json_answer=options.get("answer") is not None)
        out = [piece for char in done.text for piece in parser.push(char)]
        was_cut = done.finish_reason != "stop"
        return out + parser.finish(was_cut), was_cut


@pytest.fixture(scope="module")
def caller(real: LLM) -> Caller:
    return Caller(real)


@pytest.fixture(scope="module")
def wild_caller(wild: LLM) -> Caller:
    return Caller(wild, asks=False)  # its tokens are letters: a prompt with tools is too long


def check(pieces: list[Piece], was_cut: bool, wanted: set[str]) -> int:
    """Calls alone, of the tools that are wanted; those that are done validate. Returns how many are."""
    names = {p.index: p.name for p in pieces if isinstance(p, CallBegun)}
    done = [p for p in pieces if isinstance(p, CallDone)]
    assert not [p for p in pieces if isinstance(p, Malformed | Said)]
    assert set(names.values()) <= wanted
    assert was_cut or (done and len(done) == len(names))
    for piece in done:
        value = json.loads(piece.arguments)
        assert isinstance(value, dict)
        schema = next(t for t in TOOLS if t.name == names[piece.index])
        if schema.strict:
            jsonschema.validate(value, schema.parameters)
    return len(done)


@pytest.mark.parametrize("choice", ["required", "get_weather", "now", "grow"])
def test_the_default_model_calls_what_is_demanded(caller: Caller, choice: str) -> None:
    wanted = {t.name for t in TOOLS} if choice == "required" else {choice}
    found = 0
    for seed in range(4):
        pieces, was_cut = caller.answer(choice=choice, seed=seed, parallel=seed % 2 == 0)
        found += check(pieces, was_cut, wanted)
    assert found


def test_the_default_model_answers_in_the_schema(caller: Caller) -> None:
    for tools in ((), (WEATHER, NOW)):
        for seed in range(3):
            pieces, was_cut = caller.answer(tools, choice="auto", seed=seed, answer=PERSON)
            if any(isinstance(p, CallBegun) for p in pieces):
                check(pieces, was_cut, {"get_weather", "now"})
            elif not was_cut:
                said = "".join(p.text for p in pieces if isinstance(p, Said))
                jsonschema.validate(json.loads(said), PERSON)


def test_the_default_model_may_answer_in_text(caller: Caller) -> None:
    for seed in range(3):
        pieces, _ = caller.answer(choice="auto", seed=seed, tokens=40)
        assert not [p for p in pieces if isinstance(p, Malformed)]
        assert pieces


@pytest.mark.parametrize("choice", ["required", "get_weather", "now", "auto"])
def test_a_random_model_calls_what_is_demanded(wild_caller: Caller, choice: str) -> None:
    wanted = {choice} & {t.name for t in TOOLS} or {t.name for t in TOOLS}
    for seed in range(1, 7):
        pieces, was_cut = wild_caller.answer(choice=choice, seed=seed, tokens=300)
        if choice == "auto":
            assert not [p for p in pieces if isinstance(p, Malformed)]
        else:
            check(pieces, was_cut, wanted)
