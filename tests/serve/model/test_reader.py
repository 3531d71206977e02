"""Tokens of real texts through a reader: reasoning, stop strings, calls, and what cannot be one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import tiny
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    ReasoningDelta,
    TextDelta,
)
from headrace.serve.failure import RequestError
from headrace.serve.model.reader import Reader
from headrace.serve.request import Format, Request, ToolChoice
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.formats import HERMES, THINK
from headrace.values import Tool

TOKENIZER = Tokenizer.from_json(tiny.tokenizer_json(), eos=(258,))
ROW = replace(HERMES, think=THINK)
TOOLS = (Tool("weather", parameters={"type": "object"}), Tool("now"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def reader(*, reasoning_open: bool = False, **asked: Any) -> Reader:
    return Reader(
        TOKENIZER,
        ROW,
        Request("m", **asked),
        reasoning_open=reasoning_open,
        continues=False,
        new_id=lambda index: f"id{index}",
    )


def events(one: Reader, text: str, *, cut: bool = False) -> list[Event]:
    """Of a whole text, a byte a token; deltas of one kind as one. Stops where the reader is over."""

    def told() -> Iterator[Event]:
        for token in [*TOKENIZER.encode(text), *([] if cut else [258])]:
            yield from one.push(token)
            if one.over:
                break
        yield from one.finish(cut=cut)

    return merged(list(told()))


def merged(told: Sequence[Event]) -> list[Event]:
    out: list[Event] = []
    for event in told:
        match out[-1] if out else None, event:
            case TextDelta(a), TextDelta(b):
                out[-1] = TextDelta(a + b)
            case ReasoningDelta(a), ReasoningDelta(b):
                out[-1] = ReasoningDelta(a + b)
            case CallDelta(i, a), CallDelta(j, b) if i == j:
                out[-1] = CallDelta(i, a + b)
            case _:
                out.append(event)
    return out


def test_reasoning_that_the_prompt_opened() -> None:
    one = reader(reasoning_open=True)
    assert events(one, "Hm, 7?\n</think>\n\nSeven.") == [
        ReasoningDelta("Hm, 7?"),
        TextDelta("Seven."),
    ]
    assert one.reasoning_tokens == len("Hm, 7?\n</think>")


def test_reasoning_that_the_model_opens() -> None:
    one = reader()
    assert events(one, "<think>Hm.</think>Seven.") == [ReasoningDelta("Hm."), TextDelta("Seven.")]
    assert 0 < one.reasoning_tokens <= len("<think>Hm.</think>")


def test_a_stop_string_in_reasoning_stops_nothing() -> None:
    one = reader(reasoning_open=True, stop=("7",))
    assert events(one, "7 or 8</think>It is 7 and 8") == [
        ReasoningDelta("7 or 8"),
        TextDelta("It is "),
    ]
    assert (one.stop, one.over) == ("7", True)


@pytest.mark.parametrize(
    ("stop", "text", "told"),
    [
        ("\n\n", "One.\n\nTwo.", "One."),
        ("\n", "One.  \nTwo.", "One.  "),
        (" \n", "One.  \nTwo.", "One. "),
        ("\t", "\tOne.", ""),
        ("e.", "One.\n", "On"),
    ],
)
def test_a_stop_string_ends_at_its_last_token(stop: str, text: str, told: str) -> None:
    """Blanks too, though those at an end are held back until more follows."""
    one, pushed, out = reader(stop=(stop,)), 0, []
    for token in TOKENIZER.encode(text):
        out += list(one.push(token))
        pushed += 1
        if one.over:
            break
    out += list(one.finish(cut=True))
    assert pushed == text.index(stop) + len(stop)
    assert merged(out) == ([TextDelta(told)] if told else [])
    assert one.stop == stop


def test_what_could_be_a_stop_string_is_told_at_the_end() -> None:
    one = reader(stop=("never",))
    assert events(one, "It may nev") == [TextDelta("It may nev")]
    assert one.stop is None


@pytest.mark.parametrize("cut", [True, False])
def test_blanks_at_the_end_are_told(cut: bool) -> None:
    assert events(reader(), "One. \n", cut=cut) == [TextDelta("One. \n")]


def test_a_character_that_a_limit_cuts_is_left_out() -> None:
    one = reader()
    out = [event for token in TOKENIZER.encode("aé")[:-1] for event in one.push(token)]
    assert merged([*out, *one.finish(cut=True)]) == [TextDelta("a")]


def test_calls_have_ids_and_indices() -> None:
    one = reader(tools=TOOLS)
    text = f"Let me see.\n{CALL}\n" + CALL.replace("Bern", "Basel")
    assert events(one, text) == [
        TextDelta("Let me see."),
        CallStarted(0, "id0", "weather"),
        CallDelta(0, '{"city": "Bern"}'),
        CallEnded(0, '{"city": "Bern"}'),
        CallStarted(1, "id1", "weather"),
        CallDelta(1, '{"city": "Basel"}'),
        CallEnded(1, '{"city": "Basel"}'),
    ]
    assert one.calls == 2
    assert not one.over


def test_one_call_is_the_end_where_no_more_may_be() -> None:
    one = reader(tools=TOOLS, parallel_calls=False)
    found = events(one, f"{CALL}\n{CALL} and so on")
    assert [type(event) for event in found] == [CallStarted, CallDelta, CallEnded]
    assert one.over


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "'rm' is not declared"),
        ('<tool_call>{"name": "weather", "arguments": 5}</tool_call>', "no JSON object"),
        ('<tool_call>{"name": "weather", "arguments": {"a": tru}}</tool_call>', "cannot be used"),
        ('<tool_call>{"arguments": {}}</tool_call>', "it has no name"),
        ('<tool_call>{"name": "weather", "arguments": {"city": "B', "incomplete"),
        ("<tool_call>", "incomplete"),
    ],
)
def test_a_call_that_cannot_be_one(text: str, cause: str) -> None:
    """At the model's own end it is an error of the inference; where a limit cut it, it is only left out."""
    with pytest.raises(RequestError, match=cause) as found:
        events(reader(tools=TOOLS), text)
    assert (found.value.status, found.value.cause) == (500, "inference_error")
    if not text.endswith("</tool_call>"):
        one = reader(tools=TOOLS)
        assert not [e for e in events(one, text, cut=True) if isinstance(e, CallEnded | TextDelta)]
        assert one.calls == 0


def test_a_wrong_call_that_a_limit_cuts_is_left_out() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {"a": 1'
    assert events(reader(tools=TOOLS), text, cut=True) == []


def test_the_text_of_a_wrong_call_is_shown_in_part() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {"a": "' + "x" * 5000 + '"}}</tool_call>'
    with pytest.raises(RequestError) as found:
        events(reader(tools=TOOLS), text)
    assert len(found.value.message) < 500


def test_a_demanded_call_that_was_not_made() -> None:
    demanded: Any = {"tools": TOOLS, "choice": ToolChoice("required")}
    with pytest.raises(RequestError, match="called no tool") as found:
        events(reader(**demanded), "No.")
    assert (found.value.status, found.value.cause) == (500, "inference_error")
    assert events(reader(**demanded), "No.", cut=True) == [TextDelta("No.")]


def test_without_tools_tags_of_calls_are_text() -> None:
    for asked in ({}, {"tools": TOOLS, "choice": ToolChoice("none")}):
        assert events(reader(**asked), CALL) == [TextDelta(CALL)]  # type: ignore[arg-type]


def test_strings_of_a_json_answer_may_spell_tags() -> None:
    text = '{"a": "<tool_call></think>"}'
    one = reader(tools=TOOLS, answer=Format("json"))
    assert events(one, text) == [TextDelta(text)]


def test_control_tokens_are_not_told() -> None:
    one = reader()
    out = [
        e for t in (*TOKENIZER.encode("a"), 257, *TOKENIZER.encode("b"), 258) for e in one.push(t)
    ]
    assert merged([*out, *one.finish(cut=False)]) == [TextDelta("ab")]
