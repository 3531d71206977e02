"""Chat completions: whole replies, streams, errors and the list of models, as exact frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.serve.dialect import Generate, Tell
from headrace.serve.dialects import openai_chat
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
)
from headrace.serve.failure import UnknownNameError
from headrace.serve.request import Text, ToolCall
from serve.dialects.chat import HEAD, MODEL, chunk, context, exchange, frames
from serve.scripted import CARD

USAGE = Usage(prompt_tokens=10, cached_tokens=4, new_tokens=6, reasoning_tokens=2)
TOLD = {
    "prompt_tokens": 10,
    "completion_tokens": 6,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
REASONS: list[tuple[Reason, str]] = [
    ("stop", "stop"),
    ("stop_sequence", "stop"),
    ("tool_calls", "tool_calls"),
    ("length", "length"),
    ("context", "length"),
]
BROKEN = Failure(500, "inference_error", "it broke", "try again")
BROKEN_TOLD = {
    "error": {
        "message": "it broke (try again)",
        "type": "server_error",
        "param": None,
        "code": "inference_error",
    }
}


def streamed(*events: Event, usage: bool = False) -> list[Any]:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    return frames(exchange(stream=True, **options), *events)


def started(index: int, call_id: str, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    call = {"index": index, "id": call_id, "type": "function", "function": function}
    return chunk({"tool_calls": [call]})


def piece(index: int, fragment: str) -> dict[str, Any]:
    return chunk({"tool_calls": [{"index": index, "function": {"arguments": fragment}}]})


def test_a_whole_reply() -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hi", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert exchange().whole(Reply("stop", USAGE, (Text("Hi"),))) == {
        **HEAD,
        "object": "chat.completion",
        "choices": [choice],
        "usage": TOLD,
    }


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply("stop", USAGE), {"content": ""}),
        (Reply("stop", USAGE, (Reasoning("Hm."), Text("Hi"))), {"content": "Hi", "reasoning_content": "Hm."}),
        (Reply("length", USAGE, (Reasoning("Hm."),)), {"content": "", "reasoning_content": "Hm."}),
        (
            Reply("tool_calls", USAGE, (ToolCall("a", "f", "{}"),)),
            {
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_a",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    }
                ],
            },
        ),
        (
            Reply(
                "tool_calls", USAGE, (Text("So."), ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))
            ),
            {
                "content": "So.",
                "tool_calls": [
                    {"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    for i in ("call_a", "call_b")
                ],
            },
        ),
    ],
)  # fmt: skip
def test_the_message_of_a_whole_reply(reply: Reply, message: dict[str, Any]) -> None:
    told = exchange().whole(reply)["choices"][0]
    assert told["message"] == {"role": "assistant", "refusal": None, **message}


@pytest.mark.parametrize(("reason", "told"), REASONS)
def test_the_finish_reason_of_a_whole_reply(reason: Reason, told: str) -> None:
    assert (
        exchange().whole(Reply(reason, USAGE, (Text("Hi"),)))["choices"][0]["finish_reason"] == told
    )


@pytest.mark.parametrize(("reason", "told"), REASONS)
def test_the_finish_reason_has_a_chunk_of_its_own(reason: Reason, told: str) -> None:
    assert streamed(Finished(reason, USAGE)) == [chunk({}, told), "[DONE]"]


def test_a_streamed_answer_has_its_role_once_and_one_identity() -> None:
    sent = streamed(Started(10, 4), TextDelta("Hel"), TextDelta("lo"), Finished("stop", USAGE))
    assert sent == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}),
        chunk({}, "stop"),
        "[DONE]",
    ]


def test_usage_has_a_chunk_of_its_own_without_choices() -> None:
    sent = streamed(Started(10, 4), TextDelta("Hi"), Finished("stop", USAGE), usage=True)
    assert sent[2:] == [
        chunk({}, "stop"),
        {**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": TOLD},
        "[DONE]",
    ]
    assert [frame for frame in sent[:3] if "usage" in frame] == []


def test_usage_is_not_told_unasked() -> None:
    sent = streamed(Started(10, 4), TextDelta("Hi"), Finished("stop", USAGE))
    assert [frame for frame in sent if "usage" in frame] == []


def test_reasoning_is_streamed_beside_the_answer() -> None:
    sent = streamed(ReasoningDelta("Hm"), ReasoningDelta("m."), TextDelta("So"))
    assert sent == [
        chunk({"reasoning_content": "Hm"}),
        chunk({"reasoning_content": "m."}),
        chunk({"content": "So"}),
    ]


def test_parallel_calls_have_indices_and_ids_of_their_own() -> None:
    sent = streamed(
        CallStarted(0, "a", "f"),
        CallDelta(0, '{"x":'),
        CallDelta(0, "1}"),
        CallEnded(0, '{"x":1}'),
        CallStarted(1, "b", "f"),
        CallDelta(1, "{}"),
        CallEnded(1, "{}"),
        Finished("tool_calls", USAGE),
    )
    assert sent == [
        started(0, "call_a", "f"),
        piece(0, '{"x":'),
        piece(0, "1}"),
        started(1, "call_b", "f"),
        piece(1, "{}"),
        chunk({}, "tool_calls"),
        "[DONE]",
    ]


def test_a_long_argument_is_streamed_in_the_pieces_that_came() -> None:
    pieces = ['{"text":"', *(f"line {i}\\n" for i in range(50)), '"}']
    sent = streamed(CallStarted(0, "a", "f"), *(CallDelta(0, text) for text in pieces))
    assert sent[1:] == [piece(0, text) for text in pieces]


def test_a_call_cut_by_the_budget_ends_with_length_usage_and_done() -> None:
    sent = streamed(
        Started(10, 4),
        CallStarted(0, "a", "f"),
        CallDelta(0, '{"text":"onc'),
        Finished("length", USAGE),
        usage=True,
    )
    assert sent == [
        chunk({"role": "assistant", "content": ""}),
        started(0, "call_a", "f"),
        piece(0, '{"text":"onc'),
        chunk({}, "length"),
        {**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": TOLD},
        "[DONE]",
    ]


@pytest.mark.parametrize("usage", [False, True])
def test_a_failure_in_mid_stream_is_an_error_and_the_last_frame(usage: bool) -> None:
    sent = streamed(Started(10, 4), TextDelta("Hi"), Failed(BROKEN), usage=usage)
    assert sent[-1] == BROKEN_TOLD
    assert len(sent) == 3


def test_a_line_separator_in_an_answer_breaks_no_frame() -> None:
    text = "a\u2028b\x85c\nd"
    (frame,) = exchange(stream=True).push(TextDelta(text))
    assert len(frame.decode().strip().splitlines()) == 1
    assert streamed(TextDelta(text)) == [chunk({"content": text})]


def test_silence_is_filled_with_a_comment() -> None:
    assert exchange(stream=True).keepalive() == b": keepalive\n\n"


def test_an_adapters_name_is_repeated() -> None:
    name = f"{MODEL}+pirate"
    assert exchange(model=name).whole(Reply("stop", USAGE, "Arr"))["model"] == name


@pytest.mark.parametrize(
    ("failure", "kind", "param"),
    [
        (Failure(400, "invalid_request", "no"), "invalid_request_error", None),
        (Failure(400, "context_length_exceeded", "no"), "invalid_request_error", "messages"),
        (Failure(400, "prefill_wait_exceeded", "no"), "invalid_request_error", "messages"),
        (Failure(400, "unsupported_image", "no"), "invalid_request_error", "messages"),
        (Failure(400, "schema_unsupported", "no"), "invalid_request_error", "response_format"),
        (Failure(400, "schema_unsupported", "no", place="tools"), "invalid_request_error", "tools"),
        (Failure(404, "model_not_found", "no"), "invalid_request_error", None),
        (Failure(413, "request_too_large", "no"), "invalid_request_error", None),
        (Failure(500, "inference_error", "no"), "server_error", None),
        (Failure(503, "insufficient_memory", "no"), "server_error", None),
        (Failure(503, "prefill_deadline_exceeded", "no"), "server_error", None),
    ],
)
def test_an_error(failure: Failure, kind: str, param: str | None) -> None:
    told = {"message": "no", "type": kind, "param": param, "code": failure.code}
    assert openai_chat.error(failure) == {"error": told}


def test_an_errors_hint_is_told() -> None:
    assert openai_chat.error(BROKEN) == BROKEN_TOLD


def listed(name: str, window: int = 8192, limit: int = 2048) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headrace",
        "type": "model",
        "display_name": name,
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": window,
        "max_tokens": limit,
        "context_window": window,
        "max_output_tokens": limit,
        "input_modalities": ["text"],
        "context_policy": {
            "configured_window": window,
            "model_window": 8192,
            "modes": {"text": window},
            "max_prefill_wait_seconds": None,
        },
    }


def test_the_list_of_models_has_every_name_that_is_served() -> None:
    data = [listed("painted:1m"), listed("painted:1m+pirate")]
    ends = {"has_more": False, "first_id": "painted:1m", "last_id": "painted:1m+pirate"}
    told = openai_chat.models(None, context())
    assert told == {"object": "list", "data": data, **ends}


def test_an_error_says_where_in_the_body() -> None:
    failure = Failure(400, "unsupported_field", "unknown field n", place="n")
    assert openai_chat.error(failure)["error"]["param"] == "n"


@pytest.mark.parametrize("name", CARD.names)
def test_one_model(name: str) -> None:
    assert openai_chat.model(None, context(path={"name": name})) == listed(name)


def test_a_model_is_told_with_the_window_that_is_served() -> None:
    card = replace(CARD, context_window=400)
    assert openai_chat.model(None, context(card, path={"name": MODEL})) == listed(MODEL, 400, 100)


def test_a_model_that_reads_pictures_says_so() -> None:
    card = replace(CARD, vision=True)
    told = openai_chat.model(None, context(card, path={"name": MODEL}))
    assert told["input_modalities"] == ["text", "image"]


def test_a_model_that_is_not_served_is_not_found() -> None:
    with pytest.raises(UnknownNameError) as caught:
        openai_chat.model(None, context(path={"name": "gpt-4o"}))
    assert (caught.value.status, caught.value.cause) == (404, "model_not_found")


def test_the_endpoints() -> None:
    kinds = [(type(e), e.method, e.path) for e in openai_chat.ENDPOINTS]
    assert kinds == [
        (Generate, "POST", "/v1/chat/completions"),
        (Tell, "GET", "/v1/models"),
        (Tell, "GET", "/v1/models/{name:path}"),
    ]
