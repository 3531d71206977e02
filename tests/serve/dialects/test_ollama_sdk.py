"""The official Python SDK of Ollama against a real server with a scripted backend."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import ollama as sdk
import pytest

from headrace.serve.app import create_app
from headrace.serve.dialect import Card
from headrace.serve.dialects import ollama
from headrace.serve.events import (
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
from headrace.serve.request import Format, Sampling, Text, ToolCall, Turn
from headrace.values import Tool
from serve.dialects.ollama_asked import PNG, PNG64, RED
from serve.scripted import CARD, ScriptedBackend
from serve.served import served

MODEL = CARD.name
STARTED = Started(11, 4)
END = Finished("stop", Usage(11, 4, 7, 3, prefill_seconds=0.25, decode_seconds=1.5))
ANSWER: list[Event] = [STARTED, ReasoningDelta("Hm."), TextDelta("Hé"), TextDelta("llo"), END]
ASK = [{"role": "user", "content": "Hello"}]


@contextmanager
def connected(
    script: Sequence[Event] = ANSWER, card: Card = CARD
) -> Iterator[tuple[sdk.Client, ScriptedBackend]]:
    backend = ScriptedBackend(script, card)
    with served(create_app(backend, [ollama])) as url:
        yield sdk.Client(url), backend


def test_chat() -> None:
    with connected() as (client, backend):
        reply = client.chat(
            MODEL, ASK, think=True, options=sdk.Options(temperature=0.5, stop=["x"], num_predict=9)
        )
    assert reply.message == sdk.Message(role="assistant", content="Héllo", thinking="Hm.")
    assert (reply.model, reply.done, reply.done_reason) == (MODEL, True, "stop")
    assert (reply.prompt_eval_count, reply.eval_count) == (11, 7)
    assert (reply.prompt_eval_duration, reply.eval_duration) == (250_000_000, 1_500_000_000)
    [request] = backend.requests
    assert request.turns == (Turn("user", (Text("Hello"),)),)
    assert (request.effort, request.limit, request.stop) == ("medium", 9, ("x",))
    assert request.sampling == Sampling(temperature=0.5)


def test_chat_streams() -> None:
    with connected() as (client, _):
        parts = list(client.chat(MODEL, ASK, stream=True, think="high"))
    assert [(part.message.thinking, part.message.content) for part in parts] == [
        ("Hm.", ""),
        (None, "Hé"),
        (None, "llo"),
        (None, ""),
    ]
    assert [part.done for part in parts] == [False, False, False, True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 7)


def test_generate() -> None:
    with connected(card=replace(CARD, vision=True)) as (client, backend):
        reply = client.generate(MODEL, "Hello", system="Be brief.", keep_alive="5m", images=[PNG])
    assert (reply.response, reply.thinking, reply.done_reason) == ("Héllo", "Hm.", "stop")
    system, user = backend.requests[0].turns
    assert system == Turn("system", (Text("Be brief."),))
    assert user == Turn("user", (RED, Text("Hello")))


def test_generate_streams() -> None:
    with connected() as (client, backend):
        parts = list(client.generate(MODEL, "Hello", raw=True, stream=True))
    assert "".join(part.response or "" for part in parts) == "Héllo"
    assert parts[-1].total_duration == 1_750_000_000
    assert backend.requests[0].raw == "Hello"


def test_the_asynchronous_client() -> None:
    async def talk(url: str) -> str:
        client = sdk.AsyncClient(url)
        whole = await client.chat(MODEL, ASK)
        parts = [part async for part in await client.generate(MODEL, "Hello", stream=True)]
        return f"{whole.message.content} {''.join(part.response or '' for part in parts)}"

    with served(create_app(ScriptedBackend(ANSWER), [ollama])) as url:
        assert asyncio.run(talk(url)) == "Héllo Héllo"


def weather(city: str, days: int | None = None, units: int | str = 1) -> str:
    """Tells the weather.

    Args:
        city: where
        days: how many
        units: of what
    """
    return f"Rain in {city}"


CALLED: list[Event] = [
    STARTED,
    ReasoningDelta("Hm."),
    CallStarted(0, "a1", "weather"),
    CallEnded(0, '{"city":"Oslo"}'),
    CallStarted(1, "b2", "weather"),
    CallEnded(1, '{"city":"Rome","days":2}'),
    Finished("tool_calls", Usage(11, 4, 7)),
]


def test_a_function_is_a_tool() -> None:
    with connected(CALLED) as (client, backend):
        client.chat(MODEL, ASK, tools=[weather])
    [tool] = backend.requests[0].tools
    assert (tool.name, tool.description.strip()) == ("weather", "Tells the weather.")
    assert tool.parameters["properties"] == {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "units": {"type": ["integer", "string"], "description": "of what"},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools(stream: bool) -> None:
    """The loop of Ollama's own documentation: the SDK drops ids, and results are matched all the same."""

    def script(request: Any) -> Sequence[Event]:
        return ANSWER if any(turn.role == "tool" for turn in request.turns) else CALLED

    backend = ScriptedBackend(script)
    with served(create_app(backend, [ollama])) as url:
        client = sdk.Client(url)
        if stream:
            parts = list(client.chat(MODEL, ASK, tools=[weather], stream=True))
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            said = sdk.Message(role="assistant", thinking="Hm.", tool_calls=calls)
        else:
            said = client.chat(MODEL, ASK, tools=[weather]).message
            calls = list(said.tool_calls or ())
        functions: dict[str, Callable[..., str]] = {"weather": weather}
        results = [
            {
                "role": "tool",
                "tool_name": call.function.name,
                "content": functions[call.function.name](**call.function.arguments),
            }
            for call in calls
        ]
        reply = client.chat(MODEL, [*ASK, said, *results], tools=[weather])
    assert reply.message.content == "Héllo"
    assistant, *answers = backend.requests[1].turns[1:]
    assert assistant == Turn(
        "assistant",
        reasoning="Hm.",
        calls=(
            ToolCall("call_1_0", "weather", '{"city": "Oslo"}'),
            ToolCall("call_1_1", "weather", '{"city": "Rome", "days": 2}'),
        ),
    )
    assert [(turn.call_id, turn.text) for turn in answers] == [
        ("call_1_0", "Rain in Oslo"),
        ("call_1_1", "Rain in Rome"),
    ]


def test_a_tool_as_a_dictionary() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    with connected() as (client, backend):
        client.chat(MODEL, ASK, tools=[{"type": "function", "function": function}])
    assert backend.requests[0].tools == (Tool("f", "", function["parameters"]),)


def test_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    with connected() as (client, backend):
        client.chat(MODEL, ASK, format=schema)
        client.generate(MODEL, "Hello", format="json")
        client.generate(MODEL, "Hello", format="")
    told = [request.answer for request in backend.requests]
    assert told == [Format("schema", schema), Format("json"), Format()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_load(stream: bool) -> None:
    with connected() as (client, backend):
        chat: Any = client.chat(MODEL, [], stream=stream)
        generated: Any = client.generate(MODEL, "", stream=stream, keep_alive=0)
        if stream:
            [chat], [generated] = chat, generated
    assert (chat.done, chat.done_reason, chat.message.content) == (True, "load", "")
    assert (generated.done, generated.done_reason, generated.response) == (True, "load", "")
    assert backend.requests == []


def test_list() -> None:
    with connected() as (client, _):
        models = client.list().models
    assert [model.model for model in models] == [MODEL, f"{MODEL}+pirate"]
    assert models[0] == sdk.ListResponse.Model(
        model=MODEL,
        modified_at=datetime.fromtimestamp(CARD.created, UTC),
        digest="ab" * 32,
        size=CARD.size_bytes,
        details=DETAILS,
    )


DETAILS = sdk._types.ModelDetails(
    parent_model="",
    format="headrace",
    family="llama",
    families=["llama"],
    parameter_size="1.00M",
    quantization_level="4-bit",
)


def test_ps() -> None:
    with connected(card=replace(CARD, resident_bytes=12345)) as (client, _):
        [model] = client.ps().models
    assert model == sdk.ProcessResponse.Model(
        model=MODEL,
        name=MODEL,
        digest="ab" * 32,
        expires_at=datetime(2200, 1, 1, tzinfo=UTC),
        size=12345,
        size_vram=0,
        details=DETAILS,
        context_length=8192,
    )


def test_show() -> None:
    card = replace(CARD, vision=True, model_window=9999, architecture={"embedding_length": 64})
    with connected(card=card) as (client, _):
        told = client.show("painted")
    assert told == sdk.ShowResponse(
        modified_at=datetime.fromtimestamp(CARD.created, UTC),
        template="{{ messages }}",
        modelfile="FROM painted:1m\n",
        details=DETAILS,
        model_info={
            "llama.embedding_length": 64,
            "general.architecture": "llama",
            "general.parameter_count": 1_000_000,
            "llama.context_length": 8192,
        },
        parameters="",
        capabilities=["completion", "tools", "vision", "thinking"],
    )


def test_show_of_another_model() -> None:
    with connected() as (client, _), pytest.raises(sdk.ResponseError, match="not served") as caught:
        client.show("other")
    assert caught.value.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(stream: bool) -> None:
    with connected() as (client, backend):
        with pytest.raises(sdk.ResponseError, match=r"unknown field options\.speed") as caught:
            list(client.chat(MODEL, ASK, options={"speed": 1}, stream=stream))  # type: ignore[call-overload]
        assert caught.value.status_code == 400
        assert backend.requests == []


FAILURE = Failed(Failure(503, "insufficient_memory", "no memory", "free some"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_answer_is_a_status(stream: bool) -> None:
    with connected([FAILURE]) as (client, _):
        with pytest.raises(sdk.ResponseError, match="no memory") as caught:
            list(client.chat(MODEL, ASK, stream=stream))  # type: ignore[call-overload]
        assert caught.value.status_code == 503


def test_a_failure_in_mid_stream_raises() -> None:
    with connected([STARTED, TextDelta("He"), FAILURE]) as (client, _):
        parts = client.chat(MODEL, ASK, stream=True)
        assert next(parts).message.content == "He"
        with pytest.raises(sdk.ResponseError, match=r"no memory \(free some\)"):
            next(parts)


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        (lambda client: client.embed(MODEL, "x"), 400),
        (lambda client: client.embeddings(MODEL, "x"), 400),
        (lambda client: client.pull(MODEL), 501),
        (lambda client: client.push(MODEL), 501),
        (lambda client: client.create("new", from_=MODEL), 501),
        (lambda client: client.copy(MODEL, "new"), 501),
        (lambda client: client.delete(MODEL), 501),
        (lambda client: list(client.pull(MODEL, stream=True)), 501),
    ],
    ids=["embed", "embeddings", "pull", "push", "create", "copy", "delete", "pull-stream"],
)
def test_what_is_not_offered(ask: Callable[[sdk.Client], Any], status: int) -> None:
    with connected() as (client, _):
        with pytest.raises(sdk.ResponseError, match=r"not (supported|manage)") as caught:
            ask(client)
        assert caught.value.status_code == status


def test_images_of_every_form() -> None:
    with connected(card=replace(CARD, vision=True)) as (client, backend):
        for value in (PNG, PNG64):
            client.chat(MODEL, [{**ASK[0], "images": [value]}])
    assert [request.turns[0].images for request in backend.requests] == [(RED,), (RED,)]
    assert base64.b64decode(PNG64) == PNG


# --- what the command line sends, field by field


SHOWN = {"model": "painted", "system": "", "template": "", "verbose": False, "options": None, "name": ""}  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [SHOWN, {"name": "painted"}, {"model": "", "name": MODEL}, {"model": MODEL, "verbose": True}, {**SHOWN, "options": {}}],
    ids=str,
)  # fmt: skip
def test_show_as_the_command_line_asks(body: dict[str, Any]) -> None:
    with served(create_app(ScriptedBackend(), [ollama])) as url:
        told = httpx.post(f"{url}/api/show", json=body)
    assert told.status_code == 200
    assert told.json()["max_context_tokens"] == 8192
    assert told.json()["context_policy"]["configured_window"] == 8192


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "model is missing"),
        ({"model": "", "name": ""}, 400, "model is missing"),
        ({"model": MODEL, "system": "x"}, 400, "system"),
        ({"model": MODEL, "template": "x"}, 400, "template"),
        ({"model": MODEL, "options": {"a": 1}}, 400, "options"),
        ({"model": MODEL, "more": 1}, 400, "unknown field more"),
        ({"name": "other"}, 404, "not served"),
    ],
    ids=str,
)
def test_show_is_refused(body: dict[str, Any], status: int, said: str) -> None:
    with served(create_app(ScriptedBackend(), [ollama])) as url:
        told = httpx.post(f"{url}/api/show", json=body)
    assert told.status_code == status
    assert list(told.json()) == ["error"]
    assert said in told.json()["error"]


def test_the_command_line_finds_the_server() -> None:
    with served(create_app(ScriptedBackend(), [ollama])) as url:
        assert httpx.head(url).status_code == 200
        assert "Ollama is running" in httpx.get(url).text
        assert httpx.get(f"{url}/api/version").json() == {"version": "0.0.1"}
        blob = f"{url}/api/blobs/sha256:{'0' * 64}"
        assert httpx.head(blob).status_code == 404  # else it takes the blob for sent
        assert list(httpx.get(blob).json()) == ["error"]
        assert httpx.post(blob, content=b"x").status_code == 501


RUN = {"model": "painted", "format": "", "options": {}, "keep_alive": "5m0s", "think": True}
ONCE = {**RUN, "prompt": "Hello", "suffix": "", "system": "", "template": "", "images": []}
TALK = {**RUN, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(("path", "body"), [("generate", ONCE), ("chat", TALK)])
def test_a_run_of_the_command_line(path: str, body: dict[str, Any]) -> None:
    with served(create_app(ScriptedBackend(ANSWER), [ollama])) as url:
        told = httpx.post(f"{url}/api/{path}", json=body)
    assert told.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in told.text.splitlines()] == [False, False, False, True]  # fmt: skip
