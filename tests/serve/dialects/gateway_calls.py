"""Calls of the gateway dialect without HTTP: a body and headers as an exchange."""

from __future__ import annotations

import json
from typing import Any

from headrace.serve.dialect import Card, Context, Exchange
from headrace.serve.dialects import gateway
from headrace.serve.dialects.gateway_wire import Body
from headrace.serve.events import Event
from headrace.serve.validation import read
from serve.scripted import CARD

ID = "0123456789abcdef" * 2
MODEL = "headrace/painted:1m"
USER = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def context(card: Card = CARD, **headers: str) -> Context:
    """headers: names with underscores; None of those that every client sends are missing."""
    sent = {
        "ai-gateway-protocol-version": "0.0.1",
        "ai-language-model-specification-version": "4",
        "ai-language-model-id": MODEL,
        "ai-language-model-streaming": "true",
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    return Context(card, ID, 1_700_000_000.25, sent)


def opened(card: Card = CARD, headers: dict[str, str] | None = None, **body: Any) -> Exchange:
    """A call; its prompt is one greeting unless `body` says otherwise."""
    value = {"prompt": [USER], **body}
    return gateway.opened(read(Body, value), context(card, **(headers or {})))


def frames(exchange: Exchange, events: list[Event]) -> list[Any]:
    """The data of every frame; "[DONE]" as it is."""
    raw = b"".join(frame for event in events for frame in exchange.push(event)).decode()
    assert raw.endswith("\n\n")
    data = [frame.removeprefix("data: ") for frame in raw[:-2].split("\n\n")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
