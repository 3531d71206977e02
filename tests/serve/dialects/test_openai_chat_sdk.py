"""Chat completions: the official client against a real server with a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.chat import ContentDoneEvent, FunctionToolCallArgumentsDoneEvent
from pydantic import BaseModel

from headrace.serve.app import create_app
from headrace.serve.dialects import openai_chat
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.request import Format, Request, Text, ToolCall, Turn
from serve.dialects.chat import MODEL, TOOL
from serve.scripted import Script, ScriptedBackend
from serve.served import served

USAGE = Usage(prompt_tokens=10, cached_tokens=4, new_tokens=6, reasoning_tokens=2)
USER: Any = {"role": "user", "content": "Hello"}
ANSWER = [
    Started(10, 4),
    ReasoningDelta("Hm."),
    TextDelta("Hel"),
    TextDelta("lo\u2028 you"),
    Finished("stop", USAGE),
]
CALLS = [
    Started(10, 4),
    TextDelta("Let me see."),
    CallStarted(0, "a", "weather"),
    CallDelta(0, '{"city":'),
    CallDelta(0, '"Bern"}'),
    CallEnded(0, '{"city":"Bern"}'),
    CallStarted(1, "b", "weather"),
    CallDelta(1, '{"city":"Basel"}'),
    CallEnded(1, '{"city":"Basel"}'),
    Finished("tool_calls", USAGE),
]
PLACE = [Started(10, 4), TextDelta('{"city":'), TextDelta('"Bern"}'), Finished("stop", USAGE)]
BROKEN = Failed(Failure(500, "inference_error", "it broke"))


class Place(BaseModel):
    city: str


@contextmanager
def client(script: Script) -> Iterator[tuple[openai.OpenAI, ScriptedBackend]]:
    backend = ScriptedBackend(script)
    with (
        served(create_app(backend, [openai_chat])) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0) as official,
    ):
        yield official, backend


def weather(request: Request) -> Sequence[Event]:
    """Calls twice, and tells what the tools said."""
    said = [turn.text for turn in request.turns if turn.role == "tool"]
    if not said:
        return CALLS
    return [Started(20, 10), TextDelta(" and ".join(said)), Finished("stop", USAGE)]


def test_a_whole_completion() -> None:
    with client(ANSWER) as (official, backend):
        got = official.chat.completions.create(model=MODEL, messages=[USER], temperature=0, seed=7)
    message = got.choices[0].message
    assert (message.role, message.content) == ("assistant", "Hello\u2028 you")
    assert message.reasoning_content == "Hm."  # type: ignore[attr-defined]
    assert got.choices[0].finish_reason == "stop"
    assert got.usage is not None
    assert got.usage.total_tokens == 16
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 4
    assert got.usage.completion_tokens_details is not None
    assert got.usage.completion_tokens_details.reasoning_tokens == 2
    assert got.id.startswith("chatcmpl-")
    assert (backend.requests[0].sampling.temperature, backend.requests[0].sampling.seed) == (0, 7)


def test_a_stream_says_what_the_whole_says() -> None:
    with client(ANSWER) as (official, _):
        whole = official.chat.completions.create(model=MODEL, messages=[USER])
        chunks = list(
            official.chat.completions.create(
                model=MODEL, messages=[USER], stream=True, stream_options={"include_usage": True}
            )
        )
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant", *[None] * 4]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [*[None] * 4, "stop"]
    assert [chunk.usage for chunk in chunks] == [*[None] * 5, whole.usage]
    assert chunks[-1].choices == []


def test_the_asynchronous_client() -> None:
    async def run(base: str) -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="unused") as official:
            ask = official.chat.completions.create
            whole = await ask(model=MODEL, messages=[USER])
            stream = await ask(model=MODEL, messages=[USER], stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    with served(create_app(ScriptedBackend(ANSWER), [openai_chat])) as base:
        assert asyncio.run(run(base)) == ("Hello\u2028 you", "Hello\u2028 you")


@pytest.mark.parametrize("script", [ANSWER, CALLS])
def test_the_streaming_helper_gathers_the_whole(script: Script) -> None:
    tools: Any = [TOOL]
    with client(script) as (official, _):
        whole = official.chat.completions.create(model=MODEL, messages=[USER], tools=tools)
        with official.chat.completions.stream(model=MODEL, messages=[USER], tools=tools) as stream:
            got = stream.get_final_completion()
    wanted, gathered = whole.choices[0], got.choices[0]
    assert gathered.finish_reason == wanted.finish_reason
    assert gathered.message.content == wanted.message.content
    calls = [call.to_dict() for call in wanted.message.tool_calls or ()]
    told = [
        {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
        for call in gathered.message.tool_calls or ()
    ]  # fmt: skip
    assert told == calls


def test_the_streaming_helper_sees_every_call_end() -> None:
    tools: Any = [{**TOOL, "function": {**TOOL["function"], "strict": True}}]  # type: ignore[dict-item]
    with client(CALLS) as (official, backend):
        with official.chat.completions.stream(model=MODEL, messages=[USER], tools=tools) as stream:
            done = [e for e in stream if isinstance(e, FunctionToolCallArgumentsDoneEvent)]
        assert backend.requests[0].tools[0].strict
    assert [(e.index, e.arguments) for e in done] == [
        (0, '{"city":"Bern"}'),
        (1, '{"city":"Basel"}'),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools(stream: bool) -> None:
    """The assistant's message goes back as the client holds it; results in another order."""
    messages: list[Any] = [USER]
    tools: Any = [TOOL]
    with client(weather) as (official, backend):
        while True:
            if stream:
                helper = official.chat.completions.stream(
                    model=MODEL, messages=messages, tools=tools
                )
                with helper as events:
                    message: Any = events.get_final_completion().choices[0].message
            else:
                got = official.chat.completions.create(model=MODEL, messages=messages, tools=tools)
                message = got.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in reversed(message.tool_calls):
                city = json.loads(call.function.arguments)["city"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: 21"})
    assert message.content == "Bern: 21 and Basel: 21"
    assert backend.requests[1].turns == (
        Turn("user", (Text("Hello"),)),
        Turn(
            "assistant",
            (Text("Let me see."),),
            calls=(
                ToolCall("call_a", "weather", '{"city":"Bern"}'),
                ToolCall("call_b", "weather", '{"city":"Basel"}'),
            ),
        ),
        Turn("tool", (Text("Bern: 21"),), call_id="call_a"),
        Turn("tool", (Text("Basel: 21"),), call_id="call_b"),
    )


def test_an_answer_is_parsed_as_a_type() -> None:
    with client(PLACE) as (official, backend):
        got = official.chat.completions.parse(model=MODEL, messages=[USER], response_format=Place)
    assert got.choices[0].message.parsed == Place(city="Bern")
    answer = backend.requests[0].answer
    assert answer.kind == "schema"
    assert answer.schema is not None
    assert answer.schema["required"] == ["city"]
    assert answer.schema["additionalProperties"] is False


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client's own
def test_a_parsed_message_can_be_sent_back() -> None:
    with client(PLACE) as (official, backend):
        got = official.chat.completions.parse(model=MODEL, messages=[USER], response_format=Place)
        history: Any = [USER, got.choices[0].message, USER]
        official.chat.completions.parse(model=MODEL, messages=history, response_format=Place)
    assert backend.requests[1].turns[1] == Turn("assistant", (Text('{"city":"Bern"}'),))


def test_a_streamed_answer_is_parsed_as_a_type() -> None:
    with (
        client(PLACE) as (official, _),
        official.chat.completions.stream(
            model=MODEL, messages=[USER], response_format=Place
        ) as stream,
    ):
        parsed = [event.parsed for event in stream if isinstance(event, ContentDoneEvent)]
    assert parsed == [Place(city="Bern")]


def test_calls_are_parsed_as_a_type() -> None:
    tool = openai.pydantic_function_tool(Place, name="weather")
    with client(CALLS) as (official, backend):
        got = official.chat.completions.parse(model=MODEL, messages=[USER], tools=[tool])
    calls = got.choices[0].message.tool_calls or []
    assert [call.function.parsed_arguments for call in calls] == [Place(city="Bern"), Place(city="Basel")]  # fmt: skip
    assert backend.requests[0].tools[0].strict


def test_a_type_is_not_parsed_from_an_answer_that_was_cut() -> None:
    cut = [Started(10, 4), TextDelta('{"city":'), Finished("length", USAGE)]
    with client(cut) as (official, _), pytest.raises(openai.LengthFinishReasonError):
        official.chat.completions.parse(model=MODEL, messages=[USER], response_format=Place)


def test_a_call_cut_by_the_budget_is_told_as_length_and_not_as_a_call() -> None:
    cut = [*CALLS[:7], CallDelta(1, '{"city":"Ba'), Finished("length", USAGE)]
    tools: Any = [TOOL]
    with client(cut) as (official, _):
        got = official.chat.completions.create(
            model=MODEL, messages=[USER], tools=tools, tool_choice="required"
        )
    assert got.choices[0].finish_reason == "length"
    assert [call.id for call in got.choices[0].message.tool_calls or ()] == ["call_a"]


def test_a_required_call_cut_by_the_budget_is_no_error() -> None:
    cut = [CALLS[0], *CALLS[2:4], Finished("length", USAGE)]
    tools: Any = [TOOL]
    with client(cut) as (official, _):
        ask = official.chat.completions.create
        got = ask(model=MODEL, messages=[USER], tools=tools, tool_choice="required")
    choice = got.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == ""


def test_an_object_is_asked_for() -> None:
    with client(PLACE) as (official, backend):
        official.chat.completions.create(
            model=MODEL, messages=[USER], response_format={"type": "json_object"}
        )
    assert backend.requests[0].answer == Format("json")


def test_extensions_travel_in_the_extra_body() -> None:
    extra = {"top_k": 3, "min_p": 0.1, "think": True, "options": {"num_ctx": 4096}}
    with client(ANSWER) as (official, backend):
        official.chat.completions.create(model=MODEL, messages=[USER], extra_body=extra)
    asked = backend.requests[0]
    assert (asked.sampling.top_k, asked.sampling.min_p) == (3, 0.1)
    assert (asked.effort, asked.window) == ("medium", 4096)


@pytest.mark.parametrize(
    ("fields", "kind", "code", "said"),
    [
        ({"model": "gpt-4o"}, openai.BadRequestError, "model_not_found", "'gpt-4o' is not served"),
        ({"logprobs": True}, openai.BadRequestError, "unsupported_field", "logprobs"),
        ({"extra_body": {"new": 1}}, openai.BadRequestError, "unsupported_field", "field new"),
        ({"messages": []}, openai.BadRequestError, "invalid_request", "conversation is empty"),
    ],
)
def test_a_refusal_is_the_clients_error(
    fields: dict[str, Any], kind: type[openai.APIStatusError], code: str, said: str
) -> None:
    with client(ANSWER) as (official, _), pytest.raises(kind, match=said) as caught:
        official.chat.completions.create(**{"model": MODEL, "messages": [USER], **fields})
    assert (caught.value.code, caught.value.type) == (code, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "context_length_exceeded", openai.BadRequestError),
        (400, "prefill_wait_exceeded", openai.BadRequestError),
        (503, "insufficient_memory", openai.InternalServerError),
        (503, "prefill_deadline_exceeded", openai.InternalServerError),
        (500, "inference_error", openai.InternalServerError),
    ],
)
def test_a_failure_before_the_first_event_is_a_status(
    stream: bool, status: int, code: str, kind: type[openai.APIStatusError]
) -> None:
    script = [Failed(Failure(status, code, "no room"))]
    with client(script) as (official, _), pytest.raises(kind, match="no room") as caught:
        official.chat.completions.create(model=MODEL, messages=[USER], stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)


def test_a_failure_in_mid_stream_is_raised_and_nothing_follows() -> None:
    with client([Started(10, 4), TextDelta("Hi"), BROKEN]) as (official, _):
        seen = []
        stream = official.chat.completions.create(model=MODEL, messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="it broke") as caught:
            seen.extend(chunk.choices[0].finish_reason for chunk in stream)
        assert caught.value.code == "inference_error"
    assert seen == [None, None]


def test_a_failure_in_mid_answer_is_a_status_where_nothing_was_streamed() -> None:
    script = [Started(10, 4), TextDelta("Hi"), BROKEN]
    with client(script) as (official, _), pytest.raises(openai.InternalServerError, match="broke"):
        official.chat.completions.create(model=MODEL, messages=[USER])


def test_a_silent_stream_is_kept_alive_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.serve.app.KEEPALIVE_SECONDS", 0.05)
    script = [Started(10, 4), 0.5, TextDelta("Hi"), Finished("stop", USAGE)]
    body = {"model": MODEL, "messages": [USER], "stream": True}
    with client(script) as (official, _):
        stream = official.chat.completions.create(model=MODEL, messages=[USER], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hi"
        raw = httpx.post(f"{official.base_url}chat/completions", json=body).text
    frames = raw.split("\n\n")
    assert frames[1] == ": keepalive"
    assert {frame[:6] for frame in frames} == {"data: ", ": keep", ""}


def test_the_models() -> None:
    with client(ANSWER) as (official, _):
        names = [model.id for model in official.models.list()]
        assert names == [MODEL, f"{MODEL}+pirate"]
        for name in names:
            model: Any = official.models.retrieve(name)
            assert (model.id, model.context_window, model.max_output_tokens) == (name, 8192, 2048)
        with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not served here"):
            official.models.retrieve("gpt-4o")
