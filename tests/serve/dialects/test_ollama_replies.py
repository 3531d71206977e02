"""Events as Ollama's lines of JSON, and whole answers: exact frames. Pure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.serve.arguments import parsed
from headrace.serve.dialect import Exchange
from headrace.serve.dialects import ollama
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reason,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.request import Json, ToolCall
from serve.dialects.ollama_asked import BASIC, BOTH, CHAT, CONTEXT, GENERATE, MODEL, opened

HEAD = {"model": MODEL, "created_at": "2023-11-14T22:13:20.250000Z"}
USAGE = Usage(11, 4, 7, 3, prefill_seconds=0.25, decode_seconds=1.5)
END = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 1_750_000_000,
    "load_duration": 0,
    "prompt_eval_count": 11,
    "prompt_eval_duration": 250_000_000,
    "eval_count": 7,
    "eval_duration": 1_500_000_000,
}
STARTED = Started(11, 4)


def exchange(path: str, **body: Any) -> Exchange:
    got = opened(path, {**BASIC[path], **body})
    assert isinstance(got, Exchange)
    return got


def lines(path: str, events: list[Event]) -> list[Json]:
    """Every frame, which is one line."""
    telling = exchange(path)
    frames = [frame for event in events for frame in telling.push(event)]
    assert all(frame.endswith(b"\n") and frame.count(b"\n") == 1 for frame in frames)
    return [json.loads(frame) for frame in frames]


def whole(path: str, events: list[Event]) -> Json:
    reply = collected(events)
    assert isinstance(reply, Reply)
    return exchange(path, stream=False).whole(reply)


def piece(path: str, text: str = "", **more: Any) -> Json:
    if path == GENERATE:
        return {**HEAD, "response": text, **more, "done": False}
    return {**HEAD, "message": {"role": "assistant", "content": text, **more}, "done": False}


def last(path: str, reason: str = "stop") -> Json:
    return {**piece(path), **END, "done_reason": reason}


@BOTH
def test_text(path: str) -> None:
    events = [STARTED, TextDelta("Hé"), TextDelta("llo\n"), Finished("stop", USAGE)]
    assert lines(path, events) == [piece(path, "Hé"), piece(path, "llo\n"), last(path)]


def test_a_line_is_compact_utf8() -> None:
    [frame] = exchange(GENERATE).push(TextDelta("é\n"))
    start = f'{{"model":"{MODEL}","created_at":"2023-11-14T22:13:20.250000Z",'
    assert frame == f'{start}"response":"é\\n","done":false}}\n'.encode()


@BOTH
def test_thinking_comes_before_the_answer(path: str) -> None:
    events = [STARTED, ReasoningDelta("Hm"), ReasoningDelta("."), TextDelta("Yes"), Finished("stop", USAGE)]  # fmt: skip
    thoughts = [piece(path, thinking="Hm"), piece(path, thinking=".")]
    assert lines(path, events) == [*thoughts, piece(path, "Yes"), last(path)]


@BOTH
def test_a_whole_answer(path: str) -> None:
    events = [STARTED, ReasoningDelta("Hm"), TextDelta("Yes"), TextDelta("."), Finished("stop", USAGE)]  # fmt: skip
    assert whole(path, events) == {**piece(path, "Yes.", thinking="Hm"), **END}


@BOTH
def test_a_budget_that_ends_in_a_thought_leaves_the_answer_empty(path: str) -> None:
    events = [STARTED, ReasoningDelta("Hm"), Finished("length", USAGE)]
    expected = {**piece(path, thinking="Hm"), **END, "done_reason": "length"}
    assert whole(path, events) == expected
    assert lines(path, events) == [piece(path, thinking="Hm"), last(path, "length")]


@BOTH
@pytest.mark.parametrize(
    ("reason", "told"),
    [("stop", "stop"), ("stop_sequence", "stop"), ("tool_calls", "stop"), ("length", "length"), ("context", "length")],
)  # fmt: skip
def test_reasons(path: str, reason: Reason, told: str) -> None:
    events: list[Event] = [STARTED, Finished(reason, USAGE)]
    assert lines(path, events) == [last(path, told)]
    assert whole(path, events) == last(path, told)


CALLS: list[Event] = [
    STARTED,
    ReasoningDelta("Hm"),
    CallStarted(0, "a1", "weather"),
    CallDelta(0, '{"city": '),
    CallDelta(0, '"Oslo"}'),
    CallEnded(0, '{"city": "Oslo"}'),
    CallStarted(1, "b2", "now"),
    CallDelta(1, "{}"),
    CallEnded(1, "{}"),
    Finished("tool_calls", USAGE),
]
TOLD = [
    {"id": "call_a1", "function": {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}}},
    {"id": "call_b2", "function": {"index": 1, "name": "now", "arguments": {}}},
]


def test_calls_are_told_whole_and_one_a_line() -> None:
    assert lines(CHAT, CALLS) == [
        piece(CHAT, thinking="Hm"),
        piece(CHAT, tool_calls=TOLD[:1]),
        piece(CHAT, tool_calls=TOLD[1:]),
        last(CHAT),
    ]


def test_calls_of_a_whole_answer() -> None:
    assert whole(CHAT, CALLS) == {**piece(CHAT, thinking="Hm", tool_calls=TOLD), **END}


def test_a_call_that_the_budget_cut_is_not_told() -> None:
    cut = [*CALLS[:7], CallDelta(1, '{"a'), Finished("length", USAGE)]
    expected = [piece(CHAT, thinking="Hm"), piece(CHAT, tool_calls=TOLD[:1])]
    assert lines(CHAT, cut) == [*expected, last(CHAT, "length")]
    message = piece(CHAT, thinking="Hm", tool_calls=TOLD[:1])
    assert whole(CHAT, cut) == {**message, **END, "done_reason": "length"}


def test_calls_are_accepted_as_they_were_told() -> None:
    message = whole(CHAT, CALLS)["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in TOLD]
    again = exchange(CHAT, messages=[*BASIC[CHAT]["messages"], message, *results]).request
    assert again.turns[1].reasoning == "Hm"
    assert again.turns[1].calls == (
        ToolCall("call_a1", "weather", '{"city": "Oslo"}'),
        ToolCall("call_b2", "now", "{}"),
    )


FAILURE = Failure(503, "insufficient_memory", "no memory", "free some")


@BOTH
def test_a_failure_in_mid_stream_is_the_last_line(path: str) -> None:
    told = lines(path, [STARTED, TextDelta("He"), Failed(FAILURE)])
    assert told == [piece(path, "He"), {"error": "no memory (free some)"}]


def test_an_error() -> None:
    assert ollama.error(Failure(400, "x", "wrong")) == {"error": "wrong"}
    assert ollama.error(FAILURE) == {"error": "no memory (free some)"}


@BOTH
def test_silence_is_a_piece_without_text(path: str) -> None:
    assert json.loads(exchange(path).keepalive()) == piece(path)


def test_the_name_that_was_asked_for_is_told() -> None:
    assert json.loads(exchange(CHAT, model="painted").keepalive())["model"] == "painted"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, 0), (1e-9, 1), (1.4e-9, 1), (0.1, 100_000_000), (86_400.0, 86_400_000_000_000)],
)
def test_durations_are_whole_nanoseconds(seconds: float, told: int) -> None:
    usage = Usage(prefill_seconds=seconds)
    end = lines(CHAT, [STARTED, Finished("stop", usage)])[0]
    assert (end["prompt_eval_duration"], end["total_duration"]) == (told, told)


@pytest.mark.parametrize(
    ("second", "told"),
    [(0.0, "1970-01-01T00:00:00.000000Z"), (1_700_000_000.0, "2023-11-14T22:13:20.000000Z")],
)
def test_times_are_utc_with_microseconds(second: float, told: str) -> None:
    loaded = opened(CHAT, {}, replace(CONTEXT, now=second))
    assert isinstance(loaded, dict)
    assert loaded["created_at"] == told


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "00123", "b": "false", "c": "1e5"}', {"a": "00123", "b": "false", "c": "1e5"}),
        ('{"a": 18446744073709551616}', {"a": 2**64}),
        ('{"a": 1e999, "b": -1e999}', {"a": 1.7976931348623157e308, "b": -1.7976931348623157e308}),
        ('{"a": -' + "9" * 5000 + "}", {"a": -1.7976931348623157e308}),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        (r'{"a": "\ud83d", "\udc00": [1.5]}', {"a": "�", "�": [1.5]}),
        (r'{"a": "\\ud83d"}', {"a": r"\ud83d"}),
    ],
    ids=["strings", "whole", "inf", "digits", "pair", "half", "escaped"],
)
def test_arguments_are_json_that_every_client_reads(text: str, value: Json) -> None:
    assert parsed(text) == value
    telling = exchange(CHAT)
    [frame] = [f for e in (CallStarted(0, "a", "f"), CallEnded(0, text)) for f in telling.push(e)]
    assert json.loads(frame)["message"]["tool_calls"][0]["function"]["arguments"] == value
