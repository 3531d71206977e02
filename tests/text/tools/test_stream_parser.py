"""Model text as events: what each family writes, cut anywhere, broken anyhow."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.tools import formats
from headrace.text.tools.formats import (
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_XML,
    THINK,
    Format,
)
from headrace.text.tools.pieces import (
    CallBegun,
    CallDone,
    CallPiece,
    Malformed,
    Piece,
    Reasoning,
    Said,
)  # fmt: skip
from headrace.text.tools.stream import StreamParser
from headrace.values import Tool
from text.tools.models import NOW, ROWS, TOOLS, controlled, cut, parsed, reasoning, row_name

PARIS = '{"city": "Paris", "days": 3}'
WRITE = Tool("write", parameters={"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "integer"}}})  # fmt: skip
QWEN = reasoning(HERMES)


def joined(pieces: list[Piece]) -> list[Any]:
    """Neighbours of one kind as one, so that the cut does not show."""
    out: list[Any] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Reasoning | Said) and type(last) is type(piece):
            out[-1] = type(piece)(last.text + piece.text)
        elif isinstance(piece, CallPiece) and isinstance(last, CallPiece):
            out[-1] = CallPiece(piece.index, last.fragment + piece.fragment)
        else:
            out.append(piece)
    return out


def call(index: int, name: str, arguments: str) -> list[Piece]:
    return [CallBegun(index, name), CallPiece(index, arguments), CallDone(index, arguments)]


BOTH = [*call(0, "weather", PARIS), *call(1, "now", "{}")]
WEATHER_XML = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
# What a family writes, and what it is.
WRITTEN: list[tuple[Format, str, list[Piece]]] = [
    (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>', BOTH),
    (HERMES, f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call><tool_call>{{"name": "now"}}</tool_call>', BOTH),
    (HERMES, f'<tool_call>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": null}}]</tool_call>', BOTH),
    (HERMES, f'<tool_call>{{"name": "weather", "arguments": {json.dumps(PARIS)}}}</tool_call>', call(0, "weather", PARIS)),
    (HERMES, 'One moment.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n', [Said("One moment."), *call(0, "now", "{}")]),
    (QWEN, '<think>\nHm.\n\nWell.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [Reasoning("Hm.\n\nWell."), *call(0, "now", "{}")]),
    (QWEN_XML, f"<tool_call>\n{WEATHER_XML}\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", BOTH),
    (QWEN_XML, f"{WEATHER_XML}\n</tool_call>\n<function=now></function>", BOTH),
    (LLAMA, f'{{"name": "weather", "parameters": {PARIS}}}', call(0, "weather", PARIS)),
    (LLAMA, f'\n{{"type": "function", "name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}', BOTH),
    (LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}', call(0, "weather", PARIS)),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}, "id": "abcdefghi"}}, {{"name": "now", "arguments": {{}}}}]', BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", BOTH),
    (MISTRAL_ARGS, f"Well.[TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{PARIS}[TOOL_CALLS]now{{}}", [Said("Well."), *BOTH]),
    (reasoning(MISTRAL_ARGS), "[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}", [Reasoning("Hm."), *call(0, "now", "{}")]),
    (HARMONY, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>", [Reasoning("Hm."), *call(0, "weather", PARIS)]),
    (HARMONY, f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", call(0, "weather", PARIS)),
    (HARMONY, "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>", [Said("One moment.\n\nDone.")]),
]  # fmt: skip
CASES = [(row, text, want) for base, text, want in WRITTEN for row in (base, controlled(base))]


@pytest.mark.parametrize(("row", "text", "want"), CASES, ids=[f"{row_name(r)}-{i}" for i, (r, _, _) in enumerate(CASES)])  # fmt: skip
def test_what_a_family_writes(row: Format, text: str, want: list[Piece]) -> None:
    """Whole, a character at a time, and cut once at every place."""
    assert joined(parsed(row, text)) == want
    assert joined(parsed(row, text, size=1)) == want
    for at in range(len(text)):
        parser = StreamParser(row, TOOLS)
        out: list[Piece] = []
        for part in (text[:at], text[at:]):
            if row.controls:
                continue  # control tokens are never cut
            out += parser.push(part)
        if not row.controls:
            assert joined(out + parser.finish(False)) == want


@pytest.mark.parametrize("row", ROWS, ids=row_name)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_cut_makes_no_difference(row: Format, data: st.DataObject) -> None:
    """Of any text made of a family's tags and parts of calls; nothing is an exception."""
    parts = [*row.tags, "a", " ", "\n", "{", "}", '"', ":", ",", "[", "]", "name", '{"name": "now", "arguments": ', '{"name": "weather", "parameters": {"city": "x"}}', "weather", "<function=weather>", "<parameter=city>", "</parameter>", "</function>", "to=functions.now", "analysis", "final", "<", "5e999", "\\", "assistant"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=24)))
    is_open, was_cut = data.draw(st.booleans()), data.draw(st.booleans())
    whole = parsed(row, text, was_cut=was_cut, reasoning_open=is_open)
    ones = parsed(row, text, was_cut=was_cut, reasoning_open=is_open, size=1)
    assert joined(ones) == joined(whole)
    size = data.draw(st.integers(2, 9))
    assert joined(parsed(row, text, was_cut=was_cut, reasoning_open=is_open, size=size)) == joined(whole)  # fmt: skip
    check_calls(whole)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_the_cut_makes_no_difference_to_what_is_nearly_right(case: Any, data: st.DataObject) -> None:  # fmt: skip
    """What a family writes, with some of it left out, doubled, or in another's place."""
    row, text, _ = case
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        other = data.draw(
            st.sampled_from([text, "<", "</parameter>", "{", "\n", '"', "x", row.open])
        )
        text = text[:at] + other[data.draw(st.integers(0, len(other))) :][: data.draw(st.integers(0, 20))] + text[at + data.draw(st.integers(0, 3)) :]  # fmt: skip
    was_cut = data.draw(st.booleans())
    whole = parsed(row, text, was_cut=was_cut)
    for size in (1, data.draw(st.integers(2, 12))):
        assert joined(parsed(row, text, was_cut=was_cut, size=size)) == joined(whole)
    check_calls(whole)


def check_calls(pieces: list[Piece]) -> None:
    """Indices rise, pieces belong to the call in hand, and what is done is a JSON object of its pieces."""
    begun, text = -1, ""
    for piece in pieces:
        if isinstance(piece, CallBegun):
            assert piece.index == begun + 1
            begun, text = piece.index, ""
        elif isinstance(piece, CallPiece):
            assert piece.index == begun
            assert piece.fragment
            text += piece.fragment
        elif isinstance(piece, CallDone):
            assert (piece.index, piece.arguments) == (begun, text)
            assert isinstance(json.loads(text), dict)
        else:
            assert piece.text


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_without_tools_calls_are_text(row: Format) -> None:
    if row.shape == "channels":
        return
    text = 'See <tool_call>{"name": "now"}</tool_call> or [TOOL_CALLS]now{} or {"name": "now"}'
    out = joined(parsed(replace(row, controls=frozenset()), text, ()))
    assert out == [Said(text)]


@pytest.mark.parametrize("row", [QWEN, controlled(QWEN), reasoning(MISTRAL), controlled(reasoning(MISTRAL))], ids=row_name)  # fmt: skip
def test_reasoning_that_the_prompt_opened(row: Format) -> None:
    end = row.think[1] if row.think else ""
    out = parsed(row, f"Hm.\n{end}\n\nYes. ", reasoning_open=True, size=1)
    assert joined(out) == [Reasoning("Hm."), Said("Yes. ")]
    assert joined(parsed(row, "Hm. ", reasoning_open=True)) == [Reasoning("Hm.")]


def test_reasoning_that_the_prompt_opened_in_a_channel() -> None:
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert joined(parsed(HARMONY, text, reasoning_open=True)) == [Reasoning("Hm."), Said("Yes.")]


def test_a_tag_of_reasoning_within_the_answer_is_text() -> None:
    text = "In HTML <think> is no element, and </think> neither."
    assert joined(parsed(QWEN, text, size=1)) == [Said(text)]


def test_reasoning_may_spell_the_tags_of_calls() -> None:
    text = "<think>I could write <tool_call>.</think>No."
    assert joined(parsed(QWEN, text)) == [Reasoning("I could write <tool_call>."), Said("No.")]


def test_text_that_spells_a_control_token_is_text() -> None:
    row = controlled(QWEN)
    text = '<think>a</think> <tool_call>{"name": "now"}</tool_call>'
    parser = StreamParser(row, TOOLS)
    assert joined(parser.push(text) + parser.finish(False)) == [Said(text)]


def test_no_tag_goes_on_behind_a_control_token() -> None:
    parser = StreamParser(replace(QWEN, controls=frozenset(["</think>"])), TOOLS, reasoning_open=True)  # fmt: skip
    out = [*parser.push("a"), *parser.control("</think>"), *parser.push("<tool"), *parser.control("</think>"), *parser.push("_call>")]  # fmt: skip
    assert joined(out + parser.finish(False)) == [Reasoning("a"), Said("<tool_call>")]


STRINGS = ["}", "]}}", "</tool_call>", '"}}</tool_call>', "\n</tool_call>\n<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "\\", "\t\n", "é🙂\u2028", "</function>", "\n</parameter>", "a</parameter>b", "<parameter=text>"]  # fmt: skip


@pytest.mark.parametrize("value", STRINGS)
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_string_may_hold_anything(row: Format, value: str) -> None:
    """Closing braces and the family's own tags within an argument do not end the call."""
    arguments = {"path": "x", "text": f"a{value}b"}
    text = json.dumps(arguments, ensure_ascii=False)
    if any(tag in text for tag in row.controls):
        return  # a control token is no text
    both = {
        "object": f'<tool_call>{{"name": "write", "arguments": {text}}}</tool_call>',
        "bare": f'{{"name": "write", "parameters": {text}}}',
        "list": f'[TOOL_CALLS][{{"name": "write", "arguments": {text}}}]',
        "named": f"[TOOL_CALLS]write[ARGS]{text}",
        "channels": f"<|channel|>commentary to=functions.write<|message|>{text}<|call|>",
        "xml": f"<tool_call>\n<function=write>\n<parameter=path>\nx\n</parameter>\n<parameter=text>\n{arguments['text']}\n</parameter>\n</function>\n</tool_call>",
    }[row.shape]  # fmt: skip
    for size in (1, 7, 10**6):
        out = parsed(row, both, [WRITE], size=size)
        done = [p for p in out if isinstance(p, CallDone)]
        assert [json.loads(d.arguments) for d in done] == [arguments]
        assert len([p for p in out if not isinstance(p, CallPiece)]) == 2


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_string_streams_as_it_comes(row: Format) -> None:
    """Every part of a long argument is told before the next one is there."""
    begin = {
        "object": '<tool_call>{"name": "write", "arguments": {"text": "',
        "bare": '{"name": "write", "parameters": {"text": "',
        "list": '[TOOL_CALLS][{"name": "write", "arguments": {"text": "',
        "named": '[TOOL_CALLS]write[ARGS]{"text": "',
        "channels": '<|channel|>commentary to=functions.write<|message|>{"text": "',
        "xml": "<tool_call><function=write><parameter=text>\n",
    }[row.shape]
    parser = StreamParser(row, [WRITE])
    for control, part in cut(row, begin):
        (parser.control if control else parser.push)(part)
    for word in ("one ", "two ", "three "):
        assert parser.push(word) == [CallPiece(0, word)]
    assert parser.finish(True) == []


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_what_is_kept_unread_is_bounded(row: Format) -> None:
    """So each character is looked at a bounded number of times, however long the text."""
    rng = random.Random(1)
    words = ["<", "</", "</parameter>", "\n", " ", "x", "{", "[", "<tool_call", '"', "<|", "[TOOL"]
    parser = StreamParser(row, TOOLS)
    most = 0
    for _ in range(20_000):
        parser.push(rng.choice(words))
        most = max(most, len(parser._buffer))
    assert most < 400


@pytest.mark.parametrize("brackets", ["[", "{", '{"a":', "[{"])
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_nested_brackets_do_no_harm(row: Format, brackets: str) -> None:
    deep = brackets * 100_000
    text = {
        "object": f'<tool_call>{{"name": "write", "arguments": {{"text": {deep}',
        "bare": f'<|python_tag|>{{"name": "write", "parameters": {{"text": {deep}',
        "list": f'[TOOL_CALLS][{{"name": "write", "arguments": {{"text": {deep}',
        "named": f'[TOOL_CALLS]write[ARGS]{{"text": {deep}',
        "channels": f'<|channel|>commentary to=functions.write<|message|>{{"text": {deep}',
        "xml": f"<tool_call><function=write><parameter=lines>\n{deep}\n</parameter></function>",
    }[row.shape]
    out = parsed(row, text, [WRITE])
    if row.shape == "xml":
        assert json.loads(out[-1].arguments) == {"lines": deep}  # type: ignore[union-attr]
    else:
        assert isinstance(out[-1], Malformed)
        assert deep in out[-1].text


MALFORMED = [
    (HERMES, '<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>', "follows the call"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1,}}</tool_call>', "a key"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": tru}}</tool_call>', "word"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>', "no number"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "\\x"}}</tool_call>', "string"),
    (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "no JSON object"),
    (HERMES, '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>', "no JSON object"),
    (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "no string"),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "no name"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {}, "parameters": {}}</tool_call>', "twice"),
    (HERMES, '<tool_call>{"name": "delete", "arguments": {}}</tool_call>', "not declared"),
    (HERMES, "<tool_call>now()</tool_call>", "call was expected"),
    (HERMES, "<tool_call></tool_call>", "call was expected"),
    (HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x}</tool_call>', "incomplete"),
    (HERMES, '<tool_call>{"na', "incomplete"),
    (QWEN_XML, "<tool_call><function=delete></function></tool_call>", "not declared"),
    (QWEN_XML, "<tool_call><function=now>text</function></tool_call>", "was expected"),
    (QWEN_XML, "<tool_call><function=weather><parameter=city>a</parameter><parameter=city>b</parameter></function></tool_call>", "twice"),
    (QWEN_XML, "<tool_call><function=weather><parameter=city>a", "incomplete"),
    (LLAMA, '<|python_tag|>weather.call(city="Paris")', "call was expected"),
    (MISTRAL, "[TOOL_CALLS]delete[ARGS]{}", "not declared"),
    (MISTRAL_ARGS, f"[TOOL_CALLS]{'x' * 300}", "name of more than"),
    (HARMONY, "<|channel|>commentary to=functions.delete<|message|>{}<|call|>", "not declared"),
    (HARMONY, "<|channel|>commentary to=functions.now<|message|>{]<|call|>", "key"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "text", "cause"), MALFORMED)
def test_what_is_no_call_is_told_with_its_text(row: Format, text: str, cause: str) -> None:
    for form in (row, controlled(row)):
        for size in (1, 10**6):
            out = [p for p in parsed(form, text, size=size) if not isinstance(p, CallBegun | CallPiece)]  # fmt: skip
            assert [type(p) for p in out] == [Malformed]
            assert form.controls or cause in out[0].cause  # type: ignore[union-attr]
            assert out[0].text.replace("<|channel|>", "") == text.replace("<|channel|>", "")  # type: ignore[union-attr]


def test_the_answer_goes_on_behind_what_is_no_call() -> None:
    text = f'a <tool_call>no</tool_call> b <tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call> c'
    out = joined(parsed(HERMES, text))
    assert [type(p) for p in out] == [Said, Malformed, Said, CallBegun, CallPiece, CallDone, Said]
    assert [p.text for p in out if isinstance(p, Said | Malformed)] == ["a", "<tool_call>no</tool_call>", "b", "c"]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_a_call_that_was_cut_is_not_done(row: Format) -> None:
    text = next(t for r, t, _ in WRITTEN if r.shape == row.shape and "Paris" in t)
    stop = text.index("Paris") + 3
    out = parsed(row, text[:stop], was_cut=True)
    assert CallBegun(0, "weather") in out
    assert not [p for p in out if isinstance(p, CallDone | Malformed | Said)]


def test_a_call_without_its_closing_tag_is_done_where_the_model_ended() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}'
    assert parsed(HERMES, text)[-1] == CallDone(0, "{}")
    assert not [p for p in parsed(HERMES, text, was_cut=True) if isinstance(p, CallDone)]


@pytest.mark.parametrize("row", [HERMES, QWEN_XML, QWEN], ids=row_name)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Hello.</tool_call>", "Hello."),
        ("</tool_call>Hello.", "Hello."),
        ("Hello</tool_call> there.</tool_call>\n", "Hello there.\n"),
    ],
)
def test_a_closing_tag_that_closes_nothing_is_left_out(row: Format, text: str, said: str) -> None:
    for form in (row, controlled(row)):
        for size in (1, 10**6):
            assert joined(parsed(form, text, size=size)) == [Said(said)]
    assert joined(parsed(row, text, ())) == [Said(text)]
    answer = '{"a": "</tool_call>"}'
    assert joined(parsed(row, answer, json_answer=True, size=1)) == [Said(answer)]


def test_an_answer_without_a_channel_tells_no_tag() -> None:
    for row in (HARMONY, controlled(HARMONY)):
        for text in ("Hi <|constrain|>there", "<|constrain|>Hi there"):
            for size in (1, 10**6):
                assert joined(parsed(row, text, size=size)) == [Said("Hi there")]


PAIR = Tool("f", parameters={"type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}})  # fmt: skip


@pytest.mark.parametrize("gap", ["", "\n", " " * 64])
def test_the_answer_goes_on_behind_a_parameter_that_is_not_closed(gap: str) -> None:
    broken = f"<tool_call><function=f><parameter=s>a<parameter=i>4</function>{gap}</tool_call>"
    whole = "<tool_call><function=f><parameter=s>b</parameter></function></tool_call>"
    for row in (QWEN_XML, controlled(QWEN_XML)):
        for size in (1, 5, 10**6):
            out = joined(parsed(row, f"{broken} Well. {whole}", [PAIR], size=size))
            assert [p for p in out if isinstance(p, Said)] == [Said("Well.")]
            assert [p.text for p in out if isinstance(p, Malformed)] == [broken]
            assert [p for p in out if isinstance(p, CallDone)] == [CallDone(1, '{"s": "b"}')]


@pytest.mark.parametrize(
    "value",
    ["</function>a</tool_call>", "</function>" + " " * 65 + "</tool_call>", "</parameter></tool_call>", "</parameter> a </function></function>"],
)  # fmt: skip
def test_ends_in_a_string_that_no_call_has_together(value: str) -> None:
    text = f"<tool_call><function=f><parameter=s>{value}</parameter></function></tool_call>"
    for size in (1, 10**6):
        assert parsed(QWEN_XML, text, [PAIR], size=size)[-1] == CallDone(0, json.dumps({"s": value}))  # fmt: skip


def test_ends_in_a_string_that_every_call_has_end_it() -> None:
    """While it streams nothing tells them apart (docs/tools.md)."""
    text = "<tool_call><function=f><parameter=s>a</parameter></function></tool_call> b</parameter>"
    for size in (1, 10**6):
        out = joined(parsed(QWEN_XML, text, [PAIR], size=size))
        assert out == [*call(0, "f", '{"s": "a"}'), Said("b</parameter>")]


def test_a_partial_tag_at_the_end() -> None:
    """The model's own end makes it text; a cut leaves it out."""
    assert joined(parsed(HERMES, "a <tool_", size=1)) == [Said("a <tool_")]
    assert joined(parsed(HERMES, "a <tool_", was_cut=True)) == [Said("a ")]


def test_json_that_is_no_call_is_text() -> None:
    for text in ('{"name": "Paris", "country": "France"}', '{"city": {"name": "now"}}', "{}", "{ and }"):  # fmt: skip
        assert joined(parsed(LLAMA, text, size=1)) == [Said(text)], text


def test_json_that_is_no_call_streams_once_that_is_clear() -> None:
    parser = StreamParser(LLAMA, TOOLS)
    assert parser.push('{"ci') == []
    assert joined(parser.push('ty": "P')) == [Said('{"city": "P')]


def test_an_answer_of_json_may_spell_tags() -> None:
    text = '{"a": "<tool_call>", "b": "<function=now>"}'
    assert joined(parsed(reasoning(QWEN_XML), text, json_answer=True, size=1)) == [Said(text)]


def test_whitespace_of_an_answer_without_calls_is_its_own() -> None:
    assert joined(parsed(HERMES, "  a\n b \n", size=1)) == [Said("  a\n b \n")]


def test_numbers_that_no_double_holds_become_strings() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1e999, "b": -1e999, "c": 1e20, "d": %s}}</tool_call>' % ("9" * 400)  # fmt: skip
    done = parsed(HERMES, text)[-1]
    assert isinstance(done, CallDone)
    assert json.loads(done.arguments) == {"a": "1e999", "b": "-1e999", "c": 1e20, "d": "9" * 400}


def test_numbers_of_a_strict_tool_stay_numbers() -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": {"type": "number"}}}, strict=True)  # fmt: skip
    most = 1.7976931348623157e308
    for number, value in (("1e999", most), ("-1e999", -most), ("1e20", 1e20)):
        for row, text in (
            (HERMES, f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>'),
            (MISTRAL_ARGS, f'[TOOL_CALLS]f[ARGS]{{"a": {number}}}'),
            (
                QWEN_XML,
                f"<tool_call><function=f><parameter=a>{number}</parameter></function></tool_call>",
            ),
        ):
            done = parsed(row, text, [tool])[-1]
            assert isinstance(done, CallDone)
            assert json.loads(done.arguments) == {"a": value}


def test_line_ends_in_a_string_are_escaped() -> None:
    done = parsed(HERMES, '<tool_call>{"name": "now", "arguments": {"a": "x\n\ty"}}</tool_call>')[-1]  # fmt: skip
    assert done == CallDone(0, '{"a": "x\\n\\ty"}')


def test_every_row_is_in_the_table() -> None:
    assert {row.name for row, _, _ in WRITTEN} == {row.name for row in formats.FORMATS}
    assert NOW in TOOLS
    assert QWEN.think == THINK
