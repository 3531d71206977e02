"""Messages, tools and results of tools of Ollama's chats. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.serve.request import Json, Text, ToolCall, Turn
from headrace.values import Tool
from serve.dialects.ollama_asked import ASKED, CHAT, HELLO, PNG64, RED, asked, chat, refused


def test_content_may_be_parts() -> None:
    url = f"data:image/png;base64,{PNG64}"
    content = [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": "?"},
    ]
    assert chat({"role": "user", "content": content}).turns == (
        Turn("user", (Text("Look: "), RED, RED, Text("?"))),
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([{"type": "audio", "data": ""}], "content"),
        ([{"type": "text"}], "text is missing"),
        ([{"type": "image_url", "image_url": "https://example.com/"}], "only inline images"),
        (3, "content"),
    ],
)
def test_content_is_refused(content: Any, said: str) -> None:
    refused(said, CHAT, messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "assistant", "content": "", "images": [PNG64]}, "images"),
        ({"role": "system", "content": "", "images": [PNG64]}, "images"),
        ({"role": "user", "content": "", "thinking": "x"}, "thinking"),
        ({"role": "user", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "tool_calls"),
        ({"role": "user", "content": "", "tool_name": "f"}, "tool_name"),
        ({"role": "assistant", "content": "", "tool_call_id": "f"}, "tool_call_id"),
    ],
)  # fmt: skip
def test_what_a_role_does_not_have_is_refused(message: Json, place: str) -> None:
    error = refused(rf"messages\[0\].{place} is not for role", CHAT, messages=[message, HELLO])
    assert error.place == f"messages[0].{place}"


def test_an_image_part_of_the_assistant_is_refused() -> None:
    part = {"type": "image_url", "image_url": f"data:;base64,{PNG64}"}
    refused("has an image", CHAT, messages=[{"role": "assistant", "content": [part]}, HELLO])


@pytest.mark.parametrize("role", ["developer", "function", "", None])
def test_a_role_is_refused(role: Any) -> None:
    refused("role", CHAT, messages=[{"role": role, "content": "x"}])


def test_a_conversation() -> None:
    request = chat(
        {"role": "system", "content": "Be brief."},
        HELLO,
        {"role": "assistant", "content": "Hi", "thinking": "A greeting.", "images": []},
        {"role": "user", "content": "One"},
        {"role": "user", "content": "Two"},
    )
    assert request.turns == (
        Turn("system", (Text("Be brief."),)),
        ASKED,
        Turn("assistant", (Text("Hi"),), "A greeting."),
        Turn("user", (Text("One"), Text("\n\n"), Text("Two"))),
    )


def test_a_conversation_that_ends_with_an_answer_is_refused() -> None:
    refused("nothing is asked", CHAT, messages=[HELLO, {"role": "assistant", "content": "Hi"}])


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_tools() -> None:
    bare = {"function": {"name": "now"}}
    strict = {"function": {"name": "tell", "strict": True, "parameters": {}}}
    assert asked(CHAT, tools=[WEATHER, bare, strict]).tools == (
        Tool("weather", "Tells it.", WEATHER["function"]["parameters"]),
        Tool("now"),
        Tool("tell", strict=True),
    )


def test_types_that_the_sdk_joins_are_a_list() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "type": {"type": "string, integer", "enum": [{"type": "a, b"}]},
            "many": {"type": "array", "items": {"anyOf": [{"type": "number, boolean"}]}},
        },
    }
    tools = [{"function": {"name": "f", "parameters": parameters}}]
    assert asked(CHAT, tools=tools).tools[0].parameters["properties"] == {
        "type": {"type": ["integer", "string"], "enum": [{"type": "a, b"}]},
        "many": {"type": "array", "items": {"anyOf": [{"type": ["boolean", "number"]}]}},
    }


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([WEATHER, WEATHER], r"tools\[1\].function.name: two tools are called 'weather'"),
        ([{"type": "web_search", "function": {"name": "f"}}], r"tools\[0\].type"),
        ([{"type": "function"}], r"tools\[0\].function is missing"),
        ([{"function": {"name": ""}}], r"tools\[0\].function.name"),
        ([{"function": {"name": "f", "parameters": []}}], r"tools\[0\].function.parameters"),
        ([{"function": {"name": "f", "extra": 1}}], r"unknown field tools\[0\].function.extra"),
        ({}, "tools"),
    ],
)
def test_tools_are_refused(tools: Any, said: str) -> None:
    refused(said, CHAT, tools=tools)


def call(name: str, call_id: str | None = None, **arguments: Any) -> Json:
    """As the server told it, or as the SDK gives it back: without an id."""
    function = {"name": name, "arguments": arguments}
    if call_id is None:
        return {"function": function}
    return {"id": call_id, "function": {"index": 0, **function}}


def replayed(calls: list[Json], *results: Json) -> tuple[Turn, ...]:
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    return chat(HELLO, said, *({"role": "tool", **result} for result in results)).turns[1:]


def test_results_are_matched_by_id() -> None:
    calls = [call("f", "call_a", x=1), call("f", "call_b", x="é")]
    turns = replayed(
        calls,
        {"tool_call_id": "call_b", "content": "B"},
        {"tool_call_id": "call_a", "tool_name": "f", "content": "A"},
    )
    own = ToolCall("call_a", "f", '{"x": 1}'), ToolCall("call_b", "f", '{"x": "é"}')
    assert turns == (
        Turn("assistant", calls=own),
        Turn("tool", (Text("A"),), call_id="call_a", tool_name="f"),
        Turn("tool", (Text("B"),), call_id="call_b", tool_name="f"),
    )


def test_results_without_ids_are_matched_by_name() -> None:
    turns = replayed(
        [call("f"), call("g"), call("f")],
        {"tool_name": "g", "content": "G"},
        {"tool_name": "f", "content": "first"},
        {"tool_name": "f", "content": "second"},
    )
    assert [turn.text for turn in turns[1:]] == ["first", "G", "second"]
    assert [turn.call_id for turn in turns[1:]] == [c.id for c in turns[0].calls]
    assert [c.id for c in turns[0].calls] == ["call_1_0", "call_1_1", "call_1_2"]


def test_results_without_ids_and_names_are_in_order() -> None:
    turns = replayed([call("f"), call("g")], {"content": "F"}, {"content": "G"})
    assert [(turn.tool_name, turn.text) for turn in turns[1:]] == [("f", "F"), ("g", "G")]


def test_an_id_that_only_the_result_kept_is_not_looked_for() -> None:
    turns = replayed(
        [call("f"), call("g")],
        {"tool_call_id": "call_y", "tool_name": "g", "content": "G"},
        {"tool_call_id": "call_x", "tool_name": "f", "content": "F"},
    )
    assert [turn.text for turn in turns[1:]] == ["F", "G"]


def test_results_by_name_and_by_place_may_be_mixed() -> None:
    turns = replayed(
        [call("f"), call("f"), call("g")],
        {"content": "F"},
        {"tool_name": "g", "content": "G"},
        {"tool_name": "f", "content": "F again"},
    )
    assert [turn.text for turn in turns[1:]] == ["F", "F again", "G"]


def test_a_result_may_have_a_picture() -> None:
    turns = replayed([call("f")], {"content": "", "images": [PNG64]})
    assert turns[1].parts == (RED,)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([], "tool calls without a result"),
        ([{"tool_call_id": "call_a"}], "tool calls without a result: 'call_b'"),
        (
            [{"tool_call_id": "call_c"}],
            r"messages\[2\]: the tool result answers, by its id, no open call",
        ),
        (
            [{"tool_call_id": "call_a"}, {"tool_call_id": "call_a"}],
            r"messages\[3\]: .* by its id, no open call",
        ),
        ([{"tool_name": "h"}], "by its name, no open call"),
        ([{}, {}, {}], r"messages\[4\]: .* by its place, no open call"),
    ],
)
def test_results_are_refused(results: list[Json], said: str) -> None:
    calls = [call("f", "call_a"), call("g", "call_b")]
    messages = [HELLO, {"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "x", **result} for result in results]
    refused(said, CHAT, messages=messages)


def test_a_result_without_a_call_is_refused() -> None:
    refused("by its place, no open call", CHAT, messages=[HELLO, {"role": "tool", "content": "x"}])


@pytest.mark.parametrize("arguments", ["{}", None, []])
def test_arguments_are_an_object(arguments: Any) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    refused("arguments", CHAT, messages=[HELLO, {"role": "assistant", "tool_calls": calls}])


def test_a_number_out_of_range_in_arguments_is_refused() -> None:
    calls = [call("f", x=float("inf"))]
    refused("out of range", CHAT, messages=[HELLO, {"role": "assistant", "tool_calls": calls}])
