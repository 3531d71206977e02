"""What the tests of the chat dialect share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from headrace.serve.dialect import Card, Context
from headrace.serve.dialects.openai_chat import ChatExchange, opened
from headrace.serve.dialects.openai_chat_wire import ChatBody
from headrace.serve.events import Event
from headrace.serve.request import Request
from headrace.serve.validation import decoded, read
from serve.scripted import CARD

MODEL = CARD.name
ID = "0123456789abcdef" * 2
USER = {"role": "user", "content": "Hello"}
HEAD = {
    "id": f"chatcmpl-{ID}",
    "created": 1_800_000_000,
    "model": MODEL,
    "system_fingerprint": "fp_abababababababab",
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA},
}


def context(card: Card = CARD, **fields: Any) -> Context:
    return replace(Context(card, ID, 1_800_000_000.75), **fields)


def exchange(card: Card = CARD, **fields: Any) -> ChatExchange:
    """What a body opens that has `fields`, and a short conversation where they have none."""
    body = {"model": MODEL, "messages": [USER], **fields}
    return opened(read(ChatBody, decoded(json.dumps(body).encode())), context(card))


def asked(card: Card = CARD, **fields: Any) -> Request:
    return exchange(card, **fields).request


def called(*ids: str, name: str = "weather", arguments: str = '{"city":"Bern"}') -> dict[str, Any]:
    """An assistant's message that calls a function."""
    function = {"name": name, "arguments": arguments}
    calls = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str, content: Any = "21") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def frames(chat: ChatExchange, *events: Event) -> list[Any]:
    """What is sent for the events: JSON, or text where it is none."""
    sent = [frame.decode() for event in events for frame in chat.push(event)]
    assert all(frame.startswith("data: ") and frame.endswith("\n\n") for frame in sent)
    data = [frame.removeprefix("data: ").removesuffix("\n\n") for frame in sent]
    assert not any("\n" in text for text in data)
    return [json.loads(text) if text.startswith("{") else text for text in data]


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}
