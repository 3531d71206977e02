"""Frames of a streamed response, and the object of a whole one."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.serve.events import (
    CallDelta,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reason,
    ReasoningDelta,
    Reply,
    TextDelta,
    Usage,
    collected,
)
from serve.dialects.responses import (
    FUNCTION,
    NAME,
    PATCH,
    STARTED,
    Json,
    called,
    opened,
    streamed,
)

ID = "ab" * 16
USAGE = Usage(7, 3, 5, 2)
USED: Json = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 12,
}
DONE = Finished("stop", USAGE)


def response(**fields: Any) -> Json:
    """The object of a request that says nothing but its input."""
    return {
        "id": f"resp_{ID}",
        "object": "response",
        "created_at": 1_700_000_123,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": NAME,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    } | fields


def message(index: int, text: str, status: str = "completed") -> Json:
    return {
        "id": f"msg_{ID}_{index}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": text}],
    }


def thought(index: int, text: str, status: str = "completed") -> Json:
    return {
        "id": f"rs_{ID}_{index}",
        "type": "reasoning",
        "status": status,
        "summary": [{"type": "summary_text", "text": text}],
        "encrypted_content": None,
    }


def call(call_id: str, arguments: str) -> Json:
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "status": "completed",
        "call_id": f"call_{call_id}",
        "name": "weather",
        "arguments": arguments,
    }


def test_every_frame_of_reasoning_an_answer_and_a_call() -> None:
    exchange = opened(stream=True, tools=[FUNCTION])
    assert exchange.stream
    assert exchange.media_type == "text/event-stream"
    events = [
        STARTED,
        ReasoningDelta("H"),
        ReasoningDelta("m"),
        TextDelta("So"),
        TextDelta("!"),
        *called(0, "x", "weather", '{"city":"Bern"}'),
        Finished("tool_calls", USAGE),
    ]
    rs: Json = {"item_id": f"rs_{ID}_0", "output_index": 0, "summary_index": 0}
    msg: Json = {"item_id": f"msg_{ID}_1", "output_index": 1, "content_index": 0}
    fc: Json = {"item_id": "fc_x", "output_index": 2}
    made = call("x", '{"city":"Bern"}')
    base = response(tools=[FUNCTION])
    output = [thought(0, "Hm"), message(1, "So!"), made]
    part: Json = {"type": "output_text", "annotations": [], "logprobs": []}
    summary: Json = {"type": "summary_text"}
    assert streamed(exchange, *events) == [
        {"type": "response.created", "response": base},
        {"type": "response.in_progress", "response": base},
        {"type": "response.output_item.added", "output_index": 0, "item": thought(0, "", "in_progress") | {"summary": []}},
        {"type": "response.reasoning_summary_part.added", **rs, "part": summary | {"text": ""}},
        {"type": "response.reasoning_summary_text.delta", **rs, "delta": "H"},
        {"type": "response.reasoning_summary_text.delta", **rs, "delta": "m"},
        {"type": "response.reasoning_summary_text.done", **rs, "text": "Hm"},
        {"type": "response.reasoning_summary_part.done", **rs, "part": summary | {"text": "Hm"}},
        {"type": "response.output_item.done", "output_index": 0, "item": output[0]},
        {"type": "response.output_item.added", "output_index": 1, "item": message(1, "", "in_progress") | {"content": []}},
        {"type": "response.content_part.added", **msg, "part": part | {"text": ""}},
        {"type": "response.output_text.delta", **msg, "delta": "So", "logprobs": []},
        {"type": "response.output_text.delta", **msg, "delta": "!", "logprobs": []},
        {"type": "response.output_text.done", **msg, "text": "So!", "logprobs": []},
        {"type": "response.content_part.done", **msg, "part": part | {"text": "So!"}},
        {"type": "response.output_item.done", "output_index": 1, "item": output[1]},
        {"type": "response.output_item.added", "output_index": 2, "item": made | {"status": "in_progress", "arguments": ""}},
        {"type": "response.function_call_arguments.delta", **fc, "delta": '{"city":"Bern"}'},
        {"type": "response.function_call_arguments.done", **fc, "arguments": '{"city":"Bern"}'},
        {"type": "response.output_item.done", "output_index": 2, "item": made},
        {"type": "response.completed", "response": base | {"status": "completed", "output": output, "usage": USED}},
    ]  # fmt: skip


def test_every_frame_of_a_freeform_call() -> None:
    events = [STARTED, *called(0, "x", "apply_patch", '{"input":"*** Begin\\n\\"ü\\""}'), DONE]
    told = streamed(opened(stream=True, tools=[PATCH]), *events)
    item: Json = {
        "id": "ctc_x",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_x",
        "name": "apply_patch",
        "input": '*** Begin\n"ü"',
    }
    place: Json = {"item_id": "ctc_x", "output_index": 0}
    assert told[2:-1] == [
        {"type": "response.output_item.added", "output_index": 0, "item": item | {"status": "in_progress", "input": ""}},
        {"type": "response.custom_tool_call_input.delta", **place, "delta": item["input"]},
        {"type": "response.custom_tool_call_input.done", **place, "input": item["input"]},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]  # fmt: skip
    assert told[-1]["response"]["output"] == [item]


def test_a_freeform_call_without_its_input_shows_what_the_model_wrote() -> None:
    told = streamed(opened(tools=[PATCH]), STARTED, *called(0, "x", "apply_patch", "{}"), DONE)
    assert told[-1]["response"]["output"][0]["input"] == "{}"


def test_a_member_of_a_namespace_is_called_by_both_names() -> None:
    space = {"type": "namespace", "name": "mcp__clock", "description": "Clocks.", "tools": [FUNCTION, PATCH]}  # fmt: skip
    events = [
        STARTED,
        *called(0, "x", "mcp__clock.weather", "{}"),
        *called(1, "y", "mcp__clock.apply_patch", '{"input":""}'),
        Finished("tool_calls", USAGE),
    ]
    output = streamed(opened(tools=[space]), *events)[-1]["response"]["output"]
    assert output == [
        call("x", "{}") | {"namespace": "mcp__clock"},
        {"id": "ctc_y", "type": "custom_tool_call", "status": "completed", "call_id": "call_y", "name": "apply_patch", "namespace": "mcp__clock", "input": ""},
    ]  # fmt: skip


def test_a_function_with_a_dot_in_its_name_is_no_namespace() -> None:
    events = [STARTED, *called(0, "x", "a.b", "{}"), DONE]
    item = streamed(opened(tools=[FUNCTION | {"name": "a.b"}]), *events)[-1]["response"]["output"][
        0
    ]
    assert item == call("x", "{}") | {"name": "a.b"}


def test_parallel_calls_have_indices_and_ids_of_their_own() -> None:
    events = [
        STARTED,
        *called(0, "x", "weather", "{}"),
        TextDelta("\n"),
        *called(1, "y", "weather", '{"city":"a"}'),
        Finished("tool_calls", USAGE),
    ]
    told = streamed(opened(tools=[FUNCTION]), *events)
    done = [data["item"] for data in told if data["type"] == "response.output_item.done"]
    assert done == [call("x", "{}"), message(1, "\n"), call("y", '{"city":"a"}')]
    assert told[-1]["response"]["output"] == done
    indices = [
        data["output_index"] for data in told if data["type"] == "response.output_item.added"
    ]
    assert indices == [0, 1, 2]


def test_a_call_is_told_only_when_it_is_complete() -> None:
    exchange = opened(tools=[FUNCTION])
    began = [CallStarted(0, "x", "weather"), CallDelta(0, '{"city":')]
    assert len(streamed(exchange, STARTED, *began)) == 2


def test_thinking_followed_by_a_call_closes_the_thought_first() -> None:
    events = [STARTED, ReasoningDelta("Hm"), *called(0, "x", "weather", "{}"), DONE]
    told = streamed(opened(tools=[FUNCTION]), *events)
    kinds = [(data["type"], data["output_index"]) for data in told if "output_item" in data["type"]]
    assert kinds == [
        ("response.output_item.added", 0),
        ("response.output_item.done", 0),
        ("response.output_item.added", 1),
        ("response.output_item.done", 1),
    ]


@pytest.mark.parametrize("reason", ["length", "context"])
@pytest.mark.parametrize(
    ("events", "output"),
    [
        ([TextDelta("So")], [message(0, "So", "incomplete")]),
        ([ReasoningDelta("Hm")], [thought(0, "Hm", "incomplete")]),
        ([ReasoningDelta("Hm"), TextDelta("So")], [thought(0, "Hm"), message(1, "So", "incomplete")]),
        ([CallStarted(0, "x", "weather"), CallDelta(0, "{")], []),
        ([], []),
    ],
)  # fmt: skip
def test_a_cut_answer_is_incomplete(
    reason: Reason, events: list[Event], output: list[Json]
) -> None:
    every = [STARTED, *events, Finished(reason, USAGE)]
    last = streamed(opened(tools=[FUNCTION]), *every)[-1]
    assert last == {
        "type": "response.incomplete",
        "response": response(
            tools=[FUNCTION],
            status="incomplete",
            incomplete_details={"reason": "max_output_tokens"},
            output=output,
            usage=USED,
        ),
    }
    reply = collected(every)
    assert isinstance(reply, Reply)
    assert opened(tools=[FUNCTION]).whole(reply) == last["response"]


def test_a_cut_behind_a_complete_call_completes() -> None:
    cut = [CallStarted(1, "y", "weather"), CallDelta(1, "{")]
    every = [STARTED, *called(0, "x", "weather", "{}"), *cut, Finished("length", USAGE)]
    last = streamed(opened(tools=[FUNCTION]), *every)[-1]
    assert last["type"] == "response.completed"
    assert last["response"]["status"] == "completed"
    assert last["response"]["incomplete_details"] is None
    assert last["response"]["output"] == [call("x", "{}")]
    reply = collected(every)
    assert isinstance(reply, Reply)
    assert opened(tools=[FUNCTION]).whole(reply) == last["response"]


@pytest.mark.parametrize("reason", ["stop", "stop_sequence", "tool_calls"])
def test_an_answer_that_ended_by_itself_completes(reason: Reason) -> None:
    told = streamed(opened(), STARTED, TextDelta("So"), Finished(reason, USAGE))
    completed = response(status="completed", output=[message(0, "So")], usage=USED)
    assert told[-1] == {"type": "response.completed", "response": completed}


def test_a_whole_response_is_what_a_stream_ends_with() -> None:
    events = [
        STARTED,
        ReasoningDelta("Hm"),
        TextDelta("So"),
        *called(0, "x", "weather", "{}"),
        *called(1, "y", "weather", "{}"),
        Finished("tool_calls", USAGE),
    ]
    reply = collected(events)
    assert isinstance(reply, Reply)
    exchange = opened(tools=[FUNCTION])
    assert not exchange.stream
    whole = exchange.whole(reply)
    assert whole == streamed(opened(tools=[FUNCTION]), *events)[-1]["response"]
    assert whole["output"] == [thought(0, "Hm"), message(1, "So"), call("x", "{}"), call("y", "{}")]


def test_an_answer_without_a_word_has_no_items() -> None:
    assert opened().whole(Reply("stop", USAGE))["output"] == []


def test_a_failure_in_mid_stream_ends_the_stream() -> None:
    failed = Failed(Failure(503, "insufficient_memory", "no memory", "try again"))
    told = streamed(opened(), STARTED, ReasoningDelta("Hm"), TextDelta("So"), failed)
    output = [thought(0, "Hm"), message(1, "So", "incomplete")]
    error = {"code": "insufficient_memory", "message": "no memory (try again)"}
    assert told[-1] == {
        "type": "response.failed",
        "response": response(status="failed", error=error, output=output),
    }
    assert [data["type"] for data in told].count("response.output_item.done") == 1


def test_keepalive_is_an_event_with_a_number_of_its_own() -> None:
    exchange = opened()
    before = list(exchange.push(STARTED))
    alive = exchange.keepalive().decode()
    assert alive.startswith(
        'event: response.in_progress\ndata: {"type":"response.in_progress","sequence_number":2,'
    )
    after = b"".join(exchange.push(DONE)).decode()
    assert len(before) == 2
    assert '"sequence_number":3' in after


def test_a_response_repeats_its_request() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    sent: Json = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "service_tier": "auto",
        "temperature": 0.5,
        "text": {"format": schema, "verbosity": "low"},
        "tool_choice": {"type": "function", "name": "weather"},
        "tools": [FUNCTION, PATCH, {"type": "web_search", "external_web_access": True}],
        "top_p": 0.25,
        "user": "me",
    }
    whole = opened(**sent).whole(Reply("stop", USAGE))
    assert whole == response(status="completed", usage=USED) | sent
