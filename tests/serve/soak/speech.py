"""Questions in the words of every dialect, and what its answers say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from serve.soak.questions import TOOL, TOOL_ABOUT, TOOL_NAME, Question

Json = dict[str, Any]
Headers = dict[str, str]


@dataclass
class Said:
    """An answer. calls: name and arguments. error: where the dialect told one."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Dialect:
    """able: whether a question can be said. ask: body and headers, streamed or not. whole, streamed: what came."""

    name: str
    path: str
    able: Callable[[Question], bool]
    ask: Callable[[Question, str, bool], tuple[Json, Headers]]
    whole: Callable[[Json], Said]
    streamed: Callable[[list[Json]], Said]
    lines: bool = False  # a stream of lines, not of events


def frames(data: bytes, lines: bool) -> list[Json]:
    """The JSON values of a stream."""
    found: list[Json] = []
    for line in data.decode().split("\n"):
        text = line if lines else line.removeprefix("data: ") if line.startswith("data: ") else ""
        if text and text != "[DONE]":
            found.append(json.loads(text))
    return found


def _turns(q: Question) -> list[Json]:
    return [{"role": role, "content": text} for role, text in q.turns]


def _with_system(q: Question) -> list[Json]:
    first = [] if q.system is None else [{"role": "system", "content": q.system}]
    return first + _turns(q)


def _sampling(q: Question) -> Json:
    return {"temperature": 0} if q.seed is None else {"seed": q.seed}


# OpenAI's chat.


def _chat(q: Question, model: str, stream: bool) -> tuple[Json, Headers]:
    body: Json = {
        "model": model,
        "messages": _with_system(q),
        "max_tokens": q.limit,
        **_sampling(q),
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if q.tool:
        function = {
            "name": TOOL_NAME,
            "description": TOOL_ABOUT,
            "parameters": TOOL,
            "strict": True,
        }
        body |= {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
    if q.schema:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "shape", "schema": q.schema},
        }
    if q.stop:
        body["stop"] = [q.stop]
    return body, {}


def _chat_whole(told: Json) -> Said:
    choice = told["choices"][0]
    message = choice["message"]
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message.get("tool_calls") or ()
    ]
    return Said(
        message["content"] or "", calls, choice["finish_reason"], told["usage"]["completion_tokens"]
    )


def _chat_streamed(told: list[Json]) -> Said:
    said, calls = Said(), dict[int, list[str]]()
    for frame in told:
        if "error" in frame:
            said.error = frame["error"]["code"]
            continue
        for choice in frame["choices"]:
            said.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or ():
                parts = calls.setdefault(call["index"], [])
                parts += [
                    t
                    for t in (call["function"].get("name"), call["function"].get("arguments"))
                    if t
                ]
            said.finish = choice["finish_reason"] or said.finish
        if frame.get("usage"):
            said.tokens = frame["usage"]["completion_tokens"]
    said.calls = [(parts[0], json.loads("".join(parts[1:]))) for parts in calls.values()]
    return said


# OpenAI's responses.


def _responses(q: Question, model: str, stream: bool) -> tuple[Json, Headers]:
    body: Json = {
        "model": model,
        "input": _turns(q),
        "max_output_tokens": q.limit,
        "temperature": 0,
        "stream": stream,
    }
    if q.system:
        body["instructions"] = q.system
    if q.tool:
        tool = {
            "type": "function",
            "name": TOOL_NAME,
            "description": TOOL_ABOUT,
            "parameters": TOOL,
            "strict": True,
        }
        body |= {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    if q.schema:
        body["text"] = {"format": {"type": "json_schema", "name": "shape", "schema": q.schema}}
    return body, {}


def _responses_whole(told: Json) -> Said:
    said = Said(
        finish=f"{told['status']} {told.get('incomplete_details')}",
        tokens=told["usage"]["output_tokens"],
    )
    for item in told["output"]:
        if item["type"] == "message":
            said.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            said.calls.append((item["name"], json.loads(item["arguments"])))
    return said


def _responses_streamed(told: list[Json]) -> Said:
    last = told[-1]
    if last["type"] == "error" or last["type"] == "response.failed":
        return Said(error=str(last))
    deltas = "".join(f["delta"] for f in told if f["type"] == "response.output_text.delta")
    said = _responses_whole(last["response"])
    assert said.text == deltas, "the deltas are not the text"
    return said


# Anthropic's messages.


def _anthropic(q: Question, model: str, stream: bool) -> tuple[Json, Headers]:
    body: Json = {
        "model": model,
        "messages": _turns(q),
        "max_tokens": q.limit,
        "temperature": 0,
        "stream": stream,
    }
    if q.system:
        body["system"] = q.system
    if q.tool:
        tool = {"name": TOOL_NAME, "description": TOOL_ABOUT, "input_schema": TOOL, "strict": True}
        body |= {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    if q.schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": q.schema}}
    if q.stop:
        body["stop_sequences"] = [q.stop]
    return body, {"anthropic-version": "2023-06-01"}


def _anthropic_whole(told: Json) -> Said:
    text = "".join(b["text"] for b in told["content"] if b["type"] == "text")
    calls = [(b["name"], b["input"]) for b in told["content"] if b["type"] == "tool_use"]
    return Said(text, calls, told["stop_reason"], told["usage"]["output_tokens"])


def _anthropic_streamed(told: list[Json]) -> Said:
    said, inputs = Said(), dict[int, list[str]]()
    for frame in told:
        match frame["type"]:
            case "error":
                said.error = frame["error"]["type"]
            case "content_block_start" if frame["content_block"]["type"] == "tool_use":
                inputs[frame["index"]] = [frame["content_block"]["name"]]
            case "content_block_delta" if frame["delta"]["type"] == "text_delta":
                said.text += frame["delta"]["text"]
            case "content_block_delta":
                inputs[frame["index"]].append(frame["delta"]["partial_json"])
            case "message_delta":
                said.finish, said.tokens = (
                    frame["delta"]["stop_reason"],
                    frame["usage"]["output_tokens"],
                )
    said.calls = [(parts[0], json.loads("".join(parts[1:]) or "{}")) for parts in inputs.values()]
    return said


# Ollama.


def _ollama_options(q: Question) -> Json:
    stop = {"stop": [q.stop]} if q.stop else {}
    return {"num_predict": q.limit, **_sampling(q), **stop}


def _ollama(q: Question, model: str, stream: bool) -> tuple[Json, Headers]:
    body: Json = {
        "model": model,
        "messages": _with_system(q),
        "stream": stream,
        "options": _ollama_options(q),
    }
    if q.schema:
        body["format"] = q.schema
    return body, {}


def _generate(q: Question, model: str, stream: bool) -> tuple[Json, Headers]:
    body: Json = {
        "model": model,
        "prompt": q.text,
        "stream": stream,
        "raw": q.raw,
        "options": _ollama_options(q),
    }
    if q.system:
        body["system"] = q.system
    if q.schema:
        body["format"] = q.schema
    return body, {}


def _ollama_whole(told: Json) -> Said:
    return _ollama_streamed([told])


def _ollama_streamed(told: list[Json]) -> Said:
    said = Said()
    for frame in told:
        said.error = frame.get("error") or said.error
        said.text += frame.get("response", "") + frame.get("message", {}).get("content", "")
        if frame.get("done"):
            said.finish, said.tokens = frame["done_reason"], frame["eval_count"]
    return said


# The gateway.


def _gateway(q: Question, model: str, stream: bool) -> tuple[Json, Headers]:
    first = [] if q.system is None else [{"role": "system", "content": q.system}]
    turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in q.turns]
    body: Json = {"prompt": [*first, *turns], "maxOutputTokens": q.limit, **_sampling(q)}
    if q.tool:
        tool = {
            "type": "function",
            "name": TOOL_NAME,
            "description": TOOL_ABOUT,
            "inputSchema": TOOL,
            "strict": True,
        }
        body |= {
            "tools": [tool],
            "toolChoice": {"type": "required"},
            "providerOptions": {"headrace": {"parallelToolCalls": False}},
        }
    if q.schema:
        body["responseFormat"] = {"type": "json", "schema": q.schema}
    if q.stop:
        body["stopSequences"] = [q.stop]
    headers = {
        "ai-gateway-protocol-version": "0.0.1",
        "ai-language-model-specification-version": "4",
        "ai-language-model-id": f"headrace/{model}",
        "ai-language-model-streaming": "true" if stream else "false",
    }
    return body, headers


def _gateway_whole(told: Json) -> Said:
    return _gateway_parts(told["content"], told)


def _gateway_streamed(told: list[Json]) -> Said:
    failed = [frame for frame in told if frame["type"] == "error"]
    if failed:
        return Said(error=str(failed[0]["error"]))
    return _gateway_parts(told, told[-1])


def _gateway_parts(parts: list[Json], end: Json) -> Said:
    text = "".join(_texts(parts))
    calls = [(p["toolName"], json.loads(p["input"])) for p in parts if p["type"] == "tool-call"]
    return Said(text, calls, end["finishReason"]["unified"], end["usage"]["outputTokens"]["total"])


def _texts(parts: list[Json]) -> Iterator[str]:
    for part in parts:
        if part["type"] in ("text", "text-delta"):
            yield part.get("text", part.get("delta", ""))


def _common(q: Question) -> bool:
    return not q.raw


def _greedy(q: Question) -> bool:
    return not q.raw and q.seed is None


DIALECTS = (
    Dialect("chat", "/v1/chat/completions", _common, _chat, _chat_whole, _chat_streamed),
    Dialect("responses", "/v1/responses", lambda q: _greedy(q) and not q.stop, _responses, _responses_whole, _responses_streamed),
    Dialect("anthropic", "/v1/messages", _greedy, _anthropic, _anthropic_whole, _anthropic_streamed),
    Dialect("ollama", "/api/chat", lambda q: _common(q) and not q.tool, _ollama, _ollama_whole, _ollama_streamed, lines=True),
    Dialect("generate", "/api/generate", lambda q: len(q.turns) == 1 and not q.tool, _generate, _ollama_whole, _ollama_streamed, lines=True),
    Dialect("gateway", "/v4/ai/language-model", _common, _gateway, _gateway_whole, _gateway_streamed),
)  # fmt: skip
RESPONSES = DIALECTS[1]
