"""The official client against a server that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from headrace.serve import app
from headrace.serve.dialects import openai_responses
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    ReasoningDelta,
    TextDelta,
    Usage,
)
from headrace.serve.request import Format, Request, Text, ToolCall, Turn
from serve.dialects.responses import FUNCTION, NAME, PATCH, STARTED, called
from serve.scripted import CARD, ScriptedBackend
from serve.served import served

USAGE = Usage(7, 3, 5, 2)
ANSWER: list[Event | float] = [
    STARTED,
    ReasoningDelta("H"),
    ReasoningDelta("m"),
    TextDelta("Hello"),
    TextDelta(" wörld\n"),
    Finished("stop", USAGE),
]


@contextmanager
def client_of(backend: ScriptedBackend) -> Iterator[OpenAI]:
    with (
        served(app.create_app(backend, [openai_responses])) as url,
        OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def test_create() -> None:
    backend = ScriptedBackend(ANSWER)
    with client_of(backend) as client:
        response = client.responses.create(model=NAME, input="Hi", instructions="Be brief.")
    assert response.output_text == "Hello wörld\n"
    assert response.status == "completed"
    assert response.model == NAME
    assert [item.type for item in response.output] == ["reasoning", "message"]
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 5, 12)
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 2
    assert backend.requests == [
        Request(NAME, (Turn("system", (Text("Be brief."),)), Turn("user", (Text("Hi"),))))
    ]


def test_a_response_is_of_the_published_type() -> None:
    with client_of(ScriptedBackend([STARTED, ReasoningDelta("Hm"), TextDelta("Hi"), *called(0, "x", "weather", "{}"), *called(1, "y", "apply_patch", '{"input":""}'), Finished("tool_calls", USAGE)])) as client:  # fmt: skip
        response = client.responses.create(model=NAME, input="Hi", tools=[FUNCTION, PATCH])
    checked = type(response).model_validate(response.model_dump())
    assert [item.type for item in checked.output] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
    ]


def test_create_streamed() -> None:
    with (
        client_of(ScriptedBackend(ANSWER)) as client,
        client.responses.create(model=NAME, input="Hi", stream=True) as stream,
    ):
        events = list(stream)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump())


def test_the_streaming_helper() -> None:
    with (
        client_of(ScriptedBackend(ANSWER)) as client,
        client.responses.stream(model=NAME, input="Hi") as stream,
    ):
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert snapshots == ["Hello", "Hello wörld\n"]
    assert final.output_text == "Hello wörld\n"
    assert final.usage is not None
    assert final.usage.total_tokens == 12


def test_the_asynchronous_client() -> None:
    async def ask(url: str) -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            whole = await client.responses.create(model=NAME, input="Hi")
            async with client.responses.stream(model=NAME, input="Hi") as stream:
                final = await stream.get_final_response()
        return whole.output_text, final.output_text

    with served(app.create_app(ScriptedBackend(ANSWER), [openai_responses])) as url:
        assert asyncio.run(ask(url)) == ("Hello wörld\n", "Hello wörld\n")


def test_the_streaming_helper_with_calls() -> None:
    script = [
        STARTED,
        TextDelta("So"),
        *called(0, "x", "weather", '{"city":"Bern"}'),
        TextDelta("\n"),
        *called(1, "y", "apply_patch", '{"input":"+1"}'),
        Finished("tool_calls", USAGE),
    ]
    with (
        client_of(ScriptedBackend(script)) as client,
        client.responses.stream(model=NAME, input="Hi", tools=[FUNCTION, PATCH]) as stream,
    ):
        final = stream.get_final_response()
    kinds = ["message", "function_call", "message", "custom_tool_call"]
    assert [item.type for item in final.output] == kinds


def test_keepalive_disturbs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "KEEPALIVE_SECONDS", 0.02)
    script = [STARTED, 0.1, TextDelta("He"), 0.1, TextDelta("llo"), 0.1, Finished("stop", USAGE)]
    with (
        client_of(ScriptedBackend(script)) as client,
        client.responses.stream(model=NAME, input="Hi") as stream,
    ):
        events = list(stream)
        final = stream.get_final_response()
    assert [event.type for event in events].count("response.in_progress") > 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "Hello"


def test_a_long_call_that_is_held_back_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "KEEPALIVE_SECONDS", 0.05)
    pieces = ["{", *[" "] * 20, "}"]
    script: list[Event | float] = [STARTED, CallStarted(0, "x", "weather")]
    for piece in pieces:
        script += [0.02, CallDelta(0, piece)]
    script += [CallEnded(0, "".join(pieces)), Finished("tool_calls", USAGE)]
    with (
        client_of(ScriptedBackend(script)) as client,
        client.responses.create(model=NAME, input="Hi", tools=[FUNCTION], stream=True) as stream,
    ):
        kinds = [event.type for event in stream]
    assert kinds.index("response.output_item.added") > 3
    assert set(kinds[1 : kinds.index("response.output_item.added")]) == {"response.in_progress"}


class Answer(BaseModel):
    city: str
    degrees: int


def test_parse() -> None:
    script = [STARTED, TextDelta('{"city":"Bern",'), TextDelta('"degrees":3}'), Finished("stop", USAGE)]  # fmt: skip
    backend = ScriptedBackend(script)
    with client_of(backend) as client:
        response = client.responses.parse(model=NAME, input="Hi", text_format=Answer)
        with client.responses.stream(model=NAME, input="Hi", text_format=Answer) as stream:
            streamed = stream.get_final_response()
    assert response.output_parsed == Answer(city="Bern", degrees=3)
    assert streamed.output_parsed == Answer(city="Bern", degrees=3)
    answer = backend.requests[0].answer
    assert answer.kind == "schema"
    assert answer.schema is not None
    assert answer.schema["required"] == ["city", "degrees"]
    assert backend.requests[1].answer == answer


def test_json_object() -> None:
    backend = ScriptedBackend([STARTED, TextDelta("{}"), Finished("stop", USAGE)])
    with client_of(backend) as client:
        client.responses.create(
            model=NAME, input="Hi", text={"format": {"type": "json_object"}, "verbosity": "low"}
        )
    assert backend.requests[0].answer == Format("json")


class Weather(BaseModel):
    """Looks out."""

    city: str


def test_a_strict_tool_is_parsed_and_replayed() -> None:
    script = [STARTED, *called(0, "x", "Weather", '{"city":"Bern"}'), Finished("tool_calls", USAGE)]
    backend = ScriptedBackend(script)
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    with client_of(backend) as client:
        response = client.responses.parse(model=NAME, input="Hi", tools=tools)
        (call,) = response.output
        assert call.type == "function_call"
        assert call.parsed_arguments == Weather(city="Bern") or call.parsed_arguments == {"city": "Bern"}  # fmt: skip
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        client.responses.create(model=NAME, input=[{"role": "user", "content": "Hi"}, call, result])
    assert backend.requests[0].tools[0].strict
    assert backend.requests[1].turns[1].calls == (ToolCall("call_x", "Weather", '{"city":"Bern"}'),)


def tool_loop(request: Request) -> list[Event | float]:
    """Two calls at once, with a thought, and an answer to their results."""
    results = [turn for turn in request.turns if turn.role == "tool"]
    if results:
        text = ", ".join(turn.text for turn in results)
        return [STARTED, TextDelta(text), Finished("stop", USAGE)]
    return [
        STARTED,
        ReasoningDelta("Hm"),
        *called(0, "x", "weather", '{"city":"Bern"}'),
        TextDelta("\n"),
        *called(1, "y", "apply_patch", '{"input":"+1"}'),
        Finished("tool_calls", USAGE),
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_a_loop_of_tools(stream: bool) -> None:
    backend = ScriptedBackend(tool_loop)
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    with client_of(backend) as client:
        for _ in range(2):
            if stream:
                with client.responses.stream(model=NAME, input=history, tools=[FUNCTION, PATCH]) as told:  # fmt: skip
                    response: Any = told.get_final_response()
            else:
                response = client.responses.create(model=NAME, input=history, tools=[FUNCTION, PATCH])  # fmt: skip
            history += response.output
            for item in reversed(response.output):
                if item.type == "function_call":
                    history.append({"type": "function_call_output", "call_id": item.call_id, "output": item.arguments})  # fmt: skip
                elif item.type == "custom_tool_call":
                    history.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": item.input})  # fmt: skip
    assert response.output_text == '{"city":"Bern"}, +1'
    said, one, two = backend.requests[1].turns[1:]
    assert said.reasoning == "Hm"
    assert [call.id for call in said.calls] == ["call_x", "call_y"]
    assert (one, two) == (
        Turn("tool", (Text('{"city":"Bern"}'),), call_id="call_x"),
        Turn("tool", (Text("+1"),), call_id="call_y"),
    )


def test_a_cut_answer() -> None:
    script = [STARTED, TextDelta("Hel"), Finished("length", USAGE)]
    with client_of(ScriptedBackend(script)) as client:
        whole = client.responses.create(model=NAME, input="Hi", max_output_tokens=1)
        with client.responses.create(model=NAME, input="Hi", stream=True) as stream:
            last = list(stream)[-1]
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert last.type == "response.incomplete"
    assert last.response.output_text == "Hel"


def test_a_failure_in_mid_stream() -> None:
    failed = Failed(Failure(500, "inference_error", "it broke"))
    with (
        client_of(ScriptedBackend([STARTED, TextDelta("Hel"), failed])) as client,
        client.responses.create(model=NAME, input="Hi", stream=True) as stream,
    ):
        events = list(stream)
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error is not None
    assert (error.code, error.message) == ("inference_error", "it broke")
    assert "response.completed" not in [event.type for event in events]


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token(stream: bool) -> None:
    failed = Failed(Failure(400, "context_length_exceeded", "too long"))
    with (
        client_of(ScriptedBackend([failed])) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.responses.create(model=NAME, input="Hi", stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.type == "invalid_request_error"


def test_a_failure_of_a_whole_response() -> None:
    failed = Failed(Failure(503, "insufficient_memory", "no room"))
    with (
        client_of(ScriptedBackend([STARTED, TextDelta("Hel"), failed])) as client,
        pytest.raises(openai.InternalServerError) as caught,
    ):
        client.responses.create(model=NAME, input="Hi")
    assert caught.value.status_code == 503
    assert caught.value.code == "insufficient_memory"


def test_refusals_and_what_is_not_stored() -> None:
    with client_of(ScriptedBackend()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="gpt-5", input="Hi")
        assert caught.value.code == "model_not_found"
        assert CARD.name in caught.value.message
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model=NAME, input="Hi", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError, match="no response 'resp_1'"):
            client.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError, match="no response 'resp_1'"):
            client.responses.delete("resp_1")
