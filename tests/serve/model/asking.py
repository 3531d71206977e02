"""Every dialect through its official client, asked in one way. The gateway's client is JavaScript: here it is bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import anthropic
import httpx
import ollama
import openai

from headrace.llm import LLM
from headrace.serve.app import create_app
from headrace.serve.dialects import anthropic as anthropic_dialect
from headrace.serve.dialects import gateway, openai_chat, openai_responses
from headrace.serve.dialects import ollama as ollama_dialect
from headrace.serve.model.backend import ModelBackend
from serve.served import served

DIALECTS = [openai_chat, openai_responses, anthropic_dialect, ollama_dialect, gateway]
NAME = "painted:1m"
Json = dict[str, Any]
SECONDS = 120
# What asks for reasoning.
THOUGHTFUL: dict[str, Json] = {
    "chat": {"reasoning_effort": "low"},
    "responses": {"reasoning": {"effort": "low"}},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "ollama": {"think": True},
    "gateway": {"reasoning": "low"},
}


@dataclass(frozen=True)
class Asked:
    """What is asked. messages: of role "system", "user" and "assistant", with text. choice: or a tool's name."""

    messages: Sequence[Json]
    limit: int | None = 32
    temperature: float | None = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    schema: Json | None = None
    tools: tuple[Json, ...] = ()  # name, parameters, strict
    choice: str = "auto"
    model: str = NAME
    more: Json = field(default_factory=dict)  # as the dialect has it


@dataclass
class Told:
    """What was answered."""

    text: str = ""
    reason: str = ""
    prompt: int = 0
    cached: int = 0
    new: int = 0
    calls: list[tuple[str, str, Any]] = field(default_factory=list)  # id, name, arguments
    reasoning: str = ""
    pieces: int = 0


def user(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


class Server:
    """A model that is served, and the clients of it."""

    def __init__(self, url: str, backend: ModelBackend) -> None:
        self.url = url
        self.backend = backend
        self.http = httpx.Client(base_url=url, timeout=SECONDS)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=SECONDS
        )
        self.anthropic = anthropic.Anthropic(
            base_url=url, api_key="-", max_retries=0, timeout=SECONDS
        )
        self.ollama = ollama.Client(url, timeout=SECONDS)

    def close(self) -> None:
        for client in (self.http, self.openai, self.anthropic, self.ollama._client):
            client.close()


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[Server]:
    """The model behind every dialect, inside the block."""
    backend = ModelBackend(llm, NAME, version="0.0.1", **options)
    try:
        with served(create_app(backend, DIALECTS)) as url:
            server = Server(url, backend)
            try:
                yield server
            finally:
                server.close()
    finally:
        backend.close()


def _given(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


# Chat completions


def chat(server: Server, asked: Asked, *, stream: bool) -> Told:
    tools = [
        {
            "type": "function",
            "function": {"name": t["name"], "parameters": t["parameters"], "strict": t["strict"]},
        }
        for t in asked.tools
    ]
    choice: Any = asked.choice
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    schema = asked.schema and {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": asked.schema, "strict": True},
    }
    body = (
        _given(
            model=asked.model,
            messages=list(asked.messages),
            max_tokens=asked.limit,
            temperature=asked.temperature,
            seed=asked.seed,
            stop=list(asked.stop) or None,
            tools=tools or None,
            tool_choice=choice if tools else None,
            response_format=schema,
        )
        | asked.more
    )
    if not stream:
        whole = server.openai.chat.completions.create(**body)
        return _chat_told(whole.choices[0].message, whole.choices[0].finish_reason, whole.usage)
    told, calls, usage = Told(), {}, None
    for chunk in server.openai.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for one in chunk.choices:
            told.text += one.delta.content or ""
            told.reasoning += getattr(one.delta, "reasoning_content", None) or ""
            told.pieces += bool(one.delta.content)
            told.reason = one.finish_reason or told.reason
            for call in one.delta.tool_calls or ():
                entry = calls.setdefault(call.index, [call.id, call.function.name, ""])
                entry[2] += call.function.arguments or ""
    if told.reason == "length" and calls:  # the last one may be cut
        with suppress(ValueError):
            json.loads(calls[max(calls)][2])
            calls[len(calls)] = ["", "", "{}"]
        del calls[max(calls)]
    told.calls = [(i, name, json.loads(text)) for i, name, text in calls.values()]
    return _counted(
        told,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        usage.completion_tokens,
    )


def _counted(told: Told, prompt: int, cached: int, new: int) -> Told:
    told.prompt, told.cached, told.new = prompt, cached, new
    return told


def _chat_told(message: Any, reason: str, usage: Any) -> Told:
    calls = [
        (c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()
    ]
    told = Told(
        message.content or "",
        reason,
        calls=calls,
        reasoning=getattr(message, "reasoning_content", None) or "",
    )
    return _counted(
        told,
        usage.prompt_tokens,
        usage.prompt_tokens_details.cached_tokens,
        usage.completion_tokens,
    )


# Responses


def responses(server: Server, asked: Asked, *, stream: bool) -> Told:
    assert asked.seed is None
    assert not asked.stop
    choice: Any = asked.choice
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "name": choice}
    form = asked.schema and {
        "format": {"type": "json_schema", "name": "a", "schema": asked.schema, "strict": True}
    }
    body = (
        _given(
            model=asked.model,
            input=list(asked.messages),
            max_output_tokens=asked.limit,
            temperature=asked.temperature,
            tools=[{"type": "function", **t} for t in asked.tools] or None,
            tool_choice=choice if asked.tools else None,
            text=form,
        )
        | asked.more
    )
    if not stream:
        return _response_told(server.openai.responses.create(**body))
    text, pieces, last = "", 0, None
    for event in server.openai.responses.create(**body, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
            pieces += 1
        if event.type in ("response.completed", "response.incomplete"):
            last = event.response
    told = _response_told(last)
    assert told.text == text
    told.pieces = pieces
    return told


def _response_told(response: Any) -> Told:
    details, usage = response.incomplete_details, response.usage
    told = Told(response.output_text, response.status if details is None else details.reason)
    told.calls = [
        (item.call_id, item.name, json.loads(item.arguments))
        for item in response.output
        if item.type == "function_call"
    ]
    told.reasoning = "".join(
        part.text
        for item in response.output
        if item.type == "reasoning"
        for part in (item.content or item.summary)
    )
    return _counted(
        told, usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens
    )


# Anthropic's messages


def messages(server: Server, asked: Asked, *, stream: bool) -> Told:
    assert asked.seed is None
    system = "".join(m["content"] for m in asked.messages if m["role"] == "system")
    choice: Json = {"auto": {"type": "auto"}, "required": {"type": "any"}}.get(
        asked.choice, {"type": "tool", "name": asked.choice}
    )
    tools = [
        {"name": t["name"], "input_schema": t["parameters"], "strict": t["strict"]}
        for t in asked.tools
    ]
    form = asked.schema and {"format": {"type": "json_schema", "schema": asked.schema}}
    body = (
        _given(
            model=asked.model,
            messages=[m for m in asked.messages if m["role"] != "system"],
            system=system or None,
            max_tokens=asked.limit,
            stop_sequences=list(asked.stop) or None,
            tools=tools or None,
            tool_choice=choice if tools else None,
            output_config=form,
            extra_body=_given(
                temperature=asked.temperature
            ),  # the newest client has no name for it
        )
        | asked.more
    )
    if not stream:
        return _message_told(server.anthropic.messages.create(**body))
    with server.anthropic.messages.stream(**body) as events:
        text = list(events.text_stream)
        told = _message_told(events.get_final_message())
    assert "".join(text) == told.text
    told.pieces = len(text)
    return told


def _message_told(message: Any) -> Told:
    usage, blocks = message.usage, message.content
    told = Told("".join(b.text for b in blocks if b.type == "text"), message.stop_reason)
    told.calls = [(b.id, b.name, b.input) for b in blocks if b.type == "tool_use"]
    told.reasoning = "".join(b.thinking for b in blocks if b.type == "thinking")
    cached = usage.cache_read_input_tokens
    return _counted(told, usage.input_tokens + cached, cached, usage.output_tokens)


# Ollama


def ollama_chat(server: Server, asked: Asked, *, stream: bool) -> Told:
    assert asked.choice == "auto"
    options = _given(
        temperature=asked.temperature,
        seed=asked.seed,
        num_predict=asked.limit,
        stop=list(asked.stop) or None,
        **asked.more.get("options", {}),
    )
    tools = [{"type": "function", "function": t} for t in asked.tools]
    more = {name: value for name, value in asked.more.items() if name != "options"}
    body: Json = {"model": asked.model, "messages": list(asked.messages), "options": options}
    body |= _given(format=asked.schema) | more
    if tools:  # the client's own type of a tool has no "strict"
        body["tools"] = tools
        parts = _ollama_raw(server, body, stream=stream)
    elif stream:
        parts = [part.model_dump() for part in server.ollama.chat(**body, stream=True)]
    else:
        parts = [server.ollama.chat(**body).model_dump()]
    last = parts[-1]
    assert last["done"]
    told = Told(
        "".join(p["message"].get("content") or "" for p in parts),
        last["done_reason"],
        reasoning="".join(p["message"].get("thinking") or "" for p in parts),
        pieces=sum(bool(p["message"].get("content")) for p in parts),
    )
    told.calls = [
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for part in parts
        for call in part["message"].get("tool_calls") or ()
    ]
    return _counted(told, last["prompt_eval_count"], 0, last["eval_count"])


def _ollama_raw(server: Server, body: Json, *, stream: bool) -> list[Json]:
    answer = server.http.post("/api/chat", json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


# The gateway


GATEWAY = "/v4/ai/language-model"


def gateway_headers(model: str, *, stream: bool) -> dict[str, str]:
    return {
        "ai-gateway-protocol-version": "0.0.1",
        "ai-language-model-specification-version": "4",
        "ai-language-model-id": f"headrace/{model}",
        "ai-language-model-streaming": str(stream).lower(),
    }


def gateway_call(server: Server, asked: Asked, *, stream: bool) -> Told:
    headers = gateway_headers(asked.model, stream=stream)
    prompt = [
        m if m["role"] == "system" else {**m, "content": [{"type": "text", "text": m["content"]}]}
        for m in asked.messages
    ]
    choice: Json = {"type": asked.choice}
    if asked.choice not in ("auto", "none", "required"):
        choice = {"type": "tool", "toolName": asked.choice}
    tools = [
        {
            "type": "function",
            "name": t["name"],
            "inputSchema": t["parameters"],
            "strict": t["strict"],
        }
        for t in asked.tools
    ]
    body = (
        _given(
            prompt=prompt,
            maxOutputTokens=asked.limit,
            temperature=asked.temperature,
            seed=asked.seed,
            stopSequences=list(asked.stop) or None,
            tools=tools or None,
            toolChoice=choice if tools else None,
            responseFormat=asked.schema and {"type": "json", "schema": asked.schema},
        )
        | asked.more
    )
    answer = server.http.post(GATEWAY, headers=headers, json=body)
    if answer.status_code != 200:
        raise GatewayError(answer)
    if not stream:
        return _gateway_told(answer.json(), answer.json()["content"])
    data = [frame.removeprefix("data: ") for frame in answer.text.strip().split("\n\n")]
    assert data[-1] == "[DONE]"
    parts = [json.loads(one) for one in data[:-1]]
    told = _gateway_told(parts[-1], parts)
    told.text = "".join(p["delta"] for p in parts if p["type"] == "text-delta")
    told.reasoning = "".join(p["delta"] for p in parts if p["type"] == "reasoning-delta")
    told.pieces = sum(p["type"] == "text-delta" for p in parts)
    return told


class GatewayError(Exception):
    """An answer that is an error."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.status_code = answer.status_code
        self.body = answer.json()["error"]


def _gateway_told(end: Json, parts: list[Json]) -> Told:
    told = Told(
        "".join(p["text"] for p in parts if p["type"] == "text"),
        end["finishReason"]["unified"],
        reasoning="".join(p["text"] for p in parts if p["type"] == "reasoning"),
    )
    told.calls = [
        (p["toolCallId"], p["toolName"], json.loads(p["input"]))
        for p in parts
        if p["type"] == "tool-call"
    ]
    usage = end["usage"]
    tokens = usage["inputTokens"]
    return _counted(told, tokens["total"], tokens["cacheRead"], usage["outputTokens"]["total"])


Ask = Callable[..., Told]
ASKS: dict[str, Ask] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "ollama": ollama_chat,
    "gateway": gateway_call,
}
SEEDED = ("chat", "ollama", "gateway")
CACHED = ("chat", "responses", "messages", "gateway")  # Ollama's form has no field for it
Kind = Literal["stop", "length", "calls", "stop string"]
REASONS: dict[str, dict[Kind, str]] = {
    "chat": {
        "stop": "stop",
        "length": "length",
        "calls": "tool_calls",
        "stop string": "stop",
    },
    "responses": {
        "stop": "completed",
        "length": "max_output_tokens",
        "calls": "completed",
        "stop string": "",
    },
    "messages": {
        "stop": "end_turn",
        "length": "max_tokens",
        "calls": "tool_use",
        "stop string": "stop_sequence",
    },
    "ollama": {
        "stop": "stop",
        "length": "length",
        "calls": "stop",
        "stop string": "stop",
    },
    "gateway": {
        "stop": "stop",
        "length": "length",
        "calls": "tool-calls",
        "stop string": "stop",
    },
}
