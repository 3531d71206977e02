"""Schemas and tools through every dialect: whatever the model would say, what ends is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from serve.model.asking import ASKS, REASONS, SEEDED, Asked, Json, Server, user

EVERY = pytest.mark.parametrize("dialect", ASKS)


def record(**properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME: Json = {"type": "string", "maxLength": 12}
SCHEMAS: dict[str, Json] = {
    "person": record(name=NAME, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "colour": record(colour={"enum": ["red", "green", "blue"]}, sure={"type": "boolean"}),
    "list": record(
        items={
            "type": "array",
            "items": record(n={"type": "integer", "minimum": 1, "maximum": 9}),
            "minItems": 1,
            "maxItems": 3,
        }
    ),
    "either": record(
        what={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/shape"}]},
    )
    | {
        "$defs": {
            "shape": record(
                kind={"const": "circle"}, r={"type": "integer", "minimum": 0, "maximum": 99}
            )
        }
    },
}
PERSON = SCHEMAS["person"]
WEATHER: Json = record(
    city=NAME,
    days={"type": "integer", "minimum": 1, "maximum": 7},
    unit={"enum": ["C", "F"]},
)
TIME: Json = record(zone={"enum": ["CET", "UTC"]})
TOOLS = (
    {"name": "weather", "parameters": WEATHER, "strict": True},
    {"name": "time", "parameters": TIME, "strict": True},
)
PARAMETERS = {tool["name"]: tool["parameters"] for tool in TOOLS}
MESSAGES = user("Tell me about a person from Bern, and about the weather there.")


@EVERY
@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_follows_the_schema(real_server: Server, dialect: str, name: str) -> None:
    for seed in (None, 1, 2) if dialect in SEEDED else (None,):
        asked = Asked(MESSAGES, 200, 0.0 if seed is None else 1.0, seed, schema=SCHEMAS[name])
        told = ASKS[dialect](real_server, asked, stream=seed != 1)
        assert told.reason == REASONS[dialect]["stop"]
        jsonschema.validate(json.loads(told.text), SCHEMAS[name])


@EVERY
def test_a_model_without_sense_follows_the_schema(wild_server: Server, dialect: str) -> None:
    """With the defaults of sampling."""
    for stream in (True, False):
        asked = Asked(MESSAGES, 400, None, schema=SCHEMAS["list"])
        told = ASKS[dialect](wild_server, asked, stream=stream)
        assert told.reason == REASONS[dialect]["stop"]
        jsonschema.validate(json.loads(told.text), SCHEMAS["list"])


@EVERY
def test_a_limit_cuts_it_and_says_so(real_server: Server, dialect: str) -> None:
    whole = ASKS[dialect](real_server, Asked(MESSAGES, 200, schema=PERSON), stream=False)
    for limit in (1, 3, 7):
        told = ASKS[dialect](real_server, Asked(MESSAGES, limit, schema=PERSON), stream=limit != 3)
        assert (told.reason, told.new) == (REASONS[dialect]["length"], limit)
        assert whole.text.startswith(told.text)
    exact = ASKS[dialect](real_server, Asked(MESSAGES, whole.new, schema=PERSON), stream=True)
    assert (exact.text, exact.reason) == (whole.text, REASONS[dialect]["stop"])


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        ("chat", {"response_format": {"type": "json_object"}}),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
        ("ollama", {"format": "json"}),
        ("gateway", {"responseFormat": {"type": "json"}}),
    ],
)
def test_any_object(real_server: Server, dialect: str, more: Json) -> None:
    messages = user('Answer with JSON only: {"a": 1}')
    told = ASKS[dialect](real_server, Asked(messages, 300, more=more), stream=False)
    if told.reason == REASONS[dialect]["stop"]:
        assert isinstance(json.loads(told.text), dict)
    else:
        assert told.reason == REASONS[dialect]["length"]
    assert told.text.startswith("{")


@EVERY
def test_a_schema_that_cannot_be_followed_is_refused(real_server: Server, dialect: str) -> None:
    bad = record(x={"not": {"type": "string"}})
    with pytest.raises(Exception, match="not") as found:
        ASKS[dialect](real_server, Asked(MESSAGES, schema=bad), stream=False)
    assert found.value.status_code == 400  # type: ignore[attr-defined]


CHOOSES = [name for name in ASKS if name != "ollama"]  # Ollama's form has no tool_choice


ONE: dict[str, Json] = {
    "chat": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "gateway": {"providerOptions": {"headrace": {"parallelToolCalls": False}}},
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("dialect", ONE)
@pytest.mark.parametrize("which", ["real_server", "wild_server"])
def test_a_required_call_is_made(
    request: pytest.FixtureRequest, which: str, dialect: str, stream: bool
) -> None:
    """One, where no more may be; its end ends the answer."""
    server: Server = request.getfixturevalue(which)
    asked = Asked(MESSAGES, 200, None, tools=TOOLS, choice="required", more=ONE[dialect])
    told = ASKS[dialect](server, asked, stream=stream)
    assert len(told.calls) == 1
    valid(told.calls)
    assert told.reason == REASONS[dialect]["calls"]
    assert told.text == ""


@pytest.mark.parametrize("dialect", ONE)
def test_several_calls_have_ids_of_their_own(real_server: Server, dialect: str) -> None:
    """This model goes on calling, so a limit ends it: what is complete by then is told."""
    asked = Asked(MESSAGES, 150, 0.0, tools=TOOLS, choice="required")
    told = ASKS[dialect](real_server, asked, stream=False)
    assert len(told.calls) > 1
    valid(told.calls)


def valid(calls: list[tuple[str, str, Any]]) -> None:
    assert calls
    assert len({call_id for call_id, _, _ in calls}) == len(calls)
    for _, name, arguments in calls:
        jsonschema.validate(arguments, PARAMETERS[name])


@pytest.mark.parametrize("dialect", CHOOSES)
@pytest.mark.parametrize("name", ["weather", "time"])
def test_a_named_call_is_that_one(real_server: Server, dialect: str, name: str) -> None:
    asked = Asked(MESSAGES, 80, tools=TOOLS, choice=name)
    told = ASKS[dialect](real_server, asked, stream=name == "time")
    if told.calls or name == "time":
        valid(told.calls)
    assert {called for _, called, _ in told.calls} <= {name}


@EVERY
def test_tools_that_may_be_called_leave_text_alone(real_server: Server, dialect: str) -> None:
    """Greedy, the model says something, or calls with valid arguments."""
    asked = Asked(user("Say hello."), 100, tools=TOOLS)
    told = ASKS[dialect](real_server, asked, stream=True)
    assert told.text or told.calls
    assert "<tool_call>" not in told.text
    if told.calls:
        valid(told.calls)


@pytest.mark.parametrize("dialect", CHOOSES)
def test_a_call_that_a_limit_cuts_is_none(real_server: Server, dialect: str) -> None:
    asked = Asked(MESSAGES, 12, tools=TOOLS, choice="weather")
    told = ASKS[dialect](real_server, asked, stream=False)
    assert told.calls == []
    assert told.reason == REASONS[dialect]["length"]


def test_a_loop_of_chat_completions(real_server: Server) -> None:
    messages: list[Any] = list(MESSAGES)
    tools: Any = [{"type": "function", "function": tool} for tool in TOOLS]
    first = real_server.openai.chat.completions.create(
        model="painted:1m", messages=messages, tools=tools, tool_choice="required", max_tokens=150
    )
    message = first.choices[0].message
    messages.append(message)
    for call in reversed(message.tool_calls or []):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "12 degrees"})
    second = real_server.openai.chat.completions.create(
        model="painted:1m", messages=messages, tools=tools, tool_choice="none", max_tokens=20
    )
    assert second.choices[0].message.content


def test_a_loop_of_responses(real_server: Server) -> None:
    items: list[Any] = list(MESSAGES)
    tools: Any = [{"type": "function", **tool} for tool in TOOLS]
    first = real_server.openai.responses.create(
        model="painted:1m", input=items, tools=tools, tool_choice="required", max_output_tokens=150
    )
    items += first.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = real_server.openai.responses.create(
        model="painted:1m", input=items, tools=tools, tool_choice="none", max_output_tokens=20
    )
    assert second.output_text


def test_a_loop_of_messages(real_server: Server) -> None:
    messages: list[Any] = list(MESSAGES)
    tools: Any = [
        {"name": t["name"], "input_schema": t["parameters"], "strict": True} for t in TOOLS
    ]
    first = real_server.anthropic.messages.create(
        model="painted:1m",
        messages=messages,
        tools=tools,
        tool_choice={"type": "any"},
        max_tokens=150,
    )
    messages.append({"role": "assistant", "content": first.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12 degrees"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
    second = real_server.anthropic.messages.create(
        model="painted:1m", messages=messages, tools=tools, max_tokens=20
    )
    assert second.content


def test_a_loop_of_ollama(real_server: Server) -> None:
    """No choice can be demanded: the call is one that the client says was made."""
    call = {"function": {"name": "weather", "arguments": {"city": "Bern", "days": 1, "unit": "C"}}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "12 degrees"},
    ]
    tools: Any = [{"type": "function", "function": tool} for tool in TOOLS]
    answer = real_server.http.post(
        "/api/chat",
        json={
            "model": "painted:1m",
            "messages": messages,
            "tools": tools,
            "stream": False,
            "options": {"num_predict": 20, "temperature": 0},
        },
    ).json()
    assert answer["done"]
    assert answer["message"]["content"] or answer["message"]["tool_calls"]


def test_a_loop_of_the_gateway(real_server: Server) -> None:
    asked = Asked(MESSAGES, 150, tools=TOOLS, choice="weather")
    call_id, name, arguments = ASKS["gateway"](real_server, asked, stream=True).calls[0]
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool-call", "toolCallId": call_id, "toolName": name, "input": arguments}
            ],
        },
        {
            "role": "tool",
            "content": [
                {
                    "type": "tool-result",
                    "toolCallId": call_id,
                    "toolName": name,
                    "output": {"type": "text", "value": "12 degrees"},
                }
            ],
        },
    ]
    answer = real_server.http.post(
        "/v4/ai/language-model",
        headers={"ai-language-model-id": "headrace/painted:1m"},
        json={"prompt": prompt, "maxOutputTokens": 20},
    )
    assert answer.status_code == 200
    assert answer.json()["content"]
