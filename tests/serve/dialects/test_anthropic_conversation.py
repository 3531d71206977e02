"""Messages: a conversation's blocks as turns, results paired by id, instructions without what changes."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headrace.serve.dialects.anthropic_wire import recalled, signed
from headrace.serve.failure import RequestError
from headrace.serve.request import Image, Json, Part, Text, ToolCall, Turn
from serve.dialects.anthropic_messages import HEADER, asked, counted
from serve.picture import PNG

USED: Json = {"type": "tool_use", "id": "toolu_1", "name": "get", "input": {"x": 1}}
CALL = ToolCall("toolu_1", "get", '{"x": 1}')


def text(said: str) -> Json:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def user(*blocks: Json | str) -> Json:
    content = blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else list(blocks)
    return {"role": "user", "content": content}


def assistant(*blocks: Json | str) -> Json:
    return {**user(*blocks), "role": "assistant"}


def system(*blocks: Json | str) -> Json:
    return {**user(*blocks), "role": "system"}


def result(of: str = "toolu_1", **fields: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": of, **fields}


SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
SEEN = Image(PNG, "image/png")


def turn(role: Any, *said: str | Part, **fields: Any) -> Turn:
    return Turn(role, tuple(Text(p) if isinstance(p, str) else p for p in said), **fields)


def of_user(*blocks: Json) -> tuple[Part, ...]:
    return asked(messages=[user(*blocks)]).turns[0].parts


def of_result(**fields: Any) -> tuple[Part, ...]:
    return asked(messages=[user("?"), assistant(USED), user(result(**fields))]).turns[2].parts


def test_messages_are_turns() -> None:
    messages = [user("a"), assistant("b"), user(text("c")), assistant(text("d")), user("e")]
    told = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    assert asked(messages=messages).turns == (*told, turn("user", "e"))


def test_consecutive_messages_of_one_role_are_one_turn() -> None:
    messages = [user("a"), user("b"), assistant("c"), assistant("d"), user("e"), user(text("f"))]
    assert asked(messages=messages).turns == (
        turn("user", "a\n\nb"),
        turn("assistant", "c", "\n\n", "d"),
        turn("user", "e\n\nf"),
    )


def test_blocks_of_a_user_stand_apart_and_those_of_the_model_do_not() -> None:
    messages = [user(text("a"), text("b")), assistant(text("c"), text("d")), user("e")]
    assert [t.text for t in asked(messages=messages).turns] == ["a\n\nb", "cd", "e"]


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        (text("a"), ("a",)),
        ({"type": "image", "source": SOURCE}, (SEEN,)),
        ({"type": "search_result", "title": "T", "source": "S", "content": [text("a"), text("b")]},
         ("T\nS\na\nb",)),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}},
         ("a",)),
        ({"type": "document", "title": "T", "context": "C", "citations": {"enabled": True},
          "source": {"type": "text", "data": "a"}}, ("T\n\nC\n\na",)),
        ({"type": "document", "source": {"type": "content", "content": "a"}}, ("a",)),
        ({"type": "document", "source": {
            "type": "content", "content": [text("a"), {"type": "image", "source": SOURCE}]}},
         ("a", SEEN)),
        ({"type": "document", "title": "T", "source": {
            "type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
         ("[The document 'T' cannot be seen: it is not plain text.]",)),
        ({"type": "document", "source": {"type": "url", "url": "u"}},
         ("[The document cannot be seen: it is not inline.]",)),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}},
         ("[The document cannot be seen: it is not inline.]",)),
    ],
)  # fmt: skip
def test_a_block_of_a_user_and_of_a_result(block: Json, parts: tuple[str | Part, ...]) -> None:
    expected = tuple(Text(part) if isinstance(part, str) else part for part in parts)
    assert of_user(block) == expected
    assert of_result(content=[block]) == expected


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, ()),
        ({"content": None}, ()),
        ({"content": ""}, ()),
        ({"content": "a"}, (Text("a"),)),
        ({"content": [text("a"), text("b")]}, (Text("a\n\nb"),)),
        ({"content": [{"type": "tool_reference", "tool_name": "put"}]},
         (Text("Tool available: put"),)),
        ({"content": "a", "is_error": False}, (Text("a"),)),
        ({"content": "a", "is_error": True}, (Text("Error: a"),)),
        ({"is_error": True}, (Text("Error:"),)),
        ({"content": [{"type": "image", "source": SOURCE}], "is_error": True},
         (Text("Error:"), SEEN)),
    ],
)  # fmt: skip
def test_a_result(fields: Json, parts: tuple[Part, ...]) -> None:
    assert of_result(**fields) == parts


def test_results_come_in_any_order_and_are_paired_by_id() -> None:
    second, third = {**USED, "id": "2"}, {**USED, "id": "3", "input": {}}
    messages = [
        user("?"),
        assistant(text("Look."), USED, second, third),
        user(result("3", content="c")),
        user(text("And?"), result("toolu_1", content="a"), result("2", content="b")),
    ]
    calls = (CALL, ToolCall("2", "get", '{"x": 1}'), ToolCall("3", "get", "{}"))
    assert asked(messages=messages).turns == (
        turn("user", "?"),
        turn("assistant", "Look.", calls=calls),
        turn("tool", "a", call_id="toolu_1"),
        turn("tool", "b", call_id="2"),
        turn("tool", "c", call_id="3"),
        turn("user", "And?"),
    )


def test_calls_of_a_turn_may_go_on_in_the_next_message() -> None:
    second = {**USED, "id": "2"}
    messages = [user("?"), assistant(USED), assistant(second), user(result("2"), result())]
    turns = asked(messages=messages).turns
    assert [call.id for call in turns[1].calls] == ["toolu_1", "2"]
    assert [t.call_id for t in turns[2:]] == ["toolu_1", "2"]


def test_an_id_may_come_again_in_a_later_turn() -> None:
    loop = [assistant(USED), user(result(content="a"))]
    assert len(asked(messages=[user("?"), *loop, *loop]).turns) == 5


def test_thinking_is_what_its_signature_holds() -> None:
    def reasoning(*blocks: Json) -> str:
        messages = [user("?"), assistant(*blocks, text("a")), user("b")]
        return asked(messages=messages).turns[1].reasoning

    ours = {"type": "thinking", "thinking": "", "signature": signed("Hm, 世界.")}
    assert reasoning(ours) == "Hm, 世界."
    assert reasoning({**ours, "thinking": "changed"}) == "Hm, 世界."
    assert reasoning(ours, {**ours, "signature": signed("Ah.")}) == "Hm, 世界.\n\nAh."
    assert reasoning({"type": "redacted_thinking", "data": "Zm9v"}) == ""
    for foreign in (
        "",
        "EqQBCgIYAhIM1gbcDa9GJwZA2b3h",
        signed("Hm.")[:-1],
        "headrace-9.AAAA",
        None,
    ):
        assert reasoning({**ours, "thinking": "Shown.", "signature": foreign}) == "Shown."
        assert reasoning({**ours, "signature": foreign}) == ""


def test_a_signature_is_checked() -> None:
    whole = signed("Hm.")
    assert recalled(whole) == "Hm."
    assert recalled(signed("")) == ""
    for at in range(len(whole)):
        for other in "A-.é":
            if other != whole[at]:
                assert recalled(whole[:at] + other + whole[at + 1 :]) is None
        assert recalled(whole[:at]) is None
    assert recalled(whole + "A") is None


@pytest.mark.parametrize(
    ("fields", "instructions"),
    [
        ({"system": "a"}, "a"),
        ({"system": [text("a"), text("b")]}, "a\n\nb"),
        ({"system": [text(HEADER), text("a"), text("b")]}, "a\n\nb"),
        ({"system": [text(HEADER + "\n"), text("a")]}, "a"),
        ({"system": HEADER + "\na\n" + HEADER}, "a\n" + HEADER),
        ({"system": HEADER + "\n\na"}, "a"),
        ({"system": [text(HEADER + "\na")]}, "a"),
        ({"system": "a", "messages": [system("b"), system(text("c")), user("?")]}, "a\n\nb\n\nc"),
        ({"messages": [system(HEADER), system("c"), user("?")]}, "c"),
    ],
)
def test_instructions(fields: Json, instructions: str) -> None:
    turns = asked(**fields).turns
    assert turns[0] == turn("system", instructions)
    assert [t.role for t in turns] == ["system", "user"]


def test_a_first_line_that_changes_makes_no_other_prompt() -> None:
    one, other = (
        asked(system=[text(HEADER.replace("00000", salt)), text("Be kind.")])
        for salt in ("1f3a0", "99c41")
    )
    assert one == other


@pytest.mark.parametrize("said", ["", HEADER, [], [text(HEADER)]])
def test_no_instructions_are_no_turn(said: Any) -> None:
    assert [t.role for t in asked(system=said).turns] == ["user"]


def test_a_late_system_message_is_the_users() -> None:
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "tool_name": "put"}}
    removal = {**change, "type": "tool_removal"}
    messages = [
        user("a"),
        system("Now: noon."),
        assistant(USED),
        user(result(content="b")),
        system(change, text("Now: night."), removal),
    ]
    assert asked(messages=messages).turns == (
        turn("user", "a\n\nNow: noon."),
        turn("assistant", calls=(CALL,)),
        turn("tool", "b", call_id="toolu_1"),
        turn("user", "Now: night."),
    )


def test_a_system_message_of_changes_alone_is_nothing() -> None:
    change = {"type": "tool_removal", "tool": {}}
    messages = [user("a"), assistant("b"), system(change), assistant("c"), user("d")]
    assert [t.text for t in asked(messages=messages).turns] == ["a", "b\n\nc", "d"]


def test_an_empty_answer_may_be_replayed() -> None:
    messages = [user("a"), assistant({"type": "text", "text": ""}), user("b")]
    assert asked(messages=messages).turns == (
        turn("user", "a"),
        turn("assistant"),
        turn("user", "b"),
    )
    assert asked(messages=[user("a"), {"role": "assistant", "content": []}, user("b")]).turns == (
        asked(messages=messages).turns
    )


UNKNOWN = {"type": "container_upload", "file_id": "f"}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([user(UNKNOWN)], "messages[0].content[0].type: 'container_upload' is none of"),
        ([user(USED)], "messages[0].content[0].type: 'tool_use' is none of"),
        ([user("a"), assistant(result())], "messages[1].content[0].type: 'tool_result' is none of"),
        ([user("a"), assistant({"type": "server_tool_use"})], "messages[1].content[0].type: "),
        ([system({"type": "image", "source": SOURCE})], "messages[0].content[0].type: 'image' is none of"),
        ([user({"type": "text"})], "messages[0].content[0].text is missing"),
        ([user({"type": "image", "source": {"type": "url", "url": "https://a/b.png"}})],
         "an image's source is 'url'"),
        ([user({"type": "image", "source": {"type": "file", "file_id": "f"}})],
         "an image's source is 'file'"),
        ([user({"type": "image", "source": {**SOURCE, "media_type": "image/tiff"}})],
         "messages[0].content[0].source.media_type: input should be 'image/jpeg'"),
        ([user({"type": "image", "source": {**SOURCE, "data": "&"}})],
         "Could not process image: the image is not base64"),
        ([user({"type": "document", "source": {"type": "disk"}})],
         "messages[0].content[0].source.type: 'disk' is none of"),
        ([user("a"), assistant({**USED, "input": "{}"}), user(result())],
         "messages[1].content[0].input: input should be an object"),
        ([user("a"), assistant({**USED, "input": {"x": float("inf")}}), user(result())],
         "the input of 'toolu_1' has a number out of range"),
        ([user("a"), assistant(USED), user("b")], "tool calls without a result: 'toolu_1'"),
        ([user("a"), assistant(USED, {**USED, "id": "2"}), user(result("2"))],
         "tool calls without a result: 'toolu_1'"),
        ([user("a"), assistant(USED), user(result(), result())], "the tool call 'toolu_1' has two"),
        ([user("a"), assistant(USED), user(result(), result("9"))], "the tool result '9' answers"),
        ([user(result())], "the tool result 'toolu_1' answers no call"),
        ([user("a"), assistant(USED, USED), user(result())], "two tool calls of one message"),
        ([user("a"), assistant("b")], "the conversation ends with an assistant message"),
        ([system("a")], "the conversation is empty"),
    ],
)  # fmt: skip
def test_a_conversation_is_refused(messages: list[Json], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(messages=messages)
    assert caught.value.message.startswith(said)


def test_a_count_may_end_with_what_the_assistant_said() -> None:
    assert counted(messages=[user("a"), assistant("b")]).turns == (
        turn("user", "a"),
        turn("assistant", "b"),
    )
    assert counted(messages=[user("a"), assistant(USED)]).turns[-1] == turn(
        "assistant", calls=(CALL,)
    )
    assert counted(messages=[assistant("b")], system="s").turns == (
        turn("system", "s"),
        turn("assistant", "b"),
    )


def test_a_count_reads_what_a_message_would_read() -> None:
    fields: Json = {
        "system": "s",
        "messages": [user(text("a"), {"type": "image", "source": SOURCE})],
        "thinking": {"type": "adaptive"},
        "tools": [{"name": "get", "input_schema": {}}],
        "tool_choice": {"type": "any"},
    }
    assert counted(**fields) == type(asked())(**{**vars(asked(**fields)), "limit": None})
