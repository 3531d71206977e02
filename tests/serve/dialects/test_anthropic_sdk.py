"""Messages: the official client against a real server with a scripted model."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import anthropic as sdk
import pytest
from pydantic import BaseModel

from headrace.errors import ContextError
from headrace.serve.app import create_app
from headrace.serve.dialects import anthropic, openai_chat
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
    ReasoningDelta,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.failure import failure
from headrace.serve.request import Format, Request, Text, ToolCall, Turn
from serve.dialects.anthropic_messages import HEADER
from serve.picture import PNG
from serve.scripted import CARD, ScriptedBackend
from serve.served import served

USAGE = Usage(prompt_tokens=10, cached_tokens=4, new_tokens=6, reasoning_tokens=2)
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": CARD.name, "max_tokens": 64, "messages": HI}
GET: dict[str, Any] = {
    "name": "get",
    "description": "Gets.",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
ADAPTIVE: dict[str, Any] = {"type": "adaptive"}


def script(*events: Event, reason: Reason = "stop", stop: str | None = None) -> list[Event | float]:
    return [Started(10, 4), *events, Finished(reason, USAGE, stop)]


def call(index: int = 0, name: str = "get", arguments: str = '{"x":1}') -> list[Event]:
    cut = len(arguments) // 2 + 1
    pieces = [CallDelta(index, arguments[:cut]), CallDelta(index, arguments[cut:])]
    return [CallStarted(index, f"c{index}", name), *pieces, CallEnded(index, arguments)]


@contextmanager
def client(backend: ScriptedBackend) -> Iterator[sdk.Anthropic]:
    with (
        served(create_app(backend, [anthropic])) as url,
        sdk.Anthropic(base_url=url, api_key="any", max_retries=0) as made,
    ):
        yield made


def both(backend: ScriptedBackend, **fields: Any) -> tuple[sdk.types.Message, list[Any]]:
    """A message that was streamed equals the one that was not; and the events of its stream."""
    asked = {**ASKED, **fields}
    with client(backend) as made:
        whole = made.messages.create(**asked)
        with made.messages.stream(**asked) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
    said = whole.model_dump(exclude={"id"})
    again = streamed.model_dump(exclude={"id", "content"})
    assert {**again, "content": said["content"]} == said
    blocks = [block.model_dump(exclude={"parsed_output"}) for block in streamed.content]
    assert blocks == said["content"]
    assert backend.requests[0] == backend.requests[1]
    return whole, events


def test_text() -> None:
    message, events = both(ScriptedBackend(script(TextDelta("He"), TextDelta("llo"))))
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == "Hello"
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens == 6
    assert message.usage.cache_read_input_tokens == 4
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.output_tokens == 6
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "text",
        "content_block_delta",
        "text",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stream_of_text() -> None:
    with (
        client(ScriptedBackend(script(TextDelta("He"), TextDelta("llo")))) as made,
        made.messages.stream(**ASKED) as stream,
    ):
        assert list(stream.text_stream) == ["He", "llo"]
        assert stream.get_final_text() == "Hello"


def test_raw_events_have_the_order_of_the_api() -> None:
    events = script(ReasoningDelta("Hm"), *call(), reason="tool_calls")
    with client(ScriptedBackend(events)) as made:
        told = list(made.messages.create(**ASKED, tools=[GET], thinking=ADAPTIVE, stream=True))
    assert [(event.type, getattr(event, "index", None)) for event in told] == [
        ("message_start", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("message_delta", None),
        ("message_stop", None),
    ]


@pytest.mark.parametrize("display", [None, "omitted"])
def test_thinking_is_replayed(display: Literal["omitted"] | None) -> None:
    thinking = {"type": "adaptive", **({} if display is None else {"display": display})}
    backend = ScriptedBackend(script(ReasoningDelta("Hm, "), ReasoningDelta("yes"), TextDelta("a")))
    message, _ = both(backend, thinking=thinking, output_config={"effort": "medium"})
    assert backend.requests[0].effort == "medium"
    assert message.content[0].type == "thinking"
    assert message.content[0].thinking == ("Hm, yes" if display is None else "")
    assert message.content[0].signature == signed("Hm, yes")
    turns: list[Any] = [*HI, {"role": "assistant", "content": message.content}, *HI]
    with client(backend) as made:
        made.messages.create(**{**ASKED, "messages": turns})
    said = Turn("assistant", (Text("a"),), reasoning="Hm, yes")
    assert backend.requests[-1].turns[1] == said


@pytest.mark.parametrize("eager", [False, True])
def test_a_tool_is_used(eager: bool) -> None:
    backend = ScriptedBackend(
        script(ReasoningDelta("Hm"), TextDelta("Look."), *call(), *call(1), reason="tool_calls")
    )
    tools = [{**GET, "eager_input_streaming": eager}]
    message, events = both(backend, tools=tools)
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    used = message.content[2:]
    assert [(block.id, block.name, block.input) for block in used if block.type == "tool_use"] == [
        ("toolu_c0", "get", {"x": 1}),
        ("toolu_c1", "get", {"x": 1}),
    ]
    assert [e.partial_json for e in events if e.type == "input_json"] == (
        ['{"x"', ":1}"] * 2 if eager else ['{"x":1}'] * 2
    )
    turns: list[Any] = [
        *HI,
        message.to_param(),
        {"role": "user", "content": [result("toolu_c1", "b")]},
        {"role": "user", "content": [result("toolu_c0", "a")]},
    ]
    with client(backend) as made:
        made.messages.create(**{**ASKED, "messages": turns}, tools=tools)
    calls = tuple(ToolCall(f"toolu_c{i}", "get", '{"x": 1}') for i in range(2))
    assert backend.requests[-1].turns[1:] == (
        Turn("assistant", (Text("Look."),), reasoning="Hm", calls=calls),
        Turn("tool", (Text("a"),), call_id="toolu_c0"),
        Turn("tool", (Text("b"),), call_id="toolu_c1"),
    )


def result(of: str, said: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, "content": said}


def test_a_call_that_was_cut_is_not_run() -> None:
    events = script(TextDelta("a"), *call()[:2], reason="length")
    message, _ = both(ScriptedBackend(events), tools=[GET])
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["text"]


def test_the_window_was_filled() -> None:
    message, _ = both(ScriptedBackend(script(TextDelta("a"), reason="context")))
    assert message.stop_reason == "model_context_window_exceeded"


def test_a_stop_sequence_was_met() -> None:
    backend = ScriptedBackend(script(TextDelta("a"), reason="stop_sequence", stop="END"))
    message, _ = both(backend, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


class Answer(BaseModel):
    x: int


@pytest.mark.parametrize("of", ["messages", "beta"])
def test_an_answer_is_parsed(of: str) -> None:
    backend = ScriptedBackend(script(TextDelta('{"x":'), TextDelta(" 5}")))
    with client(backend) as made:
        messages: Any = made.messages if of == "messages" else made.beta.messages
        parsed = messages.parse(**ASKED, output_format=Answer)
        with messages.stream(**ASKED, output_format=Answer) as stream:
            streamed = stream.get_final_message()
    assert parsed.parsed_output == streamed.parsed_output == Answer(x=5)
    schema = backend.requests[0].answer
    assert schema.kind == "schema"
    assert schema.schema is not None
    assert schema.schema["required"] == ["x"]


def test_an_eager_call_that_was_cut_is_left_out_or_answered_with_an_error() -> None:
    """The stream cannot take it back; its end says that it may not be whole."""
    cut: list[Event] = [CallStarted(1, "c1", "get"), CallDelta(1, '{"path":"/a","te')]
    backend = ScriptedBackend(script(*call(), *cut, reason="length"))
    asked: dict[str, Any] = {**ASKED, "tools": [{**GET, "eager_input_streaming": True}]}
    with client(backend) as made:
        with made.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == "max_tokens"
        content: list[Any] = [block.model_dump() for block in final.content]
        assert [block["input"] for block in content] == [{"x": 1}, {"path": "/a"}]
        whole, last = (
            {"type": "tool_result", "tool_use_id": block["id"], "content": "", "is_error": error}
            for block, error in zip(content, (False, True), strict=True)
        )

        def replay(said: list[Any], *heard: Any) -> None:
            turns: list[Any] = [
                *HI,
                {"role": "assistant", "content": said},
                {"role": "user", "content": list(heard)},
            ]
            made.messages.create(**{**asked, "messages": turns})

        for results in ([whole], []):
            with pytest.raises(
                sdk.BadRequestError, match="tool calls without a result: .*toolu_c1"
            ):
                replay(content, *results, {"type": "text", "text": "Go on."})
        replay(content[:-1], whole)
        replay(content, whole, last)
    _, without, answered = backend.requests
    assert [kept.id for kept in without.turns[1].calls] == ["toolu_c0"]
    assert [turn.text for turn in answered.turns[2:]] == ["", "Error:"]


def test_a_schema_is_asked_for() -> None:
    backend = ScriptedBackend(script(TextDelta("{}")))
    schema = {"type": "object", "additionalProperties": False}
    both(backend, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert backend.requests[0].answer == Format("schema", schema)


def test_the_tool_runner_runs_tools() -> None:
    def answer(request: Request) -> list[Event | float]:
        if request.turns[-1].role == "tool":
            return script(TextDelta("It is " + request.turns[-1].text))
        return script(ReasoningDelta("Hm"), *call(name="double"), reason="tool_calls")

    @sdk.beta_tool
    def double(x: int) -> str:
        """Doubles.

        Args:
            x: A number.
        """
        return str(2 * x)

    backend = ScriptedBackend(answer)
    with client(backend) as made:
        runner = made.beta.messages.tool_runner(**ASKED, tools=[double])
        said = runner.until_done()
        streamed = made.beta.messages.tool_runner(**ASKED, tools=[double], stream=True)
        finals = [stream.get_final_message() for stream in streamed]
    assert [block.type for block in said.content] == ["text"]
    assert [message.stop_reason for message in finals] == ["tool_use", "end_turn"]
    assert finals[-1].content[0].model_dump()["text"] == "It is 2"
    tool = backend.requests[0].tools[0]
    assert (tool.name, tool.description) == ("double", "Doubles.")
    assert tool.parameters["required"] == ["x"]
    assert backend.requests[1].turns[1].reasoning == "Hm"


def test_tokens_are_counted() -> None:
    backend = ScriptedBackend(count=41)
    with client(backend) as made:
        fields: Any = {"model": CARD.name, "messages": HI, "system": "Be kind.", "tools": [GET]}
        raw = made.messages.with_raw_response.count_tokens(**fields, extra_body={"speed": "fast"})
        assert raw.headers["x-headrace-ignored-fields"] == "speed"
        counted = raw.parse()
        made.beta.messages.count_tokens(**fields)
    assert counted.input_tokens == 41
    assert backend.requests[0] == backend.requests[1]
    assert [turn.role for turn in backend.requests[0].turns] == ["system", "user"]


def test_a_picture_and_what_a_coding_agent_sends() -> None:
    backend = ScriptedBackend(script(TextDelta("a")), card=replace(CARD, vision=True))
    cache = {"type": "ephemeral"}
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(PNG).decode(),
    }
    with client(backend) as made:
        made.beta.messages.create(
            **{**ASKED, "messages": [{"role": "user", "content": [
                {"type": "text", "text": "<system-reminder>now</system-reminder>"},
                {"type": "image", "source": source, "cache_control": cache},
            ]}]},
            system=[
                {"type": "text", "text": HEADER},
                {"type": "text", "text": "You write code.", "cache_control": cache},
            ],
            metadata={"user_id": "u"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
            tools=[{**GET, "strict": True}, {"type": "web_search_20250305", "name": "web_search"}],
            extra_body={"speed": "fast"},
        )  # fmt: skip
    request = backend.requests[0]
    assert request.turns[0].text == "You write code."
    assert request.turns[1].images[0].data == PNG
    assert [(tool.name, tool.strict) for tool in request.tools] == [("get", True)]


@pytest.mark.parametrize(
    ("fails", "kind", "said"),
    [
        (ContextError(9000, 8192), sdk.BadRequestError, "prompt is too long: 9000 tokens > 8192 maximum"),
        (Failure(503, "overloaded", "full"), sdk.APIStatusError, "full"),
        (Failure(500, "inference_error", "it broke"), sdk.InternalServerError, "it broke"),
    ],
)  # fmt: skip
def test_a_failure_before_the_start_is_a_status(fails: Any, kind: type, said: str) -> None:
    failed = fails if isinstance(fails, Failure) else failure(fails)
    backend = ScriptedBackend([Failed(failed)])
    with client(backend) as made:
        for ask in (made.messages.create, lambda **f: list(made.messages.create(**f, stream=True))):
            with pytest.raises(kind) as caught:
                ask(**ASKED)
            assert caught.value.status_code == failed.status
            assert caught.value.body["error"]["message"] == said


def test_a_failure_in_a_stream_is_an_error() -> None:
    broken = Failed(Failure(500, "inference_error", "it broke"))
    backend = ScriptedBackend([Started(10, 4), TextDelta("a"), broken])
    with client(backend) as made, made.messages.stream(**ASKED) as stream:
        seen: list[str] = []
        with pytest.raises(sdk.APIStatusError, match="it broke"):
            seen.extend(event.type for event in stream)
        assert seen == ["message_start", "content_block_start", "content_block_delta", "text"]
    with client(backend) as made, pytest.raises(sdk.InternalServerError, match="it broke"):
        made.messages.create(**ASKED)


REFUSED: list[tuple[dict[str, Any], type[sdk.APIStatusError], str]] = [
    ({"model": "claude-opus-4"}, sdk.NotFoundError, "not_found_error"),
    ({"messages": []}, sdk.BadRequestError, "invalid_request_error"),
    ({"messages": [*HI, {"role": "assistant", "content": "a"}]}, sdk.BadRequestError,
     "invalid_request_error"),
    ({"max_tokens": 0}, sdk.BadRequestError, "invalid_request_error"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "kind"), REFUSED)
def test_a_refusal(fields: dict[str, Any], error: type[sdk.APIStatusError], kind: str) -> None:
    with client(ScriptedBackend(script())) as made, pytest.raises(error) as caught:
        made.messages.create(**{**ASKED, **fields})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == kind


def test_an_answer_has_an_id() -> None:
    with client(ScriptedBackend(script(TextDelta("a")))) as made:
        message = made.messages.create(**ASKED)
    assert message.id.startswith("msg_")
    assert message._request_id == message.id.replace("msg_", "req_")


def test_the_asynchronous_client() -> None:
    async def said(url: str) -> list[str]:
        async with (
            sdk.AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as made,
            made.messages.stream(**ASKED) as stream,
        ):
            return [text async for text in stream.text_stream]

    backend = ScriptedBackend(script(TextDelta("He"), TextDelta("llo")))
    with served(create_app(backend, [anthropic])) as url:
        assert asyncio.run(said(url)) == ["He", "llo"]


def test_the_list_of_models_is_read() -> None:
    """The paths are OpenAI's, and the answers both clients'."""
    backend = ScriptedBackend()
    with (
        served(create_app(backend, [anthropic, openai_chat])) as url,
        sdk.Anthropic(base_url=url, api_key="any", max_retries=0) as made,
    ):
        listed = [(model.id, model.max_input_tokens) for model in made.models.list()]
        one = made.models.retrieve(CARD.name)
    assert listed == [(name, CARD.context_window) for name in CARD.names]
    assert (one.id, one.display_name, one.max_tokens) == (CARD.name, CARD.name, 2048)
