"""A null is a value inside of schemas, arguments and results: it is read by the model as the client wrote it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace.llm import LLM
from serve.model.asking import GATEWAY, NAME, Json, Server, gateway_headers, user

SCHEMA: Json = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": ["string", "null"], "enum": ["C", None], "default": None},
    },
}
ARGUMENTS: Json = {"city": "Paris", "unit": None, "days": [1, None]}
RESULT: Json = {"wind": None, "sky": {"clouds": None}}
QUESTION = "How is the weather in Paris?"
OPENAI_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


def chat() -> tuple[str, Json]:
    call = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
    return "/v1/chat/completions", {
        "model": NAME,
        "max_tokens": 1,
        "tools": OPENAI_TOOLS,
        "messages": [
            *user(QUESTION),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "c", "content": json.dumps(RESULT)},
        ],
    }


def responses() -> tuple[str, Json]:
    call = {"name": "weather", "arguments": json.dumps(ARGUMENTS), "call_id": "c"}
    return "/v1/responses", {
        "model": NAME,
        "max_output_tokens": 1,
        "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        "input": [
            *user(QUESTION),
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": "c", "output": json.dumps(RESULT)},
        ],
    }


def messages() -> tuple[str, Json]:
    used = {"type": "tool_use", "id": "c", "name": "weather", "input": ARGUMENTS}
    result = {"type": "tool_result", "tool_use_id": "c", "content": json.dumps(RESULT)}
    return "/v1/messages", {
        "model": NAME,
        "max_tokens": 1,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
        "messages": [
            *user(QUESTION),
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ],
    }


def ollama() -> tuple[str, Json]:
    call = {"name": "weather", "arguments": ARGUMENTS}
    return "/api/chat", {
        "model": NAME,
        "stream": False,
        "options": {"num_predict": 1},
        "tools": OPENAI_TOOLS,
        "messages": [
            *user(QUESTION),
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "tool_name": "weather", "content": json.dumps(RESULT)},
        ],
    }


def gateway() -> tuple[str, Json]:
    call = {"type": "tool-call", "toolCallId": "c", "toolName": "weather", "input": ARGUMENTS}
    result = {
        "type": "tool-result",
        "toolCallId": "c",
        "toolName": "weather",
        "output": {"type": "json", "value": RESULT},
    }
    return GATEWAY, {
        "maxOutputTokens": 1,
        "tools": [{"type": "function", "name": "weather", "inputSchema": SCHEMA}],
        "prompt": [
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": [call]},
            {"role": "tool", "content": [result]},
        ],
    }


FORMS = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "ollama": ollama,
    "gateway": gateway,
}


@pytest.fixture
def prompts(real: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model reads, one text for every request."""
    seen: list[str] = []
    whole = real.chat_ids

    def heard(turns: Any, **options: Any) -> list[int]:
        ids = whole(turns, **options)
        seen.append(real.detokenize(ids))
        return ids

    monkeypatch.setattr(real, "chat_ids", heard)
    return seen


@pytest.mark.parametrize("dialect", FORMS)
def test_nulls_are_read_as_they_were_written(
    real_server: Server, prompts: list[str], dialect: str
) -> None:
    path, value = FORMS[dialect]()
    headers = gateway_headers(NAME, stream=False) if dialect == "gateway" else {}
    answer = real_server.http.post(path, json=value, headers=headers)
    assert answer.status_code == 200, answer.text
    (prompt,) = prompts
    (declared,) = re.findall(r"<tools>\n(\{.*\})\n</tools>", prompt)
    assert json.loads(declared)["function"]["parameters"] == SCHEMA
    assert '"default": null' in declared
    calls = re.findall(r"<tool_call>\n(.*)\n</tool_call>", prompt)
    assert json.loads(calls[-1]) == {"name": "weather", "arguments": ARGUMENTS}
    (result,) = re.findall(r"<tool_response>\n(\{.*\})\n</tool_response>", prompt)
    told = json.loads(result)
    assert (told["name"], json.loads(told["content"])) == ("weather", RESULT)
