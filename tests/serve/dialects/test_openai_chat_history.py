"""Chat completions: conversations as clients send them."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headrace.serve.events import Reasoning, Reply, Usage
from headrace.serve.failure import RequestError
from headrace.serve.request import Image, Text, ToolCall, Turn
from serve.dialects.chat import USER, asked, called, exchange, result

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
HELLO = Turn("user", (Text("Hello"),))
HERMES = {"effect_disposition": "x", "display_kind": None, "display_metadata": {"a": 1}}


def turns(*messages: dict[str, Any]) -> tuple[Turn, ...]:
    return asked(messages=list(messages)).turns


def text(of: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": of}]


def test_instructions_of_both_roles_are_one_in_their_order() -> None:
    system, developer = {"role": "system", "content": "A"}, {"role": "developer", "content": "B"}
    assert turns(system, developer, USER) == (Turn("system", (Text("A\n\nB"),)), HELLO)
    assert turns(developer, system, USER) == (Turn("system", (Text("B\n\nA"),)), HELLO)


def test_a_later_instruction_becomes_the_users() -> None:
    late = {"role": "system", "content": "Be brief."}
    assert turns(USER, {"role": "assistant", "content": "Hi"}, late) == (
        HELLO,
        Turn("assistant", (Text("Hi"),)),
        Turn("user", (Text("Be brief."),)),
    )


def test_a_first_line_that_always_changes_is_left_out() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.270.abc; cch=00000;"
    for content in (f"{header}\nA", [*text(header), *text("A")]):
        system = {"role": "system", "content": content}
        assert turns(system, USER) == (Turn("system", (Text("A"),)), HELLO)


def test_content_may_be_parts() -> None:
    said = {"role": "assistant", "content": [*text("Hi"), {"type": "refusal", "refusal": "No."}]}
    assert turns(
        {"role": "system", "content": text("A")},
        {"role": "user", "content": [*text("Hello"), *text(" there")], "name": "Ann"},
        said,
        {"role": "user", "content": "Well?"},
    ) == (
        Turn("system", (Text("A"),)),
        Turn("user", (Text("Hello"), Text(" there"))),
        Turn("assistant", (Text("Hi"), Text("No."))),
        Turn("user", (Text("Well?"),)),
    )


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert turns(USER, USER) == (Turn("user", (Text("Hello"), Text("\n\n"), Text("Hello"))),)


def test_a_picture_is_taken_inline() -> None:
    picture = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    user = {"role": "user", "content": [picture, *text("What is it?")]}
    assert turns(user) == (Turn("user", (Image(PNG, "image/png"), Text("What is it?"))),)


@pytest.mark.parametrize(
    "url", ["http://a.example/b.png", "https://a.example/b.png", "file:///etc/passwd", "b.png"]
)
def test_a_picture_from_elsewhere_is_refused(url: str) -> None:
    user = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with pytest.raises(RequestError, match="inline"):
        turns(user)


def test_reasoning_is_replayed() -> None:
    said = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}
    assert turns(USER, said, USER)[1] == Turn("assistant", (Text("Hi"),), reasoning="Hm.")


def test_results_are_paired_by_id_and_take_the_order_of_their_calls() -> None:
    got = turns(USER, called("a", "b"), result("b", "2"), result("a", text("1")))
    call = {"name": "weather", "arguments": '{"city":"Bern"}'}
    assert got == (
        HELLO,
        Turn("assistant", calls=(ToolCall("a", **call), ToolCall("b", **call))),
        Turn("tool", (Text("1"),), call_id="a"),
        Turn("tool", (Text("2"),), call_id="b"),
    )


def test_a_result_may_repeat_the_functions_name() -> None:
    got = turns(USER, called("a"), {**result("a"), "name": "weather"})
    assert got[-1] == Turn("tool", (Text("21"),), call_id="a", tool_name="weather")


def test_a_call_without_arguments_may_have_them_empty() -> None:
    assert turns(USER, called("a", arguments=""), result("a"))[1].calls[0].arguments == "{}"


@pytest.mark.parametrize("arguments", ['{"city":"00123"}', '{ "a" : 1e5 }', '{"a":{}}'])
def test_arguments_are_replayed_as_they_were_sent(arguments: str) -> None:
    got = turns(USER, called("a", arguments=arguments), result("a"))
    assert got[1].calls[0].arguments == arguments


@pytest.mark.parametrize("whole", [{}, HERMES, {"name": "Bob", "refusal": None, "annotations": []}])
def test_the_servers_own_message_comes_back_unchanged(whole: dict[str, Any]) -> None:
    """With the fields that official clients add to it, null or not."""
    calls = (ToolCall("1", "weather", '{"city":"Bern"}'), ToolCall("2", "weather", "{}"))
    reply = Reply("tool_calls", Usage(), (Reasoning("Hm."), Text("Let me see."), *calls))
    message = exchange().whole(reply)["choices"][0]["message"]
    added = {"audio": None, "function_call": None, "parsed": None, **whole}
    got = turns(USER, {**message, **added}, result("call_1"), result("call_2"))
    assert got[1] == Turn(
        "assistant",
        (Text("Let me see."),),
        "Hm.",
        tuple(ToolCall(f"call_{call.id}", call.name, call.arguments) for call in calls),
    )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_bookkeeping_of_agents_is_accepted_on_every_message(role: str) -> None:
    message = {"role": role, "content": "x", **HERMES}
    before: list[dict[str, Any]] = [USER]
    if role == "tool":
        before, message = [USER, called("a")], {**message, "tool_call_id": "a"}
    assert turns(*before, message, *([USER] if role == "assistant" else []))


@pytest.mark.parametrize(
    ("names", "read_as"),
    [
        ({"reasoning": "Hm."}, "Hm."),
        ({"reasoning": "Hm.", "reasoning_content": None}, "Hm."),
        ({"reasoning": "Hm.", "reasoning_content": "Ah."}, "Ah."),
        ({"reasoning": "Hm.", "reasoning_content": ""}, ""),
        ({"reasoning": None}, ""),
    ],
)
def test_reasoning_has_two_names(names: dict[str, Any], read_as: str) -> None:
    said = {"role": "assistant", "content": "Hi", **names}
    assert asked(messages=[USER, said, USER]).turns[1].reasoning == read_as


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x", **fields}]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "the conversation is empty"),
        ([USER, {"role": "assistant", "content": "Hi"}], "the conversation ends with the assist"),
        ([USER, called("a")], "tool calls without a result: 'a'"),
        ([USER, called("a", "b"), result("b")], "tool calls without a result: 'a'"),
        ([USER, called("a"), called("b"), result("a"), result("b")], "tool calls without a res"),
        ([USER, called("a"), USER, result("a")], "tool calls without a result: 'a'"),
        ([USER, called("a"), result("a"), result("a")], "the tool call 'a' has two results"),
        ([USER, called("a"), result("b")], "the tool result 'b' answers no call"),
        ([USER, result("a")], "the tool result 'a' answers no call"),
        ([USER, called("a", "a"), result("a")], "two tool calls of one message have the same id"),
        ([USER, called("a", arguments='{"city":"Be'), result("a")], "messages[1].tool_calls[0].function.arguments is not a JSON object"),
        ([USER, called("a", arguments="[1]"), result("a")], "messages[1].tool_calls[0].function.a"),
        ([USER, called("a", arguments="[" * 100_000), result("a")], "messages[1].tool_calls[0]"),
        (["Hello"], "messages[0]: its role has to be system, developer, user, assistant or tool"),
        (message(role="function", name="f"), "messages[0]: its role has to be system, developer"),
        (message(role=None), "messages[0]: its role has to be"),
        (message(role="System"), "messages[0]: its role has to be system, developer, user, assistant or tool"),
        (message(role="Tool"), "messages[0]: its role has to be system, developer, user, assistant or tool"),
        (message(content=[{"type": "Text", "text": ""}]), "messages[0].content[0]: its type has to be text or image_url"),
        (message(role=["user"]), "messages[0]: its role has to be"),
        (message(content=5), "messages[0].content: has to be text or a list of parts"),
        (message(content=None), "messages[0].content is missing"),
        ([{"role": "user"}], "messages[0].content is missing"),
        (message(content=[{"type": "text"}]), "messages[0].content[0].text is missing"),
        (message(content=[{"type": "text", "text": "", "x": 1}]), "unknown field messages[0].content[0].x"),
        (message(content=[{"type": "input_audio"}]), "messages[0].content[0]: its type has to be text or image_url"),
        (message(content=[{"type": "file"}]), "messages[0].content[0]: its type has to be text"),
        (message(content=["x"]), "messages[0].content[0]: its type has to be text or image_url"),
        (message(role="system", content=[{"type": "image_url", "image_url": {"url": URL}}]), "messages[0].content[0]"),
        (message(tool_calls=[]), "unknown field messages[0].tool_calls"),
        (message(reasoning=""), "unknown field messages[0].reasoning"),
        (message(reasoning_content=""), "unknown field messages[0].reasoning_content"),
        (message(role="tool"), "messages[0].tool_call_id is missing"),
        ([USER, {**called("a"), "function_call": {"name": "f", "arguments": ""}}], "messages[1].function_call: has to be null"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}], "messages[1].tool_calls[0]"),
    ],
)  # fmt: skip
def test_a_conversation_is_refused(messages: list[Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(messages=messages)
    assert caught.value.message.startswith(said)
    assert caught.value.status == 400


def test_half_a_surrogate_pair_that_a_client_cut_is_read() -> None:
    assert turns(*message(content="\ud83d")) == (Turn("user", (Text("\ufffd"),)),)


def test_a_calls_id_may_recur_in_a_later_turn() -> None:
    got = turns(USER, called("a"), result("a", "1"), called("a"), result("a", "2"))
    assert [turn.text for turn in got if turn.role == "tool"] == ["1", "2"]
