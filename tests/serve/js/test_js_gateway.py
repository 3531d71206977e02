"""`ai` over `@ai-sdk/gateway`, real packages in a real Node: three generations of them, one for each version served."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from headrace.serve.app import create_app
from headrace.serve.dialects import gateway
from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Failed,
    Failure,
    Finished,
    Reasoning,
    ReasoningDelta,
    Reply,
    Said,
    Started,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.request import (
    Format,
    Image,
    Request,
    Sampling,
    Text,
    ToolCall,
    ToolChoice,
    Turn,
)
from serve.interleaved import SCRIPTS
from serve.scripted import CARD, ScriptedBackend
from serve.served import served

MODEL = "headrace/painted:1m"
SDKS = ("ai", "ai6", "ai5")
USAGE = Usage(prompt_tokens=11, cached_tokens=4, new_tokens=7, reasoning_tokens=3)
HEAD: list[Event | float] = [Started(11, 4)]
HELLO: list[Event | float] = [
    *HEAD,
    ReasoningDelta("Hm"),
    TextDelta("Hel"),
    TextDelta("lo"),
    Finished("stop", USAGE),
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
Run = Callable[..., Any]


@pytest.fixture(params=SDKS)
def sdk(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def asked(program: Run, script: Any, **fixed: Any) -> Iterator[tuple[Run, ScriptedBackend]]:
    """What runs a job of the client against a server that follows the script, and who it asked."""
    backend = ScriptedBackend(script, replace(CARD, vision=True))
    with served(create_app(backend, [gateway])) as url:
        yield lambda **job: program("gateway", url, **{"model": MODEL, **fixed, **job}), backend


def calling(*calls: tuple[str, str, str]) -> list[Event | float]:
    """calls: ids, names and arguments."""
    events: list[Event | float] = [*HEAD]
    for index, (id, name, arguments) in enumerate(calls):
        half = len(arguments) // 2
        events += [
            CallStarted(index, id, name),
            CallDelta(index, arguments[:half]),
            CallDelta(index, arguments[half:]),
            CallEnded(index, arguments),
        ]
    return [*events, Finished("tool_calls", USAGE)]


def once_called(*calls: tuple[str, str, str]) -> Callable[[Request], Sequence[Event | float]]:
    """First the calls, then a greeting."""
    return lambda request: HELLO if request.turns[-1].role == "tool" else calling(*calls)


def test_the_models_and_credits(program: Run, sdk: str) -> None:
    with asked(program, HELLO) as (run, _):
        told = run(sdk=sdk, call="catalogue")
    assert [model["id"] for model in told["models"]] == [MODEL, f"{MODEL}+pirate"]
    assert told["credits"] == {"balance": "0", "totalUsed": "0"}


def test_generate_text(program: Run, sdk: str) -> None:
    with asked(program, HELLO) as (run, backend):
        told = run(sdk=sdk, call="generateText", prompt="Hi")
    (step,) = told["steps"]
    assert (step["text"], step["reasoning"], step["finishReason"]) == ("Hello", "Hm", "stop")
    assert step["warnings"] == []
    assert backend.requests == [Request("painted:1m", (Turn("user", (Text("Hi"),)),))]


def test_stream_text(program: Run, sdk: str) -> None:
    with asked(program, HELLO) as (run, _):
        told = run(sdk=sdk, call="streamText", prompt="Hi")
    assert told["parts"] == [
        "start", "start-step", "reasoning-start", "reasoning-delta", "reasoning-end",
        "text-start", "text-delta", "text-delta", "text-end", "finish-step", "finish",
    ]  # fmt: skip
    assert (told["text"], told["errors"]) == ("Hello", [])
    assert (told["steps"][0]["reasoning"], told["steps"][0]["finishReason"]) == ("Hm", "stop")


@pytest.mark.parametrize("call", ["generateText", "streamText"])
def test_usage(program: Run, sdk: str, call: str) -> None:
    with asked(program, HELLO) as (run, _):
        usage = run(sdk=sdk, call=call, prompt="Hi")["steps"][0]["usage"]
    assert (usage["inputTokens"], usage["outputTokens"], usage["totalTokens"]) == (11, 7, 18)
    if sdk == "ai5":
        assert (usage["cachedInputTokens"], usage["reasoningTokens"]) == (4, 3)
    else:
        assert usage["inputTokenDetails"] == {"noCacheTokens": 7, "cacheReadTokens": 4}
        assert usage["outputTokenDetails"] == {"textTokens": 4, "reasoningTokens": 3}


@pytest.mark.parametrize("call", ["generateText", "streamText"])
@pytest.mark.parametrize(
    ("raw", "unified"),
    [("stop_sequence", "stop"), ("length", "length"), ("context", "length")],
)
def test_finish_reasons(program: Run, sdk: str, call: str, raw: Any, unified: str) -> None:
    with asked(program, [*HEAD, TextDelta("Hi"), Finished(raw, USAGE)]) as (run, _):
        (step,) = run(sdk=sdk, call=call, prompt="Hi")["steps"]
    assert step["finishReason"] == unified
    assert step["rawFinishReason"] == (None if sdk == "ai5" else raw)


def test_settings_arrive(program: Run, sdk: str) -> None:
    settings = {
        "maxOutputTokens": 5,
        "temperature": 0.5,
        "topP": 0.75,
        "topK": 9,
        "presencePenalty": 0.25,
        "seed": 7,
        "stopSequences": ["END"],
        "providerOptions": {"headrace": {"reasoningEffort": "high", "minP": 0.125}},
        "headers": {"x-mine": "1"},
    }
    with asked(program, HELLO) as (run, backend):
        run(sdk=sdk, call="generateText", prompt="Hi", settings=settings)
    (request,) = backend.requests
    assert request.sampling == Sampling(0.5, 0.75, 9, 0.125, 0.25, None, 7)
    assert (request.limit, request.stop, request.effort) == (5, ("END",), "high")


@pytest.mark.parametrize(("effort", "asks"), [("none", None), ("low", "low"), ("xhigh", "xhigh")])
def test_reasoning_is_a_setting_of_the_newest(program: Run, effort: str, asks: Any) -> None:
    with asked(program, HELLO) as (run, backend):
        run(sdk="ai", call="generateText", prompt="Hi", settings={"reasoning": effort})
    assert backend.requests[0].effort == asks


@pytest.mark.parametrize("call", ["generateText", "streamText"])
def test_a_loop_of_tools(program: Run, sdk: str, call: str) -> None:
    """Two calls at once, their results in one message, and an answer; the reasoning comes back too."""
    calls = (("a", "weather", '{"city":"Ulm"}'), ("b", "weather", '{"city":"Bern"}'))
    script = once_called(*calls)

    def thinking(request: Request) -> Sequence[Event | float]:
        events = [*script(request)]
        return events if events == HELLO else [events[0], ReasoningDelta("Look"), *events[1:]]

    with asked(program, thinking) as (run, backend):
        told = run(sdk=sdk, call=call, prompt="Where is it warm?", tools=["weather"])
    first, second = told["steps"]
    assert [(c["toolCallId"], c["input"]) for c in first["calls"]] == [
        ("call_a", {"city": "Ulm"}),
        ("call_b", {"city": "Bern"}),
    ]
    assert (first["finishReason"], second["text"]) == ("tool-calls", "Hello")
    made = tuple(ToolCall(f"call_{id}", name, arguments) for id, name, arguments in calls)
    assert backend.requests[1].turns == (
        Turn("user", (Text("Where is it warm?"),)),
        Turn("assistant", reasoning="Look", calls=made),
        *(
            Turn(
                "tool",
                (Text(f'{{"city":"{city}","degrees":21}}'),),
                call_id=id,
                tool_name="weather",
            )
            for id, city in (("call_a", "Ulm"), ("call_b", "Bern"))
        ),
    )


@pytest.mark.parametrize(
    "name", ["reasoning between calls", "text around calls", "text around reasoning"]
)
def test_forms_of_the_gateway(program: Run, sdk: str, name: str) -> None:
    """Both keep the order of what was said, and replay it alike."""
    told, replays = [], []
    for call in ("generateText", "streamText"):

        def script(request: Request) -> Sequence[Event | float]:
            return SCRIPTS[name] if len(request.turns) == 1 else HELLO

        with asked(program, script) as (run, backend):
            steps = run(sdk=sdk, call=call, prompt="Hi", tools=["weather"])["steps"]
        told.append(steps[0]["said"])
        replays.append(backend.requests[1:])
    assert told[0] == told[1]
    assert [kind for kind, _ in told[0]] == [
        {Reasoning: "reasoning", Text: "text", ToolCall: "tool-call"}[type(part)]
        for part in parts(name)
    ]
    assert replays[0] == replays[1]


def parts(name: str) -> tuple[Said, ...]:
    reply = collected(SCRIPTS[name])
    assert isinstance(reply, Reply)
    return reply.parts


def test_the_parts_of_a_streamed_call(program: Run, sdk: str) -> None:
    script = once_called(("a", "weather", '{"city":"Ulm"}'))
    with asked(program, script) as (run, _):
        told = run(sdk=sdk, call="streamText", prompt="Hi", tools=["weather"])
    assert told["parts"][: told["parts"].index("finish-step")] == [
        "start", "start-step", "tool-input-start", "tool-input-delta", "tool-input-delta",
        "tool-input-end", "tool-call", "tool-result",
    ]  # fmt: skip


def test_a_tool_that_fails_is_told_so(program: Run, sdk: str) -> None:
    with asked(program, once_called(("a", "broken", "{}"))) as (run, backend):
        told = run(sdk=sdk, call="generateText", prompt="Hi", tools=["broken"])
    assert told["steps"][-1]["text"] == "Hello"
    shown = "Error: out of order" if sdk == "ai" else "out of order"
    assert backend.requests[1].turns[-1] == Turn(
        "tool", (Text(shown),), call_id="call_a", tool_name="broken"
    )


@pytest.mark.parametrize("call", ["generateText", "streamText"])
def test_a_call_cut_by_the_limit_is_not_run(program: Run, sdk: str, call: str) -> None:
    script = [
        *HEAD,
        CallStarted(0, "a", "weather"),
        CallDelta(0, '{"ci'),
        Finished("length", USAGE),
    ]
    with asked(program, script) as (run, backend):
        (step,) = run(sdk=sdk, call=call, prompt="Hi", tools=["weather"])["steps"]
    assert (step["calls"], step["finishReason"], len(backend.requests)) == ([], "length", 1)


@pytest.mark.parametrize(
    ("choice", "asks"),
    [
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "tool", "toolName": "weather"}, ToolChoice("required", "weather")),
    ],
)
def test_a_choice_of_tools(program: Run, sdk: str, choice: Any, asks: ToolChoice) -> None:
    script = (
        HELLO if choice in ("auto", "none") else once_called(("a", "weather", '{"city":"Ulm"}'))
    )
    with asked(program, script) as (run, backend):
        job = {"tools": ["weather"], "maxSteps": 1, "settings": {"toolChoice": choice}}
        (step,) = run(sdk=sdk, call="generateText", prompt="Hi", **job)["steps"]
    assert backend.requests[0].choice == asks
    assert len(step["calls"]) == (asks.mode == "required")


def test_an_object(program: Run, sdk: str) -> None:
    text = '{"city":"Ulm","degrees":21}'
    with asked(program, [*HEAD, TextDelta(text), Finished("stop", USAGE)]) as (run, backend):
        told = run(sdk=sdk, call="generateObject", prompt="Hi", schema=SCHEMA)
    assert told == {"object": {"city": "Ulm", "degrees": 21}, "finishReason": "stop"}
    assert backend.requests[0].answer == Format("schema", SCHEMA)


@pytest.mark.parametrize("call", ["generateText", "streamText"])
def test_an_output_of_the_newest(program: Run, call: str) -> None:
    script = [
        *HEAD,
        TextDelta('{"city":"Ulm",'),
        TextDelta('"degrees":21}'),
        Finished("stop", USAGE),
    ]
    with asked(program, script) as (run, backend):
        told = run(sdk="ai", call=call, prompt="Hi", schema=SCHEMA)
    assert told["output"] == {"city": "Ulm", "degrees": 21}
    assert backend.requests[0].answer == Format("schema", SCHEMA)


def test_an_image(program: Run, sdk: str) -> None:
    content = [
        {"type": "text", "text": "What is it?"},
        {"type": "file", "mediaType": "image/png", "base64": base64.b64encode(PNG).decode()},
    ]
    with asked(program, HELLO) as (run, backend):
        run(sdk=sdk, call="generateText", messages=[{"role": "user", "content": content}])
    parts = (Text("What is it?"), Image(PNG, "image/png"))
    assert backend.requests[0].turns == (Turn("user", parts),)


@pytest.mark.parametrize("call", ["generateText", "streamText"])
@pytest.mark.parametrize(
    ("status", "code", "name"),
    [
        (400, "context_length_exceeded", "GatewayInvalidRequestError"),
        (401, "unauthorized", "GatewayAuthenticationError"),
        (403, "forbidden_host", "GatewayForbiddenError"),
        (429, "too_many_requests", "GatewayRateLimitError"),
        (503, "insufficient_memory", "GatewayInternalServerError"),
    ],
)
def test_an_error_is_of_the_clients_class(
    program: Run, call: str, status: int, code: str, name: str
) -> None:
    with asked(program, [Failed(Failure(status, code, "why"))]) as (run, _):
        told = run(sdk="ai", call=call, prompt="Hi")
    error = told["error"] if call == "generateText" else told["errors"][0]
    assert error["name"] == name
    if status != 401:  # of which the client tells in its own words
        assert (error["statusCode"], error["message"]) == (status, "why")
        assert error["isRetryable"] is (status in (429, 503))


def test_an_unknown_model(program: Run, sdk: str) -> None:
    with asked(program, HELLO, model="openai/gpt-5") as (run, backend):
        error = run(sdk=sdk, call="generateText", prompt="Hi")["error"]
    assert (error["name"], error["statusCode"]) == ("GatewayModelNotFoundError", 400)
    assert "'headrace/painted:1m', 'headrace/painted:1m+pirate' are" in error["message"]
    assert backend.requests == []


def test_a_field_that_is_not_supported(program: Run, sdk: str) -> None:
    with asked(program, HELLO) as (run, _):
        job = {"settings": {"frequencyPenalty": 0.5}}
        error = run(sdk=sdk, call="generateText", prompt="Hi", **job)["error"]
    assert (error["name"], error["statusCode"]) == ("GatewayInvalidRequestError", 400)
    assert error["message"].startswith("frequencyPenalty: ")


def test_a_failure_in_the_middle_of_a_stream(program: Run, sdk: str) -> None:
    script = [*HEAD, TextDelta("Hel"), Failed(Failure(500, "inference_error", "it broke"))]
    with asked(program, script) as (run, _):
        told = run(sdk=sdk, call="streamText", prompt="Hi")
    assert told["text"] == "Hel"
    assert "error" in told["parts"]
    assert "text-end" not in told["parts"]
    (error,) = told["errors"]
    if sdk == "ai":
        assert (error["message"], error["code"]) == ("it broke", "inference_error")


def test_an_abort_stops_the_work(program: Run, sdk: str) -> None:
    script: list[Event | float] = [*HEAD, TextDelta("Hel"), TextDelta("lo")]
    script += [event for _ in range(200) for event in (0.05, TextDelta("!"))]
    with asked(program, [*script, Finished("stop", USAGE)]) as (run, backend):
        told = run(sdk=sdk, call="streamText", prompt="Hi", abortAfter=5)
        deadline = time.monotonic() + 5
        while not backend.runs[0].cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told["parts"][-1] == "abort"
    assert backend.runs[0].cancelled
