"""Messages: answers as whole messages and as frames, in order; errors and what keeps a stream alive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import ContextError, MemoryBudgetError, PromptSizeError
from headrace.serve.dialects import anthropic
from headrace.serve.dialects.anthropic_wire import signed
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reason,
    Reasoning,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.failure import RequestError, failure
from headrace.serve.request import Json, Text, ToolCall
from serve.dialects.anthropic_messages import CARD, CONTEXT, GET, frames, opened, parsed

USAGE = Usage(prompt_tokens=10, cached_tokens=4, new_tokens=6, reasoning_tokens=2)
TOLD: Json = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 6,
    "output_tokens_details": {"thinking_tokens": 2},
}
AT_START: Json = {**TOLD, "output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
EMPTY: Json = {
    "id": "msg_" + CONTEXT.id,
    "type": "message",
    "role": "assistant",
    "model": CARD.name,
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": AT_START,
}
START = Started(10, 4)
HEAD = [{"type": "message_start", "message": EMPTY}, {"type": "ping"}]
CALL = [
    CallStarted(0, "c0", "get"),
    CallDelta(0, '{"x":'),
    CallDelta(0, "1}"),
    CallEnded(0, '{"x":1}'),
]
OMITTED = {"type": "adaptive", "display": "omitted"}


def finished(reason: Reason = "stop", stop: str | None = None) -> Finished:
    return Finished(reason, USAGE, stop)


def started(index: int, kind: str, **fields: Any) -> Json:
    block = {"type": kind, **fields}
    return {"type": "content_block_start", "index": index, "content_block": block}


def thinking_started(index: int) -> Json:
    return started(index, "thinking", thinking="", signature="")


def delta(index: int, kind: str, **fields: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def stopped(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


def tail(reason: str = "end_turn", stop: str | None = None) -> list[Json]:
    ended = {"stop_reason": reason, "stop_sequence": stop}
    return [
        {"type": "message_delta", "delta": ended, "usage": TOLD},
        {"type": "message_stop"},
    ]


def called(index: int, of: int = 0, *pieces: str) -> list[Json]:
    return [
        started(index, "tool_use", id=f"toolu_c{of}", name="get", input={}),
        *(delta(index, "input_json_delta", partial_json=piece) for piece in pieces),
        stopped(index),
    ]


def test_a_stream_of_text() -> None:
    assert frames([START, TextDelta("He"), TextDelta("llo"), finished()]) == [
        *HEAD,
        started(0, "text", text=""),
        delta(0, "text_delta", text="He"),
        delta(0, "text_delta", text="llo"),
        stopped(0),
        *tail(),
    ]


def test_message_start_comes_with_the_admission_and_has_usage() -> None:
    assert frames([START]) == HEAD
    assert HEAD[0]["message"]["usage"]["input_tokens"] == 6


def test_an_answer_of_nothing_has_no_block() -> None:
    assert frames([START, finished()]) == [*HEAD, *tail()]


def test_thinking_ends_with_its_signature() -> None:
    events = [START, ReasoningDelta("H"), ReasoningDelta("m"), TextDelta("a"), finished()]
    assert frames(events, thinking={"type": "adaptive"}) == [
        *HEAD,
        thinking_started(0),
        delta(0, "thinking_delta", thinking="H"),
        delta(0, "thinking_delta", thinking="m"),
        delta(0, "signature_delta", signature=signed("Hm")),
        stopped(0),
        started(1, "text", text=""),
        delta(1, "text_delta", text="a"),
        stopped(1),
        *tail(),
    ]


def test_thinking_that_was_cut_is_signed_too() -> None:
    assert frames([START, ReasoningDelta("H"), finished("length")]) == [
        *HEAD,
        thinking_started(0),
        delta(0, "thinking_delta", thinking="H"),
        delta(0, "signature_delta", signature=signed("H")),
        stopped(0),
        *tail("max_tokens"),
    ]


def test_omitted_thinking_has_a_signature_and_no_text() -> None:
    events = [START, ReasoningDelta("H"), ReasoningDelta("m"), TextDelta("a"), finished()]
    told = frames(events, thinking=OMITTED)
    assert told[2:5] == [
        thinking_started(0),
        delta(0, "signature_delta", signature=signed("Hm")),
        stopped(0),
    ]
    assert "Hm" not in json.dumps(told)


def test_a_call_is_whole() -> None:
    events = [START, *CALL, finished("tool_calls")]
    assert frames(events, tools=[GET]) == [*HEAD, *called(0, 0, '{"x":1}'), *tail("tool_use")]
    exchange = opened(tools=[GET], stream=True)
    told = [len(list(exchange.push(event))) for event in events]
    assert told == [2, 0, 0, 0, 3, 2]


def test_a_call_is_told_while_it_is_written_for_a_tool_that_says_so() -> None:
    events = [START, *CALL, finished("tool_calls")]
    eager = [{**GET, "eager_input_streaming": True}]
    expected = [*HEAD, *called(0, 0, '{"x":', "1}"), *tail("tool_use")]
    assert frames(events, tools=eager) == expected
    exchange = opened(tools=eager, stream=True)
    told = [len(list(exchange.push(event))) for event in events]
    assert told == [2, 1, 1, 1, 1, 2]


def test_indices_are_never_used_again() -> None:
    second = [CallStarted(1, "c1", "get"), CallDelta(1, "{}"), CallEnded(1, "{}")]
    thought, said = ReasoningDelta("H"), TextDelta("\n")
    events = [START, thought, *CALL, said, *second, thought, finished("tool_calls")]
    assert frames(events, tools=[GET]) == [
        *HEAD,
        thinking_started(0),
        delta(0, "thinking_delta", thinking="H"),
        delta(0, "signature_delta", signature=signed("H")),
        stopped(0),
        *called(1, 0, '{"x":1}'),
        started(2, "text", text=""),
        delta(2, "text_delta", text="\n"),
        stopped(2),
        *called(3, 1, "{}"),
        thinking_started(4),
        delta(4, "thinking_delta", thinking="H"),
        delta(4, "signature_delta", signature=signed("H")),
        stopped(4),
        *tail("tool_use"),
    ]


def test_a_call_directly_after_thinking_gets_a_block_of_its_own() -> None:
    for tools in ([GET], [{**GET, "eager_input_streaming": True}]):
        told = frames([START, ReasoningDelta("H"), *CALL, finished("tool_calls")], tools=tools)
        blocks = [f["index"] for f in told if f["type"] == "content_block_start"]
        ends = [f["index"] for f in told if f["type"] == "content_block_stop"]
        assert blocks == ends == [0, 1]


def test_a_call_that_was_cut_is_not_told() -> None:
    events: list[Event] = [START, TextDelta("a"), *CALL[:3], finished("length")]
    told = frames(events, tools=[GET])
    assert told == frames([START, TextDelta("a"), finished("length")])
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"
    assert opened().whole(reply(events))["content"] == [{"type": "text", "text": "a"}]


def test_an_eager_call_that_was_cut_is_no_complete_input() -> None:
    eager = [{**GET, "eager_input_streaming": True}]
    told = frames([START, *CALL[:2], finished("length")], tools=eager)
    assert told == [*HEAD, *called(0, 0, '{"x":'), *tail("max_tokens")]


REASONS: list[tuple[Reason, str]] = [
    ("stop", "end_turn"),
    ("tool_calls", "tool_use"),
    ("length", "max_tokens"),
    ("context", "model_context_window_exceeded"),
]


@pytest.mark.parametrize(("reason", "told"), REASONS)
def test_a_reason_to_stop(reason: Reason, told: str) -> None:
    assert frames([START, finished(reason)])[2:] == tail(told)
    message = opened().whole(Reply(reason, USAGE))
    assert (message["stop_reason"], message["stop_sequence"]) == (told, None)


def test_a_stop_sequence_is_named() -> None:
    assert frames([START, finished("stop_sequence", "END")])[2:] == tail("stop_sequence", "END")
    message = opened().whole(Reply("stop_sequence", USAGE, stop="END"))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def reply(events: list[Event]) -> Reply:
    whole = collected(events)
    assert isinstance(whole, Reply)
    return whole


def test_a_whole_message() -> None:
    events = [START, ReasoningDelta("H"), ReasoningDelta("m"), TextDelta("a"), *CALL]
    exchange = opened(tools=[GET], thinking={"type": "adaptive"})
    assert exchange.whole(reply([*events, finished("tool_calls")])) == {
        **EMPTY,
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": signed("Hm")},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "toolu_c0", "name": "get", "input": {"x": 1}},
        ],
        "stop_reason": "tool_use",
        "usage": TOLD,
    }


def test_a_whole_message_with_omitted_thinking() -> None:
    message = opened(thinking=OMITTED).whole(Reply("stop", USAGE, (Reasoning("Hm"), Text("a"))))
    thought = {"type": "thinking", "thinking": "", "signature": signed("Hm")}
    assert message["content"] == [thought, {"type": "text", "text": "a"}]


def test_any_other_display_shows_thinking() -> None:
    for display in ("summarized", "full", None):
        exchange = opened(thinking={"type": "enabled", "budget_tokens": 5, "display": display})
        assert (
            exchange.whole(Reply("stop", USAGE, (Reasoning("Hm"),)))["content"][0]["thinking"]
            == "Hm"
        )


def test_an_input_keeps_its_values() -> None:
    text = (
        '{"a":"00123","b":"false","c":1e999,"d":-1e999,"e":123456789012345678901234567890,"f":0.1}'
    )
    message = opened().whole(Reply("tool_calls", USAGE, (ToolCall("c0", "get", text),)))
    largest = 1.7976931348623157e308
    assert message["content"][0]["input"] == {
        "a": "00123",
        "b": "false",
        "c": largest,
        "d": -largest,
        "e": 123456789012345678901234567890,
        "f": 0.1,
    }
    json.dumps(message, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{ "x": 1.0, "x": 2 }', '{ "x": 1.0, "x": 2 }'),
        ('{"x":-1e999}', '{"x":-1.7976931348623157e+308}'),
        ('{"x":"\\ud800é"}', '{"x":"\ufffdé"}'),
        (f'{{"x":{"7" * 5000}}}', '{"x":1.7976931348623157e+308}'),
    ],
    ids=["plain", "number", "half", "digits"],
)
def test_a_streamed_input_is_read_as_the_whole_one(text: str, told: str) -> None:
    """By every parser: what few can read is told as what the whole answer has."""
    events: list[Event] = [CallStarted(0, "c0", "get"), CallDelta(0, text), CallEnded(0, text)]
    sent = frames([START, *events, finished("tool_calls")], tools=[GET])
    assert [f["delta"]["partial_json"] for f in sent if "partial_json" in f.get("delta", ())] == [
        told
    ]
    whole = opened().whole(reply([*events, finished("tool_calls")]))
    assert whole["content"][0]["input"] == json.loads(told)


FAILURE = Failure(500, "inference_error", "it broke")
ERROR = {"type": "error", "error": {"type": "api_error", "message": "it broke"}}


def test_an_error_ends_a_stream_and_nothing_follows() -> None:
    begun: list[Event] = [START, ReasoningDelta("H")]
    told = frames([*begun, Failed(FAILURE), TextDelta("a"), finished()])
    assert told == [*frames(begun), ERROR]
    exchange = opened(stream=True)
    assert next(exchange.push(Failed(FAILURE))).startswith(b"event: error\ndata: {")


def test_what_keeps_a_stream_alive() -> None:
    exchange = opened(stream=True, thinking=OMITTED)
    list(exchange.push(START))
    assert parsed(exchange.keepalive()) == {"type": "ping"}
    list(exchange.push(ReasoningDelta("H")))
    assert parsed(exchange.keepalive()) == delta(0, "thinking_delta", thinking="")
    list(exchange.push(TextDelta("a")))
    assert parsed(exchange.keepalive()) == {"type": "ping"}
    shown = opened(stream=True, thinking={"type": "adaptive"})
    list(shown.push(ReasoningDelta("H")))
    assert parsed(shown.keepalive()) == {"type": "ping"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (411, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (431, "request_too_large"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_an_error_has_a_type(status: int, kind: str) -> None:
    assert anthropic.error(Failure(status, "code", "message", "hint")) == {
        "type": "error",
        "error": {"type": kind, "message": "message (hint)"},
    }


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ContextError(9000, 8192), "prompt is too long: 9000 tokens > 8192 maximum"),
        (ContextError(8192, 8192, 1), "prompt is too long: 8192 tokens > 8191 maximum"),
        (
            PromptSizeError(1 << 20, 8192),
            "prompt is too long: more than 8192 tokens > 8192 maximum",
        ),
    ],
)
def test_a_prompt_that_is_too_long_says_what_clients_read(error: Exception, said: str) -> None:
    told = {"type": "invalid_request_error", "message": said}
    assert anthropic.error(failure(error)) == {"type": "error", "error": told}


def test_a_picture_that_is_refused_says_what_clients_read() -> None:
    """Claude Code takes the picture out of the conversation then; for other words every later turn is refused too."""
    error = RequestError("the model 'm' takes no images", code="unsupported_image")
    said = "Could not process image: the model 'm' takes no images"
    told = {"type": "invalid_request_error", "message": said}
    assert anthropic.error(failure(error)) == {"type": "error", "error": told}


def test_no_memory_is_overload() -> None:
    told = anthropic.error(failure(MemoryBudgetError("pages", 2, 1)))
    assert told["error"]["type"] == "overloaded_error"


def test_the_refusal_of_a_thread_has_the_code_that_makes_clients_send_everything() -> None:
    with pytest.raises(RequestError) as caught:
        opened(thread={"type": "continue", "previous_message_id": "msg_1"})
    told = anthropic.error(failure(caught.value))["error"]
    assert told["type"] == "invalid_request_error"
    assert told["details"] == {"error_code": "thread_unsupported_request"}


def test_a_count_is_told() -> None:
    assert anthropic.ENDPOINTS[1].whole(7) == {"input_tokens": 7}
