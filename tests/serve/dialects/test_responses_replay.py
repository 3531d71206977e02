"""A response's output is accepted as the next request's input, as clients replay it, and says what was said."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from headrace.serve.events import (
    Event,
    Finished,
    ReasoningDelta,
    Reply,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.request import Text, ToolCall, Turn
from serve.dialects.responses import (
    FUNCTION,
    PATCH,
    STARTED,
    Json,
    asked,
    called,
    opened,
    streamed,
)

SPACE: Json = {"type": "namespace", "name": "n", "tools": [FUNCTION]}
TOOLS = [FUNCTION, PATCH, SPACE]
HELLO: Json = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
AGAIN: Json = {"role": "user", "content": "Again"}
BETWEEN: list[Event] = [
    STARTED,
    ReasoningDelta("Hm"),
    TextDelta("Let me see."),
    *called(0, "x", "weather", '{"city":"Bern"}'),
    TextDelta("\n"),
    *called(1, "y", "apply_patch", '{"input":"+1"}'),
    TextDelta("\n"),
    *called(2, "z", "n.weather", "{}"),
    Finished("tool_calls", Usage()),
]
OUTPUTS: list[Json] = [
    {"type": "function_call_output", "call_id": "call_x", "output": "rain"},
    {"type": "custom_tool_call_output", "call_id": "call_y", "output": "ok", "name": "apply_patch"},
    {"type": "function_call_output", "call_id": "call_z", "output": [{"type": "input_text", "text": "sun"}]},
]  # fmt: skip
ASSISTANT = Turn(
    "assistant",
    (Text("Let me see."),),
    reasoning="Hm",
    calls=(
        ToolCall("call_x", "weather", '{"city":"Bern"}'),
        ToolCall("call_y", "apply_patch", '{"input":"+1"}'),
        ToolCall("call_z", "n.weather", "{}"),
    ),
)
RESULTS = (
    Turn("tool", (Text("rain"),), call_id="call_x"),
    Turn("tool", (Text("ok"),), call_id="call_y"),
    Turn("tool", (Text("sun"),), call_id="call_z"),
)
USER = Turn("user", (Text("Hi"),))


def output(*events: Event) -> list[Any]:
    """The items of a streamed response."""
    items = streamed(opened(tools=TOOLS, stream=True), *events)[-1]["response"]["output"]
    assert isinstance(items, list)
    return items


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_messages_between_parallel_calls_are_accepted(order: tuple[int, ...]) -> None:
    items = output(*BETWEEN)
    assert [item["type"] for item in items] == [
        "reasoning",
        "message",
        "function_call",
        "message",
        "custom_tool_call",
        "message",
        "function_call",
    ]
    replayed = [HELLO, *items, *(OUTPUTS[i] for i in order)]
    assert asked(tools=TOOLS, input=replayed).turns == (USER, ASSISTANT, *RESULTS)


def test_a_whole_response_is_accepted() -> None:
    reply = collected(BETWEEN)
    assert isinstance(reply, Reply)
    items = opened(tools=TOOLS).whole(reply)["output"]
    turns = asked(tools=TOOLS, input=[HELLO, *items, *OUTPUTS]).turns
    assert items == output(*BETWEEN)
    assert turns == (USER, ASSISTANT, *RESULTS)


def test_results_may_stand_behind_their_calls() -> None:
    items = output(*BETWEEN)
    replayed = [HELLO, *items[:3], OUTPUTS[0], *items[3:5], OUTPUTS[1], *items[5:], OUTPUTS[2]]
    first, second, third = (Turn("assistant", calls=(call,)) for call in ASSISTANT.calls)
    first = Turn("assistant", (Text("Let me see."),), "Hm", first.calls)
    one, two, three = RESULTS
    assert asked(tools=TOOLS, input=replayed).turns == (USER, first, one, second, two, third, three)


def test_a_cut_answer_is_accepted() -> None:
    for events in ([TextDelta("So")], [ReasoningDelta("Hm")], []):
        items = output(STARTED, *events, Finished("length", Usage()))
        asked(input=[HELLO, *items, AGAIN])


def test_a_client_that_omits_reasoning_is_served() -> None:
    items = [item for item in output(*BETWEEN) if item["type"] != "reasoning"]
    turns = asked(tools=TOOLS, input=[HELLO, *items, *OUTPUTS]).turns
    assert turns[1] == Turn("assistant", ASSISTANT.parts, calls=ASSISTANT.calls)


def test_tools_of_a_history_need_not_be_declared_any_more() -> None:
    assert asked(input=[HELLO, *output(*BETWEEN), *OUTPUTS]).turns[1] == ASSISTANT


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"id": "rs_1", "summary": []}, ""),
        ({"summary": [], "content": None, "encrypted_content": None, "status": None}, ""),
        ({"summary": None, "encrypted_content": ""}, ""),
        ({"summary": [{"type": "summary_text", "text": "A"}, {"type": "summary_text", "text": "B"}]}, "A\n\nB"),
        ({"summary": [{"type": "summary_text", "text": "A"}], "content": [{"type": "reasoning_text", "text": "All"}]}, "All"),
        ({"summary": [], "content": [{"type": "text", "text": "All"}], "internal_chat_message_metadata_passthrough": {"turn_id": "t"}}, "All"),
    ],
    ids=str,
)  # fmt: skip
def test_reasoning_items(item: Json, reasoning: str) -> None:
    answer = {"type": "message", "role": "assistant", "content": "Hello"}
    turns = asked(input=[HELLO, {"type": "reasoning", **item}, answer, AGAIN]).turns
    assert turns[1] == Turn("assistant", (Text("Hello"),), reasoning)


def test_fields_that_clients_add_to_items_are_accepted() -> None:
    added = {
        "id": "x_1",
        "status": "completed",
        "caller": {"type": "direct"},
        "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
    }
    message = {
        "type": "message",
        "role": "assistant",
        "phase": "commentary",
        "end_turn": False,
        "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": [], "parsed": None}],
    }  # fmt: skip
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}", "namespace": None, "parsed_arguments": {}, "async": False}  # fmt: skip
    result = {"type": "function_call_output", "call_id": "x", "output": "1"}
    items = [HELLO, *(item | added for item in (message, call, result))]
    assert asked(input=items).turns == (
        USER,
        Turn("assistant", (Text("So"),), calls=(ToolCall("x", "f", "{}"),)),
        Turn("tool", (Text("1"),), call_id="x"),
    )


def test_arguments_that_are_missing_are_none() -> None:
    call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": ""}
    result = {"type": "function_call_output", "call_id": "x", "output": ""}
    turns = asked(input=[HELLO, call, result]).turns
    assert turns[1:] == (
        Turn("assistant", calls=(ToolCall("x", "f", "{}"),)),
        Turn("tool", call_id="x"),
    )


def test_arguments_with_a_key_twice_are_replayed_as_they_were() -> None:
    events = [STARTED, *called(0, "x", "weather", '{"a":1,"a":2}'), Finished("tool_calls", Usage())]
    turns = asked(input=[HELLO, *output(*events), OUTPUTS[0]]).turns
    assert turns[1].calls == (ToolCall("call_x", "weather", '{"a":1,"a":2}'),)


@pytest.mark.parametrize("by", ["function_call_output", "local_shell_call_output"])
def test_a_shell_call_of_another_model_is_read_as_a_call(by: str) -> None:
    action = {"type": "exec", "command": ["ls"]}
    call = {"type": "local_shell_call", "call_id": "x", "status": "completed", "action": action}
    result = {"type": by, "id": "x", "output": "README"}
    if by == "function_call_output":
        result["call_id"] = "x"
    assert asked(input=[HELLO, call, result]).turns[1:] == (
        Turn(
            "assistant", calls=(ToolCall("x", "local_shell", '{"type":"exec","command":["ls"]}'),)
        ),
        Turn("tool", (Text("README"),), call_id="x"),
    )


@pytest.mark.parametrize(
    "kind",
    ["web_search_call", "file_search_call", "image_generation_call", "tool_search_call", "tool_search_output"],
)  # fmt: skip
def test_records_of_hosted_tools_are_passed_over(kind: str) -> None:
    item = {"type": kind, "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    answer = {"type": "message", "role": "assistant", "content": "Hello"}
    assert asked(input=[HELLO, item, answer, AGAIN]) == asked(input=[HELLO, answer, AGAIN])


def test_a_turn_of_codex() -> None:
    """Its own context messages come after its instructions, and again in mid-conversation."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        HELLO,
        *output(*BETWEEN),
        *OUTPUTS,
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<mode>"}]},
    ]  # fmt: skip
    request = asked(
        instructions="You are Codex.",
        input=items,
        tools=[*TOOLS, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="thread",
        text={"verbosity": "medium"},
        client_metadata={"x-codex-installation-id": "1"},
    )
    assert request.effort == "medium"
    assert request.turns == (
        Turn("system", (Text("You are Codex.\n\n<permissions>"),)),
        Turn("user", (Text("<environment>"), Text("\n\n"), Text("Hi"))),
        ASSISTANT,
        *RESULTS,
        Turn("user", (Text("<mode>"),)),
    )
