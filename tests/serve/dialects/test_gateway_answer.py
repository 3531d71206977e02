"""What a gateway call is answered with: parts of a stream, a whole result, errors, and what is told without the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.serve.dialect import Card, Tell
from headrace.serve.dialects import gateway
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reasoning,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.request import Text, ToolCall
from serve.dialects.gateway_calls import ID, MODEL, TOOL, context, frames, opened
from serve.scripted import CARD

USAGE = Usage(prompt_tokens=11, cached_tokens=4, new_tokens=7, reasoning_tokens=3)
NESTED = {
    "inputTokens": {"total": 11, "noCache": 7, "cacheRead": 4},
    "outputTokens": {"total": 7, "text": 4, "reasoning": 3},
}
FLAT = {
    "inputTokens": 11,
    "outputTokens": 7,
    "totalTokens": 18,
    "reasoningTokens": 3,
    "cachedInputTokens": 4,
}
METADATA = {"id": f"gen_{ID}", "timestamp": "2023-11-14T22:13:20.250Z", "modelId": MODEL}
HEAD = [{"type": "stream-start", "warnings": []}, {"type": "response-metadata", **METADATA}]
ARGUMENTS = '{"city":"Ulm"}'


def ended(unified: str, raw: str) -> dict[str, Any]:
    return {"finishReason": {"unified": unified, "raw": raw}, "usage": NESTED}


def tail(unified: str = "stop", raw: str = "stop") -> list[Any]:
    return [{"type": "finish", **ended(unified, raw)}, "[DONE]"]


def streamed(*events: Event, **body: Any) -> list[Any]:
    return frames(opened(**body), [Started(11, 4), *events])


def block(kind: str, n: int, *deltas: str) -> list[Any]:
    id = f"{kind}-{n}"
    told = [{"type": f"{kind}-delta", "id": id, "delta": delta} for delta in deltas]
    return [{"type": f"{kind}-start", "id": id}, *told, {"type": f"{kind}-end", "id": id}]


def called(id: str, *deltas: str, name: str = "weather") -> list[Any]:
    id = f"call_{id}"
    told = [{"type": "tool-input-delta", "id": id, "delta": delta} for delta in deltas]
    whole = {"type": "tool-call", "toolCallId": id, "toolName": name, "input": "".join(deltas)}
    start = {"type": "tool-input-start", "id": id, "toolName": name}
    return [start, *told, {"type": "tool-input-end", "id": id}, whole]


def test_the_first_event_is_told_at_once() -> None:
    assert streamed() == HEAD


def test_text_is_one_block() -> None:
    events = (TextDelta("Hel"), TextDelta("lo"), Finished("stop", USAGE))
    assert streamed(*events) == [*HEAD, *block("text", 0, "Hel", "lo"), *tail()]


def test_reasoning_is_a_block_of_its_own() -> None:
    events = (ReasoningDelta("H"), ReasoningDelta("m"), TextDelta("So"), Finished("stop", USAGE))
    parts = [*block("reasoning", 0, "H", "m"), *block("text", 1, "So")]
    assert streamed(*events) == [*HEAD, *parts, *tail()]


def test_blocks_of_one_kind_have_ids_of_their_own() -> None:
    events = (
        TextDelta("a"),
        ReasoningDelta("b"),
        TextDelta("c"),
        ReasoningDelta("d"),
        Finished("stop", USAGE),
    )
    parts = [
        *block("text", 0, "a"),
        *block("reasoning", 1, "b"),
        *block("text", 2, "c"),
        *block("reasoning", 3, "d"),
    ]
    assert streamed(*events) == [*HEAD, *parts, *tail()]


def test_a_call_ends_the_block_before_it() -> None:
    events = (
        ReasoningDelta("Hm"),
        CallStarted(0, "a", "weather"),
        CallDelta(0, '{"city":'),
        CallDelta(0, '"Ulm"}'),
        CallEnded(0, ARGUMENTS),
        Finished("tool_calls", USAGE),
    )
    parts = [*block("reasoning", 0, "Hm"), *called("a", '{"city":', '"Ulm"}')]
    assert streamed(*events, tools=[TOOL]) == [*HEAD, *parts, *tail("tool-calls", "tool_calls")]


def test_parallel_calls_keep_their_ids() -> None:
    events = [
        event
        for index, id in enumerate("ab")
        for event in (
            CallStarted(index, id, "weather"),
            CallDelta(index, ARGUMENTS),
            CallEnded(index, ARGUMENTS),
        )
    ]
    parts = [*called("a", ARGUMENTS), *called("b", ARGUMENTS)]
    assert streamed(*events, Finished("tool_calls", USAGE)) == [
        *HEAD,
        *parts,
        *tail("tool-calls", "tool_calls"),
    ]


def test_text_behind_a_call_is_a_new_block() -> None:
    events = (
        TextDelta("a"),
        CallStarted(0, "a", "weather"),
        CallDelta(0, "{}"),
        CallEnded(0, "{}"),
        TextDelta("b"),
        Finished("stop", USAGE),
    )
    parts = [*block("text", 0, "a"), *called("a", "{}"), *block("text", 1, "b")]
    assert streamed(*events) == [*HEAD, *parts, *tail()]


def test_a_call_that_was_cut_is_never_complete() -> None:
    events = (CallStarted(0, "a", "weather"), CallDelta(0, '{"ci'), Finished("length", USAGE))
    start, delta, *_ = called("a", '{"ci')
    assert streamed(*events) == [*HEAD, start, delta, *tail("length", "length")]


@pytest.mark.parametrize(
    ("raw", "unified"),
    [
        ("stop", "stop"),
        ("stop_sequence", "stop"),
        ("tool_calls", "tool-calls"),
        ("length", "length"),
        ("context", "length"),
    ],
)
def test_a_finish_reason(raw: Any, unified: str) -> None:
    assert streamed(Finished(raw, USAGE)) == [*HEAD, *tail(unified, raw)]
    assert opened().whole(Reply(raw, USAGE)) == {
        "content": [],
        **ended(unified, raw),
        "warnings": [],
        "response": METADATA,
    }


def test_version_2_has_flat_usage_and_a_plain_finish_reason() -> None:
    exchange = opened(headers={"ai_language_model_specification_version": "2"})
    finish = {"type": "finish", "finishReason": "tool-calls", "usage": FLAT}
    assert frames(exchange, [Finished("tool_calls", USAGE)]) == [finish, "[DONE]"]
    whole = exchange.whole(Reply("length", USAGE, (Text("Hi"),)))
    assert (whole["finishReason"], whole["usage"]) == ("length", FLAT)


def test_version_3_is_told_as_version_4() -> None:
    exchange = opened(headers={"ai_language_model_specification_version": "3"})
    assert frames(exchange, [Finished("stop", USAGE)]) == tail()


def test_a_whole_answer() -> None:
    reply = Reply(
        "tool_calls", USAGE, (Reasoning("Hm"), Text("So"), ToolCall("a", "weather", ARGUMENTS))
    )
    assert opened().whole(reply) == {
        "content": [
            {"type": "reasoning", "text": "Hm"},
            {"type": "text", "text": "So"},
            {"type": "tool-call", "toolCallId": "call_a", "toolName": "weather", "input": ARGUMENTS},
        ],
        **ended("tool-calls", "tool_calls"),
        "warnings": [],
        "response": METADATA,
    }  # fmt: skip


def test_the_answer_replayed_is_accepted() -> None:
    """What the server says is what it reads, apart from the text that `ai` parses a call's input from."""
    reply = Reply(
        "tool_calls", USAGE, (Reasoning("Hm"), Text("So"), ToolCall("a", "weather", ARGUMENTS))
    )
    content = opened().whole(reply)["content"]
    result = {"type": "tool-result", "toolCallId": "call_a", "toolName": "weather", "output": {"type": "text", "value": "21"}}  # fmt: skip
    prompt = [
        {"role": "user", "content": []},
        {"role": "assistant", "content": content},
        {"role": "tool", "content": [result]},
    ]
    turn = opened(prompt=prompt).request.turns[1]
    assert (turn.text, turn.reasoning) == ("So", "Hm")
    assert turn.calls == (ToolCall("call_a", "weather", ARGUMENTS),)


def test_a_failure_ends_the_stream_and_nothing_follows() -> None:
    failure = Failure(503, "insufficient_memory", "no memory", "wait")
    error = {
        "message": "no memory (wait)",
        "type": "internal_server_error",
        "param": None,
        "code": "insufficient_memory",
        "statusCode": 503,
    }
    told = streamed(TextDelta("Hel"), Failed(failure))
    assert told[-1] == {"type": "error", "error": error}
    assert "finish" not in [part["type"] for part in told]


def test_a_keepalive_is_a_comment() -> None:
    assert opened().keepalive() == b": keepalive\n\n"


def test_line_breaks_of_every_kind_stay_in_one_frame() -> None:
    text = "a\nb\r\nc\u2028d\x85e"
    (*_, frame) = opened().push(TextDelta(text))
    assert len(frame.decode().splitlines()) == 2  # the data and the empty line
    assert streamed(TextDelta(text))[-1]["delta"] == text


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", "invalid_request_error"),
        (400, "unsupported_field", "invalid_request_error"),
        (400, "context_length_exceeded", "invalid_request_error"),
        (400, "prefill_wait_exceeded", "invalid_request_error"),
        (400, "model_not_found", "model_not_found"),
        (401, "unauthorized", "authentication_error"),
        (403, "forbidden_host", "forbidden"),
        (404, "unknown", "not_found"),
        (413, "request_too_large", "invalid_request_error"),
        (422, "constraint_failed", "invalid_request_error"),
        (429, "too_many_requests", "rate_limit_exceeded"),
        (500, "inference_error", "internal_server_error"),
        (503, "insufficient_memory", "internal_server_error"),
        (503, "prefill_deadline_exceeded", "internal_server_error"),
    ],
)
def test_an_error(status: int, code: str, kind: str) -> None:
    assert gateway.error(Failure(status, code, "why", place="n")) == {
        "error": {"message": "why", "type": kind, "param": "n", "code": code}
    }


def told(path: str, card: Card = CARD) -> Any:
    (endpoint,) = [e for e in gateway.ENDPOINTS if e.path == path]
    assert isinstance(endpoint, Tell)
    assert endpoint.method == "GET"
    return endpoint.answer(None, context(card))


ENTRY = {
    "object": "model",
    "type": "language",
    "owned_by": "headrace",
    "released": 1_700_000_000,
    "context_window": 8192,
    "max_tokens": 2048,
    "tags": ["implicit-caching", "tool-use"],
    "pricing": {"input": "0", "output": "0"},
    "context_policy": {
        "configured_window": 8192,
        "model_window": 8192,
        "modes": {"text": 8192},
        "max_prefill_wait_seconds": None,
    },
}
EFFORTS = [{"type": "effort", "values": ["none", "low", "medium", "high", "xhigh", "max"]}]


def test_the_catalogue_names_the_model_and_its_adapters() -> None:
    card = replace(CARD, reasoning=False)
    assert told("/coding-agent/v1/models", card) == {
        "object": "list",
        "data": [
            {"id": MODEL, "name": "painted:1m", **ENTRY},
            {"id": f"{MODEL}+pirate", "name": "painted:1m+pirate", **ENTRY},
        ],
    }


def test_the_catalogue_tells_what_the_model_can() -> None:
    able = replace(CARD, vision=True, adapters=())
    (entry,) = told("/coding-agent/v1/models", able)["data"]
    assert entry["tags"] == ["implicit-caching", "tool-use", "reasoning", "vision"]
    assert entry["reasoning_options"] == EFFORTS


@pytest.mark.parametrize("window", [64, 512, 8192, 32_768, 1_000_000])
def test_the_catalogue_leaves_room_for_an_answer(window: int) -> None:
    """fx reserves room for a reply only where the reply's budget is strictly below the window."""
    entry = told("/coding-agent/v1/models", replace(CARD, context_window=window))["data"][0]
    assert entry["context_window"] == window
    assert entry["max_tokens"] == min(8192, window // 4)


@pytest.mark.parametrize("path", ["/coding-agent/v1/credits", "/v1/credits"])
def test_nothing_is_billed(path: str) -> None:
    assert told(path) == {"balance": "0", "total_used": "0"}


@pytest.mark.parametrize(("root", "version"), [("/v4", "v4"), ("/v3", "v3"), ("/v1", "v2")])
def test_the_models_of_the_client(root: str, version: str) -> None:
    models = told(f"{root}/ai/config")["models"]
    assert [model["id"] for model in models] == [MODEL, f"{MODEL}+pirate"]
    assert models[0] == {
        "id": MODEL,
        "name": "painted:1m",
        "description": "llama, served by headrace 0.0.1",
        "pricing": {"input": "0", "output": "0"},
        "specification": {
            "specificationVersion": version,
            "provider": "headrace",
            "modelId": MODEL,
        },
        "modelType": "language",
    }
