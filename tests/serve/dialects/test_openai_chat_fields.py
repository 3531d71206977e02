"""Chat completions: every accepted field, every one without an effect, every refusal and every default."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.serve.dialects.openai_chat_wire import ChatBody
from headrace.serve.failure import RequestError, UnknownNameError
from headrace.serve.request import Format, Request, Sampling, Text, ToolChoice, Turn
from headrace.values import Tool
from serve.dialects.chat import MODEL, SCHEMA, TOOL, asked, exchange
from serve.scripted import CARD

WEATHER = Tool("weather", "Of a city.", SCHEMA)
NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
PLAIN = {"type": "function", "function": {"name": "now"}}


def schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "place", **fields}}}


def test_a_request_of_two_fields_leaves_every_default_to_the_server() -> None:
    assert asked() == Request(model=MODEL, turns=(Turn("user", (Text("Hello"),)),))
    assert not exchange().stream


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"model": "painted:1m+pirate"}, {"model": "painted:1m+pirate"}),
        ({"temperature": 0}, {"sampling": Sampling(temperature=0)}),
        ({"temperature": 99.5}, {"sampling": Sampling(temperature=99.5)}),
        ({"top_p": 0.5}, {"sampling": Sampling(top_p=0.5)}),
        ({"top_k": 3}, {"sampling": Sampling(top_k=3)}),
        ({"min_p": 0.1}, {"sampling": Sampling(min_p=0.1)}),
        ({"presence_penalty": -1}, {"sampling": Sampling(presence_penalty=-1)}),
        ({"seed": 0}, {"sampling": Sampling(seed=0)}),
        ({"max_tokens": 5}, {"limit": 5}),
        ({"max_completion_tokens": 6}, {"limit": 6}),
        ({"max_tokens": 6, "max_completion_tokens": 6}, {"limit": 6}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {"stop": ()}),
        ({"options": {"num_ctx": 8192}}, {"window": 8192}),
        ({"options": {}}, {"window": None}),
        ({"tools": []}, {"tools": ()}),
        ({"tools": [TOOL]}, {"tools": (WEATHER,)}),
        ({"tools": [STRICT]}, {"tools": (Tool("weather", "Of a city.", SCHEMA, strict=True),)}),
        ({"tools": [PLAIN]}, {"tools": (Tool("now", "", {"type": "object", "properties": {}}),)}),
        ({"tools": [TOOL], "tool_choice": "auto"}, {"choice": ToolChoice("auto")}),
        ({"tools": [TOOL], "tool_choice": "none"}, {"choice": ToolChoice("none")}),
        ({"tool_choice": "none"}, {"choice": ToolChoice("none")}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"choice": ToolChoice("required")}),
        ({"tools": [TOOL], "tool_choice": NAMED}, {"choice": ToolChoice("required", "weather")}),
        ({"parallel_tool_calls": True}, {"parallel_calls": True}),
        ({"parallel_tool_calls": False}, {"parallel_calls": False}),
        ({"response_format": {"type": "text"}}, {"answer": Format("text")}),
        ({"response_format": {"type": "json_object"}}, {"answer": Format("json")}),
        (schema(schema=SCHEMA, strict=True), {"answer": Format("schema", SCHEMA)}),
        (schema(schema=SCHEMA, strict=False), {"answer": Format("schema", SCHEMA)}),
        (schema(schema=SCHEMA, description="Where."), {"answer": Format("schema", SCHEMA)}),
        (schema(schema={}), {"answer": Format("schema", {})}),
        (schema(), {"answer": Format("json")}),
        ({"reasoning_effort": "none"}, {"effort": None}),
        ({"reasoning_effort": "minimal"}, {"effort": None}),
        ({"reasoning_effort": "low"}, {"effort": "low"}),
        ({"reasoning_effort": "medium"}, {"effort": "medium"}),
        ({"reasoning_effort": "high"}, {"effort": "high"}),
        ({"reasoning_effort": "xhigh"}, {"effort": "xhigh"}),
        ({"reasoning_effort": "max"}, {"effort": "max"}),
        ({"think": True}, {"effort": "medium"}),
        ({"think": False}, {"effort": None}),
        ({"think": True, "reasoning_effort": "low"}, {"effort": "low"}),
        ({"think": False, "reasoning_effort": "none"}, {"effort": None}),
    ],
)
def test_a_field_is_taken(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    request = asked(**fields)
    assert {name: getattr(request, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"frequency_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logprobs": False},
        {"logit_bias": {}},
        {"store": False},
        {"metadata": {"session": "a"}},
        {"user": "somebody"},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"safety_identifier": "s"},
        {"service_tier": "auto"},
        {"modalities": ["text"]},
        {"verbosity": "low"},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_obfuscation": False}},
        {"stream_options": {"include_obfuscation": True}},
        {"top_logprobs": 0},
    ],
)
def test_a_field_is_accepted_without_an_effect(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked()


REQUIRED = {"model", "messages"}


UNKNOWN = ("functions", "function_call", "audio", "prediction", "web_search_options", "moderation", "new")  # fmt: skip


@pytest.mark.parametrize("name", [*sorted(set(ChatBody.model_fields) - REQUIRED), *UNKNOWN])
def test_null_is_unset(name: str) -> None:
    assert asked(**{name: None}) == asked()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "n: only 1 is supported"),
        ({"n": True}, "n: input should be a valid integer"),
        ({"store": 0}, "store: input should be a valid boolean"),
        ({"logprobs": 0}, "logprobs: input should be a valid boolean"),
        ({"frequency_penalty": False}, "frequency_penalty: input should be a valid number"),
        ({"top_logprobs": False}, "top_logprobs: input should be a valid integer"),
        ({"frequency_penalty": 0.5}, "frequency_penalty: only 0 is supported"),
        ({"frequency_penalty": -0.5}, "frequency_penalty: only 0 is supported"),
        ({"logprobs": True}, "logprobs: only false is supported"),
        ({"logit_bias": {"7": 1}}, "logit_bias: has to be empty"),
        ({"store": True}, "store: only false is supported"),
        ({"metadata": {"a": 1}}, "metadata.a: input should be a valid string"),
        ({"metadata": "a"}, "metadata: input should be an object"),
        ({"user": 1}, "user: input should be a valid string"),
        ({"service_tier": 1}, "service_tier: input should be a valid string"),
        ({"temperature": "1"}, "temperature: input should be a valid number"),
        ({"top_k": 1.5}, "top_k: input should be a valid integer"),
        ({"seed": 1.5}, "seed: input should be a valid integer"),
        ({"stream": "yes"}, "stream: input should be a valid boolean"),
        ({"stream_options": {"other": 1}}, "unknown field stream_options.other"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens: input should be greater"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens and max_completion_tokens are"),
        ({"stop": 5}, "stop: has to be text or a list of texts"),
        ({"stop": [5]}, "stop[0]: input should be a valid string"),
        ({"options": {"num_ctx": 8193}}, "options.num_ctx is 8193, the server's window is 8192"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx: input should be greater"),
        ({"options": {"num_gpu": 1}}, "unknown field options.num_gpu"),
        ({"think": "high"}, "think: input should be a valid boolean"),
        ({"think": False, "reasoning_effort": "low"}, "think is false, but reasoning_effort is"),
        ({"think": True, "reasoning_effort": "none"}, "think is true, but reasoning_effort is"),
        ({"reasoning_effort": "much"}, "reasoning_effort: input should be 'none', 'minimal'"),
        ({"response_format": {"type": "xml"}}, "response_format: its type has to be text, json_"),
        ({"response_format": "json"}, "response_format: its type has to be text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"response_format": {"type": "text", "schema": {}}}, "unknown field response_format.schem"),
        (schema(schema="{}"), "response_format.json_schema.schema: input should be an object"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type: input should be"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name: str"),
        ({"tools": [PLAIN, PLAIN]}, "tools[1].function.name: two tools are called 'now'"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice: input should be 'auto', 'none' or"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice: has to be auto, none, required or a"),
        ({"tools": [PLAIN], "tool_choice": NAMED}, "tool_choice.function.name: 'weather' is not"),
        ({"tool_choice": NAMED}, "tool_choice.function.name: 'weather' is not among the tools"),
        ({"tool_choice": "required"}, "tool_choice: a call is required, but there are no tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: input should be 'function'"),
        ({"functions": []}, "unknown field functions"),
        ({"function_call": "auto"}, "unknown field function_call"),
        ({"top_logprobs": 1}, "top_logprobs: only 0 is supported"),
        ({"tools": [None]}, "tools[0]: input should be an object"),
        ({"repeat_penalty": 1.1}, "unknown field repeat_penalty"),
        ({"modalities": ["audio"]}, "modalities: input should be 'text'"),
        ({"modalities": "text"}, "modalities: input should be a valid list"),
        ({"verbosity": "most"}, "verbosity: input should be 'low', 'medium' or 'high'"),
        ({"model": None}, "model is missing"),
        ({"messages": None}, "messages is missing"),
    ],
)  # fmt: skip
def test_a_field_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.message.startswith(said)
    assert caught.value.status == 400


def test_an_unknown_field_has_its_own_code() -> None:
    with pytest.raises(RequestError) as caught:
        asked(web_search_options={})
    assert (caught.value.cause, caught.value.place) == ("unsupported_field", "web_search_options")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"n": 2}, "unsupported_field"),
        ({"n": "2"}, "invalid_request"),
        ({"top_logprobs": 2}, "unsupported_field"),
        ({"store": True}, "unsupported_field"),
        ({"logprobs": True}, "unsupported_field"),
        ({"logit_bias": {"7": 1}}, "unsupported_field"),
        ({"frequency_penalty": 0.5}, "unsupported_field"),
        ({"modalities": ["text", "audio"]}, "unsupported_field"),
        ({"frequency_penalty": "0"}, "invalid_request"),
        ({"logit_bias": []}, "invalid_request"),
        ({"temperature": "1"}, "invalid_request"),
    ],
)
def test_what_is_not_offered_has_the_code_of_it(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert (caught.value.cause, caught.value.place) == (code, next(iter(fields)))


@pytest.mark.parametrize("name", ["gpt-4o", "painted:2m", "painted:1m+other", ""])
def test_a_wrong_model_is_refused_and_the_right_one_named(name: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        asked(model=name)
    assert (caught.value.status, caught.value.cause) == (400, "model_not_found")
    assert caught.value.message.endswith(f"; {CARD.name!r}, '{CARD.name}+pirate' are")


def test_streaming_is_asked_for() -> None:
    assert exchange(stream=True).stream
    assert not exchange(stream=False).stream
