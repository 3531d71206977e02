"""Every field of a gateway call as what is asked of the model, or as a refusal that names it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.serve.events import Started
from headrace.serve.failure import RequestError, failure
from headrace.serve.request import Format, Request, Sampling, Text, ToolChoice, Turn
from headrace.values import Tool
from serve.dialects.gateway_calls import MODEL, TOOL, USER, frames, opened
from serve.scripted import CARD

HELLO = Turn("user", (Text("Hello"),))
ASKED = Request("painted:1m", (HELLO,))
WEATHER = Tool("weather", "The weather", TOOL["inputSchema"])
PROVIDER_TOOL = {"type": "provider", "id": "openai.web_search", "name": "web_search", "args": {}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}},
}


def refused(headers: dict[str, str] | None = None, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        opened(headers=headers, **body)
    return caught.value


def warnings(**body: Any) -> Any:
    return frames(opened(**body), [Started(1, 0)])[0]["warnings"]


def test_a_greeting() -> None:
    assert opened().request == ASKED


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"maxOutputTokens": 5}, {"limit": 5}),
        ({"stopSequences": ["\n", "END"]}, {"stop": ("\n", "END")}),
        ({"temperature": 0}, {"sampling": Sampling(temperature=0)}),
        ({"temperature": 99.5}, {"sampling": Sampling(temperature=99.5)}),
        ({"topP": 0.5}, {"sampling": Sampling(top_p=0.5)}),
        ({"topK": 40}, {"sampling": Sampling(top_k=40)}),
        ({"presencePenalty": 1.5}, {"sampling": Sampling(presence_penalty=1.5)}),
        ({"frequencyPenalty": 0}, {}),
        ({"seed": 7}, {"sampling": Sampling(seed=7)}),
        ({"responseFormat": {"type": "text"}}, {}),
        ({"responseFormat": {"type": "json"}}, {"answer": Format("json")}),
        (
            {"responseFormat": {"type": "json", "schema": SCHEMA, "name": "a", "description": "b"}},
            {"answer": Format("schema", SCHEMA)},
        ),
        ({"tools": []}, {}),
        ({"tools": [TOOL]}, {"tools": (WEATHER,)}),
        ({"tools": [TOOL | {"strict": True}]}, {"tools": (replace(WEATHER, strict=True),)}),
        ({"tools": [TOOL | {"strict": False}]}, {"tools": (WEATHER,)}),
        ({"tools": [TOOL | {"description": None}]}, {"tools": (replace(WEATHER, description=""),)}),
        ({"tools": [TOOL | {"inputSchema": SCHEMA}]}, {"tools": (replace(WEATHER, parameters=SCHEMA),)}),
        ({"tools": [TOOL | {"providerOptions": {"x": {"y": 1}}}]}, {"tools": (WEATHER,)}),
        ({"toolChoice": {"type": "auto"}}, {}),
        ({"toolChoice": {"type": "none"}}, {"choice": ToolChoice("none")}),
        (
            {"tools": [TOOL], "toolChoice": {"type": "required"}},
            {"tools": (WEATHER,), "choice": ToolChoice("required")},
        ),
        (
            {"tools": [TOOL], "toolChoice": {"type": "tool", "toolName": "weather"}},
            {"tools": (WEATHER,), "choice": ToolChoice("required", "weather")},
        ),
        ({"reasoning": "provider-default"}, {}),
        ({"reasoning": "none"}, {}),
        ({"reasoning": "minimal"}, {}),
        ({"reasoning": "low"}, {"effort": "low"}),
        ({"reasoning": "medium"}, {"effort": "medium"}),
        ({"reasoning": "high"}, {"effort": "high"}),
        ({"reasoning": "xhigh"}, {"effort": "xhigh"}),
        ({"reasoning": "max"}, {"effort": "max"}),
        ({"providerOptions": {"headrace": {"reasoningEffort": "low"}}}, {"effort": "low"}),
        (
            {"reasoning": "low", "providerOptions": {"headrace": {"reasoningEffort": "low"}}},
            {"effort": "low"},
        ),
        (
            {"reasoning": "provider-default", "providerOptions": {"headrace": {"reasoningEffort": "max"}}},
            {"effort": "max"},
        ),
        (
            {"providerOptions": {"headrace": {"parallelToolCalls": False}}},
            {"parallel_calls": False},
        ),
        ({"providerOptions": {"headrace": {"minP": 0.1}}}, {"sampling": Sampling(min_p=0.1)}),
        (
            {"providerOptions": {"headrace": {"repetitionPenalty": 1.1}}},
            {"sampling": Sampling(repetition_penalty=1.1)},
        ),
        ({"providerOptions": {"headrace": {"numCtx": 512}}}, {"window": 512}),
        ({"providerOptions": {"gateway": {"order": ["a"], "speed": "fast"}, "xai": None}}, {}),
        ({"headers": {"user-agent": "fx/1", "x": None}}, {}),
        ({"includeRawChunks": True}, {}),
    ],
)  # fmt: skip
def test_a_field(body: dict[str, Any], asked: dict[str, Any]) -> None:
    assert opened(**body).request == replace(ASKED, **asked)


@pytest.mark.parametrize(
    "name",
    [
        "maxOutputTokens", "temperature", "stopSequences", "topP", "topK", "presencePenalty",
        "frequencyPenalty", "responseFormat", "seed", "tools", "toolChoice", "includeRawChunks",
        "headers", "reasoning", "providerOptions",
    ],
)  # fmt: skip
def test_null_is_unset(name: str) -> None:
    assert opened(**{name: None}).request == ASKED


@pytest.mark.parametrize(
    ("body", "code", "place"),
    [
        ({"n": 1}, "unsupported_field", "n"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": "Hello"}, "invalid_request", "prompt"),
        ({"maxOutputTokens": 0}, "invalid_request", "maxOutputTokens"),
        ({"maxOutputTokens": 1.5}, "invalid_request", "maxOutputTokens"),
        ({"temperature": "0"}, "invalid_request", "temperature"),
        ({"topK": True}, "invalid_request", "topK"),
        ({"seed": "7"}, "invalid_request", "seed"),
        ({"frequencyPenalty": 0.5}, "unsupported_field", "frequencyPenalty"),
        ({"stopSequences": "END"}, "invalid_request", "stopSequences"),
        ({"stopSequences": ["a", ""]}, "invalid_request", "stopSequences[1]"),
        ({"responseFormat": {"type": "xml"}}, "invalid_request", "responseFormat.type"),
        ({"responseFormat": {"type": "json", "schema": []}}, "invalid_request", "responseFormat.schema"),
        ({"reasoning": "much"}, "invalid_request", "reasoning"),
        ({"toolChoice": "auto"}, "invalid_request", "toolChoice"),
        ({"toolChoice": {"type": "any"}}, "invalid_request", "toolChoice.type"),
        ({"toolChoice": {"type": "required"}}, "invalid_request", "toolChoice"),
        ({"tools": [PROVIDER_TOOL], "toolChoice": {"type": "required"}}, "invalid_request", "toolChoice"),
        ({"tools": [TOOL], "toolChoice": {"type": "tool", "toolName": "x"}}, "invalid_request", "toolChoice.toolName"),
        ({"tools": [TOOL], "toolChoice": {"type": "tool"}}, "invalid_request", "toolChoice.toolName"),
        ({"tools": [TOOL, TOOL]}, "invalid_request", "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f"}]}, "invalid_request", "tools[0].inputSchema"),
        ({"tools": [TOOL | {"name": ""}]}, "invalid_request", "tools[0].name"),
        ({"tools": [TOOL | {"parameters": {}}]}, "unsupported_field", "tools[0].parameters"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "invalid_request", "tools[0]"),
        ({"providerOptions": {"headrace": {"mirostat": 1}}}, "unsupported_field", "providerOptions.headrace.mirostat"),
        ({"providerOptions": {"headrace": {"numCtx": 0}}}, "invalid_request", "providerOptions.headrace.numCtx"),
        ({"providerOptions": {"headrace": {"numCtx": 8193}}}, "invalid_request", "providerOptions.headrace.numCtx"),
        ({"reasoning": "low", "providerOptions": {"headrace": {"reasoningEffort": "high"}}}, "invalid_request", "reasoning"),
    ],
)  # fmt: skip
def test_a_field_that_is_refused(body: dict[str, Any], code: str, place: str) -> None:
    error = refused(**body)
    assert (error.status, error.cause, error.place) == (400, code, place)


@pytest.mark.parametrize(
    ("header", "value", "said"),
    [
        ("ai_gateway_protocol_version", "0.0.2", "ai-gateway-protocol-version: '0.0.2' is not 0.0.1"),
        ("ai_language_model_specification_version", "5", "'5' is none of 2, 3, 4"),
        ("ai_language_model_streaming", "yes", "'yes' is neither 'true' nor 'false'"),
        ("ai_language_model_id", "", "ai-language-model-id is missing"),
    ],
)  # fmt: skip
def test_a_header_that_is_refused(header: str, value: str, said: str) -> None:
    assert said in refused({header: value}).message


@pytest.mark.parametrize(
    ("sent", "served"),
    [
        (MODEL, "painted:1m"),
        ("painted:1m", "painted:1m"),
        ("headrace/painted:1m+pirate", "painted:1m+pirate"),
        ("painted:1m+pirate", "painted:1m+pirate"),
    ],
)
def test_a_name_of_the_model(sent: str, served: str) -> None:
    assert opened(headers={"ai_language_model_id": sent}).request.model == served


def test_a_model_that_is_not_served() -> None:
    told = failure(refused({"ai_language_model_id": "openai/gpt-5"}))
    assert (told.status, told.code) == (400, "model_not_found")
    assert "; 'headrace/painted:1m', 'headrace/painted:1m+pirate' are" in told.message


@pytest.mark.parametrize(("sent", "streams"), [("true", True), ("false", False)])
def test_the_header_says_whether_to_stream(sent: str, streams: bool) -> None:
    assert opened(headers={"ai_language_model_streaming": sent}).stream is streams


def test_a_provider_tool_is_removed_and_named() -> None:
    old = {"type": "provider-defined", "id": "anthropic.bash", "name": "bash", "args": {"a": None}}
    body = {"tools": [PROVIDER_TOOL, TOOL, old]}
    assert opened(**body).request == replace(ASKED, tools=(WEATHER,))
    details = "tools of providers are removed"
    assert warnings(**body) == [
        {"type": "unsupported", "feature": "provider-defined tool openai.web_search", "details": details},
        {"type": "unsupported", "feature": "provider-defined tool anthropic.bash", "details": details},
    ]  # fmt: skip


def test_examples_of_an_input_are_not_shown() -> None:
    body = {"tools": [TOOL | {"inputExamples": [{"input": {"city": "Ulm"}}]}]}
    assert opened(**body).request == replace(ASKED, tools=(WEATHER,))
    assert [w["feature"] for w in warnings(**body)] == ["inputExamples"]


def test_a_model_that_does_not_reason_says_so() -> None:
    plain = replace(CARD, reasoning=False)
    warning = {
        "type": "unsupported",
        "feature": "reasoning",
        "details": "painted:1m does not reason",
    }
    assert warnings(card=plain, reasoning="high") == [warning]
    assert warnings(card=plain, reasoning="none") == []
    assert warnings(reasoning="high") == []


def test_options_of_messages_and_parts_are_not_looked_at() -> None:
    cached = {"anthropic": {"cacheControl": {"type": "ephemeral"}}}
    part = {"type": "text", "text": "Hello", "providerOptions": cached}
    prompt = [USER | {"content": [part], "providerOptions": cached}]
    assert opened(prompt=prompt).request == ASKED
