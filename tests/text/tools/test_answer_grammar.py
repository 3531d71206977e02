"""Grammars of answers: whatever a model writes within one, the parser takes, and strict arguments validate."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from headrace.errors import GrammarError, InputError
from headrace.text.grammar import Grammar, GrammarCompiler
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.constraint import MOST_CALLS, answer_grammar
from headrace.text.tools.formats import HARMONY, HERMES, LLAMA, MISTRAL_ARGS, QWEN_XML, Format
from headrace.text.tools.pieces import CallBegun, CallDone, Malformed, Said
from headrace.values import Tool
from text.tools.models import (
    NOW,
    ROWS,
    TOOLS,
    WEATHER,
    accepts,
    allowed,
    controlled,
    letters,
    parsed,
    reasoning,
    row_name,
    written,
)  # fmt: skip

STRICT = tuple(replace(tool, strict=True) for tool in TOOLS)
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}  # fmt: skip
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"], "additionalProperties": False}  # fmt: skip


class Vocabularies:
    """A compiler for every set of control tokens."""

    def __init__(self) -> None:
        self._made: dict[frozenset[str], tuple[Tokenizer, GrammarCompiler]] = {}

    def of(self, row: Format) -> tuple[Tokenizer, GrammarCompiler]:
        if row.controls not in self._made:
            tokenizer = letters(row.controls)
            self._made[row.controls] = tokenizer, GrammarCompiler(tokenizer)
        return self._made[row.controls]


@pytest.fixture(scope="module")
def vocabularies() -> Vocabularies:
    return Vocabularies()


def grammar(vocabularies: Vocabularies, row: Format, **options: Any) -> tuple[Grammar, Tokenizer]:
    tokenizer, compiler = vocabularies.of(row)
    made = answer_grammar(compiler, row, **options)
    assert made is not None
    return made, tokenizer


@pytest.mark.parametrize("reasoning_open", [None, False, True])
@pytest.mark.parametrize("answer", [None, "json", PERSON], ids=["text", "json", "schema"])
@pytest.mark.parametrize("choice", ["auto", "required", "now"])
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_what_it_allows_the_parser_takes(
    vocabularies: Vocabularies, row: Format, choice: str, answer: Any, reasoning_open: bool | None
) -> None:
    """A model without sense that likes to write tags. No call is broken, no demand unmet, no answer invalid."""
    phrases = (*row.tags, "</parameter>", "</function>", "<function=now>", '{"name": "x', "[ARGS]")
    ended = 0
    for strict in (False, True):
        tools = STRICT if strict else TOOLS
        made, tokenizer = grammar(vocabularies, row, tools=tools, choice=choice, answer=answer, reasoning_open=reasoning_open)  # fmt: skip
        for seed in range(3):
            text = written(made, tokenizer, seed, phrases)
            if text is None:
                continue
            ended += 1
            out = parsed(row, text, tools, reasoning_open=bool(reasoning_open), json_answer=answer is not None)  # fmt: skip
            assert not [p for p in out if isinstance(p, Malformed)], text
            check(out, tools if strict else (), answer)
            names = [p.name for p in out if isinstance(p, CallBegun)]
            assert choice == "auto" or names
            assert choice != "now" or set(names) == {"now"}
    assert ended


def check(out: list[Any], strict: tuple[Tool, ...], answer: Any) -> None:
    names = {p.index: p.name for p in out if isinstance(p, CallBegun)}
    done = [p for p in out if isinstance(p, CallDone)]
    assert len(done) == len(names)
    for piece in done:
        value = json.loads(piece.arguments)
        assert isinstance(value, dict)
        for tool in strict:
            if tool.name == names[piece.index]:
                jsonschema.validate(value, tool.parameters)
    said = "".join(p.text for p in out if isinstance(p, Said))
    if answer is not None and not names:
        jsonschema.validate(json.loads(said), PERSON if answer == PERSON else {"type": "object"})


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_one_call_where_one_is_allowed(vocabularies: Vocabularies, row: Format) -> None:
    for choice in ("required", "auto"):
        made, tokenizer = grammar(vocabularies, row, tools=[NOW], choice=choice, parallel=False)
        for seed in range(4):
            text = written(made, tokenizer, seed, row.tags) or ""
            assert len([p for p in parsed(row, text) if isinstance(p, CallBegun)]) <= 1


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_forced_tokens_are_those_of_the_masks(vocabularies: Vocabularies, row: Format) -> None:
    """Control tokens included."""
    made, tokenizer = grammar(vocabularies, row, tools=STRICT, choice="now", parallel=False)
    walk = made.start()
    taken = 0
    while not walk.ended and taken < 100:
        for token in walk.forced() or [min(allowed(walk.mask()))]:
            assert token in allowed(walk.mask())
            walk.advance(token)
            taken += 1
    tags = [tokenizer.encode(tag, allow_special=True) for tag in row.controls]
    assert all(len(ids) == 1 for ids in tags)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_text_and_calls_may_mix(vocabularies: Vocabularies) -> None:
    for row in (HERMES, controlled(HERMES)):
        made, tokenizer = grammar(vocabularies, row, tools=TOOLS)
        for text in (
            "",
            "Hi.",
            CALL,
            f"One.\n\n{CALL}\n{CALL} <b>",
            "a < b </tool",
            '{"name": "x"}',
        ):
            assert accepts(made, tokenizer, text), text
        for text in ('<tool_call>{"name": "delete"', "<tool_call>now", CALL.replace("{}", "[]")):
            assert not accepts(made, tokenizer, text), text


ONE_CALL = {
    "hermes": CALL,
    "qwen-xml": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama": '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "mistral-args": "[TOOL_CALLS]now[ARGS]{}",
    "harmony": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
}


@pytest.mark.parametrize("choice", ["auto", "required", "now"])
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_call_may_be_all_of_an_answer(
    vocabularies: Vocabularies, row: Format, choice: str
) -> None:
    """The answer may end behind it, whether the tags are control tokens or not."""
    made, tokenizer = grammar(vocabularies, row, tools=[NOW], choice=choice)
    assert accepts(made, tokenizer, ONE_CALL[row_name(row).removesuffix("-control")])
    for text in ("Hi.", "It is { open."):
        assert accepts(made, tokenizer, text) == (choice == "auto" and row.shape != "channels")


def test_a_demand_allows_nothing_but_calls(vocabularies: Vocabularies) -> None:
    made, tokenizer = grammar(vocabularies, HERMES, tools=TOOLS, choice="required")
    assert accepts(made, tokenizer, CALL)
    assert accepts(made, tokenizer, f"{CALL}\n{CALL}")
    for text in ("", "Hi.", f"Hi. {CALL}", f"{CALL} Hi.", f"{CALL}{'n' * 3}", CALL + "\n" * 9):
        assert not accepts(made, tokenizer, text), text


def test_calls_that_are_the_only_choice_come_to_an_end(vocabularies: Vocabularies) -> None:
    """A model that never stops calling is stopped: what it can't end by itself would only be cut."""
    llama = '{"name": "now", "parameters": {}}'
    for row, call, between in ((HERMES, CALL, "\n"), (LLAMA, llama, "; ")):
        for options in ({"choice": "required"}, {"choice": "now"}, {"answer": PERSON}):
            made, tokenizer = grammar(vocabularies, row, tools=[NOW], **options)
            assert accepts(made, tokenizer, between.join([call] * MOST_CALLS))
            assert not accepts(made, tokenizer, between.join([call] * (MOST_CALLS + 1)))
        free, tokenizer = grammar(vocabularies, row, tools=[NOW])
        assert accepts(free, tokenizer, between.join([call] * (MOST_CALLS + 1)))


PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}  # fmt: skip
UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_demanded_call_keeps_to_its_schema(vocabularies: Vocabularies) -> None:
    """Of a tool that is not strict, too; where that can't be, any object will do."""
    tools = [Tool("place", parameters=PLACE), Tool("unique", parameters=UNIQUE), Tool("open", parameters={**PLACE, "additionalProperties": True}), Tool("any", parameters={"type": "object"}), NOW]  # fmt: skip
    made, tokenizer = grammar(vocabularies, HERMES, tools=tools, choice="required")
    for name, arguments in (
        ("place", '{"city": "Bern", "days": 2}'),
        ("place", '{"city": "Bern"}'),
        ("open", '{"city": "Bern", "x": [1]}'),
        ("unique", '{"a": [1, 1], "b": 2}'),
        ("any", '{"a parameter": "its value"}'),
        ("now", "{}"),
    ):
        assert accepts(made, tokenizer, calling(name, arguments)), arguments
    for name, arguments in (
        ("place", "{}"),
        ("place", '{"a parameter": "its value"}'),
        ("place", '{"city": "Bern", "x": 1}'),
        ("place", '{"city": 2}'),
        ("open", "{}"),
        ("now", '{"a parameter": "its value"}'),
    ):
        assert not accepts(made, tokenizer, calling(name, arguments)), arguments
    free, tokenizer = grammar(vocabularies, HERMES, tools=tools)
    assert accepts(free, tokenizer, calling("place", '{"x": 1}'))
    beside, tokenizer = grammar(vocabularies, HERMES, tools=tools, answer=PERSON)
    assert accepts(beside, tokenizer, calling("place", '{"city": "Bern"}'))
    assert not accepts(beside, tokenizer, calling("place", '{"x": 1}'))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_invents_no_properties(vocabularies: Vocabularies, choice: str) -> None:
    """Where its schema names some and is silent about others; one that it needs and does not name may be anything."""
    unnamed = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"]}
    tools = [Tool("place", strict=True, parameters=PLACE), Tool("unnamed", strict=True, parameters=unnamed)]  # fmt: skip
    made, tokenizer = grammar(vocabularies, HERMES, tools=tools[:1], choice=choice)
    assert accepts(made, tokenizer, calling("place", '{"city": "Bern"}'))
    assert not accepts(made, tokenizer, calling("place", '{"city": "Bern", "x": 1}'))
    made, tokenizer = grammar(vocabularies, HERMES, tools=tools[1:], choice=choice)
    for arguments in ('{"b": 1}', '{"b": {"x": [null]}}', '{"b": "x", "a": 1}'):
        assert accepts(made, tokenizer, calling("unnamed", arguments)), arguments
    for arguments in ('{"a": 1}', '{"b": 1, "c": 1}', '{"c": 1}'):
        assert not accepts(made, tokenizer, calling("unnamed", arguments)), arguments


def test_a_schema_that_may_name_properties_elsewhere_leaves_them_open(
    vocabularies: Vocabularies,
) -> None:
    for schema in ({**PLACE, "allOf": [{"properties": {"x": {}}}]}, {"$ref": "#/$defs/a", "$defs": {"a": PLACE}}):  # fmt: skip
        made, tokenizer = grammar(vocabularies, HERMES, tools=[Tool("place", parameters=schema)], choice="place")  # fmt: skip
        assert accepts(made, tokenizer, calling("place", '{"x": 1}'))


def test_a_demanded_call_in_elements(vocabularies: Vocabularies) -> None:
    bounded = {"type": "object", "properties": {"city": {"type": "string", "minLength": 2}}}
    made, tokenizer = grammar(vocabularies, QWEN_XML, tools=[Tool("place", parameters=PLACE), Tool("bounded", parameters=bounded)], choice="required")  # fmt: skip
    whole = (
        "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    assert accepts(made, tokenizer, whole.format("place", "city", "Bern"))
    assert accepts(made, tokenizer, whole.format("bounded", "city", "B"))
    for name, key, value in (("place", "days", "2"), ("place", "x", "Bern"), ("bounded", "x", "B")):
        assert not accepts(made, tokenizer, whole.format(name, key, value))


def test_text_in_elements_spells_no_end_of_its_call(vocabularies: Vocabularies) -> None:
    made, tokenizer = grammar(vocabularies, QWEN_XML, tools=[Tool("place", parameters=PLACE)], choice="required", parallel=False)  # fmt: skip
    whole = "<tool_call>\n<function=place>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
    for text in ("a", "</function>", "</tool_call>", "</function>b</tool_call>", "</function>\n</"):
        assert accepts(made, tokenizer, whole.format(text)), text
    for text in ("</function></tool_call>", "a</function>\n\n</tool_call>b"):
        assert not accepts(made, tokenizer, whole.format(text)), text


def test_an_answer_or_calls(vocabularies: Vocabularies) -> None:
    made, tokenizer = grammar(vocabularies, HERMES, tools=TOOLS, answer=PERSON)
    assert accepts(made, tokenizer, '{"age": 5}')
    assert accepts(made, tokenizer, CALL)
    assert not accepts(made, tokenizer, "Hi.")
    assert not accepts(made, tokenizer, f'{CALL}{{"age": 5}}')


def test_reasoning_stands_in_front(vocabularies: Vocabularies) -> None:
    for row in (reasoning(HERMES), controlled(reasoning(HERMES))):
        made, tokenizer = grammar(vocabularies, row, answer=PERSON, reasoning_open=True)
        assert accepts(made, tokenizer, 'Hm. {}\n</think>\n\n{"age": 5}')
        assert not accepts(made, tokenizer, '{"age": 5}')
        made, tokenizer = grammar(vocabularies, row, answer=PERSON, reasoning_open=False)
        assert accepts(made, tokenizer, '<think>Hm.</think>{"age": 5}')
        assert accepts(made, tokenizer, '{"age": 5}')
        made, tokenizer = grammar(vocabularies, row, answer=PERSON)
        assert not accepts(made, tokenizer, '<think>Hm.</think>{"age": 5}')


def test_nothing_to_enforce(vocabularies: Vocabularies) -> None:
    for row in ROWS:
        compiler = vocabularies.of(row)[1]
        for is_open in (None, False, True):
            assert answer_grammar(compiler, row, reasoning_open=is_open) is None
            assert answer_grammar(compiler, row, tools=TOOLS, choice="none", reasoning_open=is_open) is None  # fmt: skip


def test_a_grammar_is_compiled_once(vocabularies: Vocabularies) -> None:
    one = grammar(vocabularies, HERMES, tools=STRICT)[0]
    assert grammar(vocabularies, HERMES, tools=STRICT)[0] is one
    compiler = vocabularies.of(HERMES)[1]
    assert answer_grammar(compiler, HERMES, answer=PERSON) is compiler.schema(PERSON)


ODD = ["mcp__server-1.do", "größe", "a/b", 'quo"te', "back\\slash", "new\nline", "</tool_call>", "%json", "a b", "{", "é🙂", "x" * 64]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_odd_names_break_nothing(vocabularies: Vocabularies, row: Format, name: str) -> None:
    """A name that a format's tags can't hold can't be called in it; the others can."""
    if name in row.controls:
        return  # it is no text there
    tools = [Tool(name, strict=True), NOW]
    for choice, wanted in (("required", {name, "now"}), (name, {name})):
        try:
            made, tokenizer = grammar(vocabularies, row, tools=tools, choice=choice)
        except InputError:
            assert choice == name
            assert row.shape in ("xml", "named", "channels")
            continue
        for seed in range(2):
            text = written(made, tokenizer, seed)
            out = parsed(row, text or "", tools)
            assert not [p for p in out if isinstance(p, Malformed)]
            assert {p.name for p in out if isinstance(p, CallBegun)} <= wanted


@pytest.mark.parametrize("row", [HERMES, QWEN_XML, LLAMA, MISTRAL_ARGS, HARMONY], ids=row_name)
def test_a_long_list_of_all_kinds(vocabularies: Vocabularies, row: Format) -> None:
    """128 tools, with one that takes nothing, one that is recursive, and one that declares nothing."""
    many = [Tool(f"tool_{i}", parameters={**WEATHER.parameters, "title": str(i)}, strict=i % 2 == 0) for i in range(124)]  # fmt: skip
    tools = [*many, Tool("none", strict=True), Tool("free", parameters={"type": "object"}), Tool("empty", parameters={"type": "object", "properties": {}, "maxProperties": 0}, strict=row.shape != "xml"), Tool("tree", parameters=NODE, strict=True)]  # fmt: skip
    made, tokenizer = grammar(vocabularies, row, tools=tools, choice="required", parallel=False)
    for seed in range(4):
        text = written(made, tokenizer, seed)
        if text is not None:
            out = parsed(row, text, tools)
            assert isinstance(out[-1], CallDone)
            check(out, tuple(t for t in tools if t.strict and t.parameters), None)


@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "string"}, "type"),
        ({"type": "object", "properties": {"a": {"type": "string", "format": "nonsense"}}}, "format"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_what_cannot_be_followed_names_tool_and_keyword(
    vocabularies: Vocabularies, row: Format, parameters: dict[str, Any], keyword: str
) -> None:
    compiler = vocabularies.of(row)[1]
    bad = Tool("bad_one", parameters=parameters, strict=True)
    with pytest.raises(GrammarError, match=f"bad_one.*{keyword}"):
        answer_grammar(compiler, row, tools=[*STRICT, bad])
    assert answer_grammar(compiler, row, tools=[*STRICT, replace(bad, strict=False)]) is not None


def test_an_answer_that_cannot_be_followed_is_refused(vocabularies: Vocabularies) -> None:
    compiler = vocabularies.of(HERMES)[1]
    for tools in ((), TOOLS):
        with pytest.raises(GrammarError, match="uniqueItems"):
            answer_grammar(
                compiler, HERMES, tools=tools, answer={"type": "array", "uniqueItems": True}
            )


@pytest.mark.parametrize(("tools", "choice"), [((), "required"), (TOOLS, "delete"), ((), "now")])
def test_a_choice_without_its_tool(vocabularies: Vocabularies, tools: Any, choice: str) -> None:
    with pytest.raises(InputError, match="declared"):
        answer_grammar(vocabularies.of(HERMES)[1], HERMES, tools=tools, choice=choice)


VALUES = {
    "type": "object",
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "properties": {
        "text": {"type": "string", "description": "any"},
        "unit": {"$ref": "#/$defs/unit"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "list": {"type": "array", "items": {"$ref": "#/$defs/unit"}, "maxItems": 2},
    },
    "required": ["unit", "count"],
    "additionalProperties": False,
}


def test_strict_elements_validate(vocabularies: Vocabularies) -> None:
    """In any order, those that are required always, none twice."""
    tool = Tool("f", parameters=VALUES, strict=True)
    for row in (QWEN_XML, controlled(QWEN_XML)):
        made, tokenizer = grammar(vocabularies, row, tools=[tool], choice="f", parallel=False)
        ended = 0
        for seed in range(8):
            text = written(
                made, tokenizer, seed, ("</parameter>", "</function>", "\n<parameter=unit>")
            )
            if text is not None:
                ended += 1
                check(parsed(row, text, [tool]), (tool,), None)
        assert ended
        lines = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("count", "5"), ("unit", "F"), ("text", "a\nb"))]  # fmt: skip
        whole = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
        assert accepts(made, tokenizer, whole.format("".join(lines)))
        assert accepts(made, tokenizer, whole.format("".join(lines[::-1])))
        assert not accepts(made, tokenizer, whole.format("".join(lines[1:])))
        assert not accepts(made, tokenizer, whole.format("".join([*lines, lines[0]])))


@pytest.mark.parametrize("bound", [{"pattern": "^a$"}, {"minLength": 2}, {"maxLength": 2}, {"format": "date"}])  # fmt: skip
def test_bounds_of_strings_without_quotes_are_refused(
    vocabularies: Vocabularies, bound: Any
) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "string", **bound}}}, strict=True)  # fmt: skip
    compiler = vocabularies.of(QWEN_XML)[1]
    with pytest.raises(GrammarError, match=f"tool 'f'.*{next(iter(bound))}"):
        answer_grammar(compiler, QWEN_XML, tools=[tool])
