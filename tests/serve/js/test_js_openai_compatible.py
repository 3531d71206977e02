"""`ai` over `@ai-sdk/openai-compatible`, real packages in a real Node, against `/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

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
from headrace.serve.request import Format, Request, Sampling, Text, ToolCall, ToolChoice, Turn
from serve.scripted import CARD, ScriptedBackend
from serve.served import served

USAGE = Usage(prompt_tokens=11, cached_tokens=4, new_tokens=7, reasoning_tokens=3)
HEAD: list[Event | float] = [Started(11, 4)]
HELLO: list[Event | float] = [
    *HEAD,
    ReasoningDelta("Hm"),
    TextDelta("Hel"),
    TextDelta("lo"),
    Finished("stop", USAGE),
]
CALLING: list[Event | float] = [
    *HEAD,
    ReasoningDelta("Look"),
    CallStarted(0, "a", "weather"),
    CallDelta(0, '{"city":'),
    CallDelta(0, '"Ulm"}'),
    CallEnded(0, '{"city":"Ulm"}'),
    CallStarted(1, "b", "weather"),
    CallDelta(1, '{"city":"Bern"}'),
    CallEnded(1, '{"city":"Bern"}'),
    Finished("tool_calls", USAGE),
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALLS = ("generateText", "streamText")
Run = Callable[..., Any]


def once_called(request: Request) -> Sequence[Event | float]:
    """First two calls, then a greeting."""
    return HELLO if request.turns[-1].role == "tool" else CALLING


@contextmanager
def asked(program: Run, script: Any) -> Iterator[tuple[Run, ScriptedBackend]]:
    """What runs a job of the client against a server that follows the script, and who it asked."""
    backend = ScriptedBackend(script, replace(CARD, vision=True))
    with served(create_app(backend, [openai_chat])) as url:
        yield (
            lambda **job: program("openai_compatible", url, **{"model": CARD.name, **job}),
            backend,
        )


@pytest.mark.parametrize("call", CALLS)
def test_text(program: Run, call: str) -> None:
    with asked(program, HELLO) as (run, backend):
        (step,) = run(call=call, prompt="Hi")["steps"]
    assert (step["text"], step["reasoning"], step["finishReason"]) == ("Hello", "Hm", "stop")
    assert backend.requests == [Request(CARD.name, (Turn("user", (Text("Hi"),)),))]


@pytest.mark.parametrize("call", CALLS)
def test_usage(program: Run, call: str) -> None:
    with asked(program, HELLO) as (run, _):
        usage = run(call=call, prompt="Hi")["steps"][0]["usage"]
    assert (usage["inputTokens"], usage["outputTokens"], usage["totalTokens"]) == (11, 7, 18)
    assert usage["inputTokenDetails"] == {"noCacheTokens": 7, "cacheReadTokens": 4}
    assert usage["outputTokenDetails"] == {"textTokens": 4, "reasoningTokens": 3}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("raw", "unified"), [("stop_sequence", "stop"), ("length", "length"), ("context", "length")]
)
def test_finish_reasons(program: Run, call: str, raw: Any, unified: str) -> None:
    with asked(program, [*HEAD, TextDelta("Hi"), Finished(raw, USAGE)]) as (run, _):
        (step,) = run(call=call, prompt="Hi")["steps"]
    assert step["finishReason"] == unified


def test_settings_arrive(program: Run) -> None:
    settings = {
        "maxOutputTokens": 5,
        "temperature": 0.5,
        "topP": 0.75,
        "presencePenalty": 0.25,
        "seed": 7,
        "stopSequences": ["END"],
        "providerOptions": {"headrace": {"reasoningEffort": "high"}},
    }
    with asked(program, HELLO) as (run, backend):
        run(call="generateText", prompt="Hi", settings=settings)
    (request,) = backend.requests
    assert request.sampling == Sampling(0.5, 0.75, presence_penalty=0.25, seed=7)
    assert (request.limit, request.stop, request.effort) == (5, ("END",), "high")


@pytest.mark.parametrize("call", CALLS)
def test_a_loop_of_tools(program: Run, call: str) -> None:
    with asked(program, once_called) as (run, backend):
        told = run(call=call, prompt="Where is it warm?", tools=["weather"])
    first, second = told["steps"]
    assert [c["input"] for c in first["calls"]] == [{"city": "Ulm"}, {"city": "Bern"}]
    assert (first["finishReason"], second["text"]) == ("tool-calls", "Hello")
    asking, calling, *results = backend.requests[1].turns
    assert asking == Turn("user", (Text("Where is it warm?"),))
    ids = [c["toolCallId"] for c in first["calls"]]
    arguments = ('{"city":"Ulm"}', '{"city":"Bern"}')
    assert calling.calls == tuple(
        ToolCall(id, "weather", text) for id, text in zip(ids, arguments, strict=True)
    )
    assert calling.reasoning == "Look"
    assert [(turn.call_id, turn.text) for turn in results] == [
        (id, f'{{"city":"{city}","degrees":21}}')
        for id, city in zip(ids, ("Ulm", "Bern"), strict=True)
    ]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_cut_by_the_limit_is_not_run(program: Run, call: str) -> None:
    """The client ends a streamed call itself where the stream does; its arguments don't parse, and nothing runs."""
    script = [
        *HEAD,
        CallStarted(0, "a", "weather"),
        CallDelta(0, '{"ci'),
        Finished("length", USAGE),
    ]
    with asked(program, script) as (run, _):
        told = run(call=call, prompt="Hi", tools=["weather"], maxSteps=1)
    (step,) = told["steps"]
    assert (step["results"], step["finishReason"]) == ([], "length")


@pytest.mark.parametrize(
    ("choice", "asks"),
    [
        ("required", ToolChoice("required")),
        ({"type": "tool", "toolName": "weather"}, ToolChoice("required", "weather")),
    ],
)
def test_a_choice_of_tools(program: Run, choice: Any, asks: ToolChoice) -> None:
    with asked(program, once_called) as (run, backend):
        job = {"tools": ["weather"], "maxSteps": 1, "settings": {"toolChoice": choice}}
        (step,) = run(call="generateText", prompt="Hi", **job)["steps"]
    assert backend.requests[0].choice == asks
    assert len(step["calls"]) == 2


def test_an_object(program: Run) -> None:
    script = [*HEAD, TextDelta('{"city":"Ulm"}'), Finished("stop", USAGE)]
    with asked(program, script) as (run, backend):
        told = run(call="generateObject", prompt="Hi", schema=SCHEMA)
    assert told["object"] == {"city": "Ulm"}
    assert backend.requests[0].answer == Format("schema", SCHEMA)


@pytest.mark.parametrize("call", CALLS)
def test_an_output(program: Run, call: str) -> None:
    script = [*HEAD, TextDelta('{"city":'), TextDelta('"Ulm"}'), Finished("stop", USAGE)]
    with asked(program, script) as (run, backend):
        told = run(call=call, prompt="Hi", schema=SCHEMA)
    assert told["output"] == {"city": "Ulm"}
    assert backend.requests[0].answer == Format("schema", SCHEMA)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [400, 503])
def test_an_error(program: Run, call: str, status: int) -> None:
    with asked(program, [Failed(Failure(status, "some_code", "why"))]) as (run, _):
        told = run(call=call, prompt="Hi")
    error = told["error"] if call == "generateText" else told["errors"][0]
    assert (error["name"], error["message"]) == ("AI_APICallError", "why")
    assert (error["statusCode"], error["isRetryable"]) == (status, status == 503)


def test_a_failure_in_the_middle_of_a_stream(program: Run) -> None:
    script = [*HEAD, TextDelta("Hel"), Failed(Failure(500, "inference_error", "it broke"))]
    with asked(program, script) as (run, _):
        told = run(call="streamText", prompt="Hi")
    assert told["text"] == "Hel"
    assert "error" in told["parts"]
    assert len(told["errors"]) == 1


def test_an_abort_stops_the_work(program: Run) -> None:
    script: list[Event | float] = [*HEAD, TextDelta("Hel"), TextDelta("lo")]
    script += [event for _ in range(200) for event in (0.05, TextDelta("!"))]
    with asked(program, [*script, Finished("stop", USAGE)]) as (run, backend):
        told = run(call="streamText", prompt="Hi", abortAfter=5)
        deadline = time.monotonic() + 5
        while not backend.runs[0].cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told["parts"][-1] == "abort"
    assert backend.runs[0].cancelled
