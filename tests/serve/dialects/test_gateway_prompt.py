"""Messages of a gateway call as turns: parts, replayed calls, results paired by id, and images."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest

from headrace.serve.events import Started
from headrace.serve.failure import RequestError
from headrace.serve.request import Image, Text, ToolCall, Turn
from serve.dialects.gateway_calls import USER, frames, opened

HELLO = Turn("user", (Text("Hello"),))


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(parts)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(id: str, name: str = "weather", **more: Any) -> dict[str, Any]:
    given = {"input": {"city": "Ulm"}, **more}
    return {"type": "tool-call", "toolCallId": id, "toolName": name, **given}


def result(id: str, output: Any = "21", name: str = "weather") -> dict[str, Any]:
    if isinstance(output, str):
        output = {"type": "text", "value": output}
    return {"type": "tool-result", "toolCallId": id, "toolName": name, "output": output}


def told(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "content": list(parts)}


def turns(*prompt: dict[str, Any]) -> tuple[Turn, ...]:
    return opened(prompt=list(prompt)).request.turns


def refused(*prompt: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        opened(prompt=list(prompt))
    assert caught.value.status == 400
    return caught.value


def called(*ids: str, name: str = "weather") -> Turn:
    return Turn("assistant", calls=tuple(ToolCall(id, name, '{"city":"Ulm"}') for id in ids))


def answered(id: str, value: str = "21", name: str = "weather") -> Turn:
    parts = (Text(value),) if value else ()
    return Turn("tool", parts, call_id=id, tool_name=name)


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0\xff\0\0")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


PNG = png()
INLINE = base64.b64encode(PNG).decode()
PICTURE = Image(PNG, "image/png")


def file(data: Any, media_type: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "file", "data": data, "mediaType": media_type, **more}


def test_instructions_in_front_become_one_and_later_ones_the_users() -> None:
    # fx ends the conversation of its reviewer with a system message.
    prompt = (system("Be brief."), system("Be kind."), USER, said(text("Hi")), system("Judge it."))
    assert turns(*prompt) == (
        Turn("system", (Text("Be brief.\n\nBe kind."),)),
        HELLO,
        Turn("assistant", (Text("Hi"),)),
        Turn("user", (Text("Judge it."),)),
    )


def test_parts_of_a_message_follow_each_other() -> None:
    user = {"role": "user", "content": [text("Hel"), text("lo")]}
    reasoning = [{"type": "reasoning", "text": piece} for piece in ("Hm", "m.")]
    prompt = (user, said(*reasoning, text("So"), call("a"), text(" be it.")), told(result("a")))
    assert turns(*prompt) == (
        Turn("user", (Text("Hel"), Text("lo"))),
        Turn("assistant", (Text("So be it."),), "Hmm.", called("a").calls),
        answered("a"),
    )


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert turns(USER, said(text("a")), said(text("b")), USER, USER) == (
        HELLO,
        Turn("assistant", (Text("a"), Text("\n\n"), Text("b"))),
        Turn("user", (Text("Hello"), Text("\n\n"), Text("Hello"))),
    )


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({}, "{}"),
        ({"b": None, "a": "00123", "ü": [1.5, True]}, '{"b":null,"a":"00123","ü":[1.5,true]}'),
        ('{"a": 1}', '{"a":1}'),
        (" ", "{}"),
    ],
)
def test_an_input_is_an_object(given: Any, arguments: str) -> None:
    prompt = (USER, said(call("a", input=given)), told(result("a")))
    assert turns(*prompt)[1].calls == (ToolCall("a", "weather", arguments),)


@pytest.mark.parametrize(
    "given", [None, 1, [], "x", "[1]", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900]
)
def test_an_input_that_is_no_object_is_refused(given: Any) -> None:
    error = refused(USER, said(call("a", input=given)), told(result("a")))
    assert error.place == "prompt[1].content[0].input"
    assert "not a JSON object" in error.message


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ({"type": "text", "value": "21"}, "21"),
        ({"type": "text", "value": ""}, ""),
        ({"type": "json", "value": {"a": None, "b": [1, "ü"]}}, '{"a":null,"b":[1,"ü"]}'),
        ({"type": "json", "value": "21"}, '"21"'),
        ({"type": "json", "value": None}, "null"),
        ({"type": "error-text", "value": "broken"}, "broken"),
        ({"type": "error-json", "value": {"code": 5}}, '{"code":5}'),
        ({"type": "execution-denied", "reason": "Not now."}, "Not now."),
        ({"type": "execution-denied"}, "The user denied this tool call."),
        ({"type": "content", "value": []}, ""),
        ({"type": "content", "value": [text("21"), {"type": "custom"}]}, "21"),
    ],
)
def test_an_output_of_a_tool(output: Any, shown: str) -> None:
    assert turns(USER, said(call("a")), told(result("a", output)))[2] == answered("a", shown)


def test_results_are_matched_by_id_and_take_the_order_of_their_calls() -> None:
    prompt = (USER, said(call("a"), call("b")), told(result("b", "2")), told(result("a", "1")))
    assert turns(*prompt) == (HELLO, called("a", "b"), answered("a", "1"), answered("b", "2"))


def test_ids_may_recur_in_a_later_turn() -> None:
    one = (said(call("a"), call("b")), told(result("b"), result("a")))
    both = (called("a", "b"), answered("a"), answered("b"))
    assert turns(USER, *one, USER, *one) == (HELLO, *both, HELLO, *both)


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ((), "tool calls without a result: 'a', 'b'"),
        ((told(result("a")),), "tool calls without a result: 'b'"),
        ((told(result("a"), result("b")), told(result("a"))), "the tool call 'a' has two results"),
        ((told(result("a"), result("c")),), "the tool result 'c' answers no call"),
        ((told(result("a", name="time"), result("b")),), "the result of 'a' is of the tool 'time', its call of 'weather'"),
        ((USER, told(result("a"), result("b"))), "tool calls without a result: 'a', 'b'"),
    ],
)  # fmt: skip
def test_results_that_cannot_be_paired_are_refused(results: tuple[Any, ...], why: str) -> None:
    assert why in refused(USER, said(call("a"), call("b")), *results).message


def test_a_result_without_any_call_is_refused() -> None:
    assert "answers no call" in refused(USER, told(result("a"))).message


def test_a_conversation_that_asks_nothing_is_refused() -> None:
    assert "nothing is asked" in refused(USER, said(text("Hi"))).message


def test_what_a_provider_executed_is_left_out() -> None:
    search = call("p", "web_search", providerExecuted=True)
    found = result("p", {"type": "json", "value": {"hits": []}}, "web_search")
    approval = {"type": "tool-approval-response", "approvalId": "x", "approved": True}
    prompt = [USER, said(search, found, text("Nothing.")), told(approval), USER, told(found)]
    exchange = opened(prompt=prompt)
    assert exchange.request.turns == (HELLO, Turn("assistant", (Text("Nothing."),)), HELLO)
    assert [w["feature"] for w in frames(exchange, [Started(1, 0)])[0]["warnings"]] == [
        "provider-executed tools"
    ]


def test_a_result_in_an_assistant_message_that_no_provider_executed_is_refused() -> None:
    error = refused(USER, said(call("a"), result("a")), USER)
    assert error.place == "prompt[1].content[1]"


def test_parts_of_a_providers_own_kind_are_left_out() -> None:
    own = {
        "type": "custom",
        "kind": "openai.compaction",
        "providerOptions": {"openai": {"id": "1"}},
    }
    exchange = opened(prompt=[USER, said(own, text("Hi")), USER])
    assert exchange.request.turns == (HELLO, Turn("assistant", (Text("Hi"),)), HELLO)
    assert [w["feature"] for w in frames(exchange, [Started(1, 0)])[0]["warnings"]] == [
        "custom content"
    ]


@pytest.mark.parametrize(
    "part",
    [
        file(INLINE),
        file({"type": "data", "data": INLINE}),
        file({"type": "data", "data": INLINE}, "image/*"),
        file({"type": "data", "data": INLINE}, "image"),
        file({"type": "data", "data": INLINE}, "image/png", filename="a.png"),
        file({"type": "url", "url": f"data:image/png;base64,{INLINE}"}),
        file(f"data:image/png;base64,{INLINE}"),  # how versions 2 and 3 send it
    ],
)
def test_an_inline_image(part: dict[str, Any]) -> None:
    user = {"role": "user", "content": [text("What is it?"), part]}
    assert turns(user) == (Turn("user", (Text("What is it?"), PICTURE)),)


@pytest.mark.parametrize(
    "part",
    [
        file({"type": "data", "data": INLINE}),
        {"type": "media", "data": INLINE, "mediaType": "image/png"},
        {"type": "image-data", "data": INLINE, "mediaType": "image/png"},
        {"type": "file-data", "data": INLINE, "mediaType": "image/png", "filename": "a.png"},
    ],
)
def test_an_image_in_a_result(part: dict[str, Any]) -> None:
    output = {"type": "content", "value": [text("Look:"), part]}
    parts = (Text("Look:"), PICTURE)
    assert turns(USER, said(call("a")), told(result("a", output)))[2].parts == parts


def test_a_file_of_text_is_text() -> None:
    part = file({"type": "text", "text": "a,b"}, "text/csv", filename="a.csv")
    assert turns({"role": "user", "content": [part]}) == (Turn("user", (Text("a,b"),)),)


@pytest.mark.parametrize(
    ("part", "code", "why"),
    [
        (file("https://example.com/a.png"), "invalid_request", "only inline images are accepted"),
        (file({"type": "url", "url": "https://example.com/a.png"}), "invalid_request", "only inline images are accepted"),
        (file({"type": "reference", "reference": {"openai": "file-1"}}), "unsupported_field", "is not to be had here"),
        (file({"type": "data", "data": "!"}), "invalid_request", "not base64"),
        (file({"type": "blob"}), "invalid_request", "type is missing, or names no form of file data"),
        (file(INLINE, "application/pdf"), "unsupported_field", "only images are read"),
        ({"type": "image", "image": INLINE}, "invalid_request", "type is missing, or names no part of a user message"),
        (text("a") | {"x": 1}, "unsupported_field", "unknown field prompt[0].content[0].x"),
        ({"type": "text"}, "invalid_request", "prompt[0].content[0].text is missing"),
    ],
)  # fmt: skip
def test_a_part_of_a_user_message_that_is_refused(part: Any, code: str, why: str) -> None:
    error = refused({"role": "user", "content": [part]})
    assert error.cause == code
    assert why in error.message


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "developer", "content": "x"}, "prompt[0]: role is missing, or names no role of a message"),
        ({"role": "System", "content": "x"}, "prompt[0]: role is missing, or names no role of a message"),
        ({"role": "system", "content": [text("x")]}, "prompt[0].content: input should be a valid string"),
        ({"role": "user", "content": "x"}, "prompt[0].content: input should be a valid list"),
        (said(file({"type": "data", "data": INLINE})), "prompt[0].content[0].type: 'file' in an assistant message"),
        (said({"type": "reasoning-file", "data": INLINE, "mediaType": "image/png"}), "'reasoning-file' in an assistant message"),
        (said({"type": "source"}), "names no part of an assistant message"),
        (told(text("x")), "names no part of a tool message"),
        (told(result("a", {"type": "xml", "value": ""})), "prompt[0].content[0].output: type is missing, or names no output of a tool"),
        (told(result("")), "prompt[0].content[0].toolCallId"),
    ],
)  # fmt: skip
def test_a_message_that_is_refused(message: Any, why: str) -> None:
    assert why in refused(message).message
