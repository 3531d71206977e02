"""Messages: every field as what it asks for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.serve.dialects import anthropic_wire as wire
from headrace.serve.failure import RequestError, failure
from headrace.serve.request import Format, Json, Request, Sampling, Text, ToolChoice, Turn
from headrace.serve.validation import read
from headrace.values import Tool
from serve.dialects.anthropic_messages import CARD, GET, HI, asked, counted, opened

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOL = Tool("get", "Gets.", {"type": "object"})
SHORTEST = Request(CARD.name, (Turn("user", (Text("Hi"),)),), limit=64)


def test_the_shortest_body_leaves_every_default_to_the_backend() -> None:
    assert asked() == SHORTEST
    assert not opened().stream


def test_max_tokens_is_required_but_not_in_a_count() -> None:
    with pytest.raises(RequestError, match=r"^max_tokens is missing"):
        read(wire.Body, {"model": CARD.name, "messages": HI})
    assert counted() == Request(CARD.name, SHORTEST.turns)


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"model": "painted:1m+pirate"}, {"model": "painted:1m+pirate"}),
        ({"max_tokens": 1}, {"limit": 1}),
        ({"max_tokens": 1_000_000}, {"limit": 1_000_000}),
        ({"temperature": 0.5}, {"sampling": Sampling(temperature=0.5)}),
        ({"temperature": 7}, {"sampling": Sampling(temperature=7.0)}),
        ({"top_p": -1.0}, {"sampling": Sampling(top_p=-1.0)}),
        ({"top_k": 5}, {"sampling": Sampling(top_k=5)}),
        ({"stop_sequences": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_sequences": []}, {}),
        ({"tools": [GET]}, {"tools": (TOOL,)}),
        ({"tools": []}, {}),
        ({"tools": [{**GET, "type": "custom", "cache_control": {}, "description": None}]},
         {"tools": (Tool("get", "", {"type": "object"}),)}),
        ({"tools": [{**GET, "strict": True}]},
         {"tools": (Tool("get", "Gets.", {"type": "object"}, strict=True),)}),
        ({"tools": [GET], "tool_choice": {"type": "auto"}}, {"tools": (TOOL,)}),
        ({"tools": [GET], "tool_choice": {"type": "none"}},
         {"tools": (TOOL,), "choice": ToolChoice("none")}),
        ({"tools": [GET], "tool_choice": {"type": "any"}},
         {"tools": (TOOL,), "choice": ToolChoice("required")}),
        ({"tools": [GET], "tool_choice": {"type": "tool", "name": "get"}},
         {"tools": (TOOL,), "choice": ToolChoice("required", "get")}),
        ({"tools": [GET], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
         {"tools": (TOOL,), "parallel_calls": False}),
        ({"thinking": {"type": "disabled"}}, {}),
        ({"thinking": {"type": "adaptive"}}, {"effort": "high"}),
        ({"thinking": {"type": "adaptive", "display": "summarized"},
          "output_config": {"effort": "low"}}, {"effort": "low"}),
        ({"output_config": {"effort": "max"}}, {}),
        ({"output_config": {"format": None, "effort": None, "task_budget": {}}}, {}),
        ({"output_config": {"format": FORMAT}}, {"answer": Format("schema", SCHEMA)}),
        ({"output_format": FORMAT}, {"answer": Format("schema", SCHEMA)}),
    ],
)  # fmt: skip
def test_a_field_asks_for(fields: Json, changed: dict[str, Any]) -> None:
    assert asked(**fields) == Request(**{**vars(SHORTEST), **changed})


@pytest.mark.parametrize(
    ("budget", "effort"),
    [(1, "low"), (4_095, "low"), (4_096, "medium"), (16_384, "high"), (65_536, "xhigh")],
)
def test_a_budget_of_thinking_is_an_effort(budget: int, effort: str) -> None:
    assert asked(thinking={"type": "enabled", "budget_tokens": budget}).effort == effort


OPTIONAL = (
    "system stop_sequences stream temperature top_p top_k tools tool_choice thinking output_config output_format "
    "metadata context_management service_tier container mcp_servers thread"
)


@pytest.mark.parametrize("name", [*OPTIONAL.split(), "invented"])
def test_null_is_unset(name: str) -> None:
    exchange = opened(**{name: None})
    assert (exchange.request, exchange.ignored) == (SHORTEST, ())


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}},
        {"context_management": {"edits": []}},
        {"service_tier": "auto"},
        {"mcp_servers": []},
    ],
)
def test_a_field_is_accepted_without_effect(fields: Json) -> None:
    exchange = opened(**fields)
    assert (exchange.request, exchange.ignored) == (SHORTEST, ())


def test_unknown_fields_of_the_top_are_ignored_and_told() -> None:
    exchange = opened(speed="fast", diagnostics={}, cache_control={"type": "ephemeral"})
    assert exchange.request == SHORTEST
    assert exchange.ignored == ("speed", "diagnostics", "cache_control")


def test_what_the_api_runs_itself_is_dropped() -> None:
    kinds = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "web_fetch_20260318", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "advisor_20260301", "name": "advisor"},
        {"type": "mcp_toolset", "mcp_server_name": "files"},
    ]
    assert asked(tools=[*kinds, GET]).tools == (TOOL,)
    named = {"type": "tool", "name": "web_search"}
    with pytest.raises(RequestError, match="'web_search' runs on Anthropic's servers only"):
        asked(tools=[*kinds, GET], tool_choice=named)
    with pytest.raises(
        RequestError, match="tool_choice: a call is required, but there are no tools"
    ):
        asked(tools=kinds, tool_choice={"type": "any"})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": "Hi"}, "messages: input should be a valid list"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role: 'tool' is none of 'user', 'assistant', 'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: input should"),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"max_tokens": "64"}, "max_tokens: input should be a valid integer"),
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"model": None}, "model is missing"),
        ({"messages": None}, "messages is missing"),
        ({"temperature": "hot"}, "temperature: input should be a valid number"),
        ({"top_k": 1.5}, "top_k: input should be a valid integer"),
        ({"stream": "yes"}, "stream: input should be a valid boolean"),
        ({"stop_sequences": "a"}, "stop_sequences: input should be a valid list"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: string should have at least 1 character"),
        ({"system": 5}, "system: input should be a valid string"),
        ({"system": [{"type": "image"}]}, "system[0].type: input should be 'text'"),
        ({"metadata": "u"}, "metadata: input should be an object"),
        ({"service_tier": 1}, "service_tier: input should be a valid string"),
        ({"container": "c"}, "container is not supported"),
        ({"container": {"id": "c"}}, "container is not supported"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers is not supported"),
        ({"thread": {"type": "create"}}, "thread is not supported: send the whole conversation"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: input"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type: 'sometimes' is none of 'adaptive', 'enabled', 'disabled'"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: input should be 'low'"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: input"),
        ({"output_config": {"format": {"type": "json_schema"}}},
         "output_config.format.schema is missing"),
        ({"tools": [{"name": "get"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name: string should have"),
        ({"tools": [GET, GET]}, "tools[1].name: two tools are called 'get'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]},
         "tools[0].type: 'bash_20250124' is not supported"),
        ({"tools": [GET], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [GET], "tool_choice": {"type": "tool", "name": "put"}},
         "tool_choice.name: 'put' is not among the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: a call is required, but there are no tools"),
        ({"tool_choice": "auto"}, "tool_choice: input should be an object"),
    ],
)  # fmt: skip
def test_a_body_is_refused(fields: Json, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        opened(**fields)
    assert caught.value.message.startswith(said)
    assert failure(caught.value).status == 400


@pytest.mark.parametrize("ask", [asked, counted])
def test_a_wrong_model_is_not_found(ask: Any) -> None:
    with pytest.raises(RequestError, match="'claude-opus' is not served here") as caught:
        ask(model="claude-opus")
    assert failure(caught.value).status == 404
