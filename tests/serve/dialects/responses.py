"""What the tests of the Responses API share: bodies read as the server reads them, and frames as a client does."""

from __future__ import annotations

import json
from typing import Any

from headrace.serve.dialect import Context, Exchange
from headrace.serve.dialects import openai_responses as dialect
from headrace.serve.events import CallDelta, CallEnded, CallStarted, Event, Started
from headrace.serve.request import Request
from headrace.serve.validation import decoded, read
from serve.scripted import CARD

Json = dict[str, Any]
NAME = CARD.name
CONTEXT = Context(CARD, "ab" * 16, 1_700_000_123.75)
STARTED = Started(7, 3)
FUNCTION: Json = {
    "type": "function",
    "name": "weather",
    "description": "Looks out.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
PATCH: Json = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def opened(**fields: Any) -> Exchange:
    """A request with `fields`, as it comes over the wire."""
    body = {"model": NAME, "input": "Hello", **fields}
    endpoint = dialect.ENDPOINTS[0]
    exchange = endpoint.open(read(endpoint.body, decoded(json.dumps(body).encode())), CONTEXT)
    assert isinstance(exchange, Exchange)
    return exchange


def asked(**fields: Any) -> Request:
    return opened(**fields).request


def streamed(exchange: Exchange, *events: Event) -> list[Json]:
    """The data of every frame; names are checked against their types, and numbers count."""
    frames = b"".join(frame for event in events for frame in exchange.push(event))
    out = []
    for number, frame in enumerate(frames.decode().removesuffix("\n\n").split("\n\n")):
        name, data = frame.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        assert value.pop("sequence_number") == number
        out.append(value)
    return out


def called(index: int, call_id: str, name: str, arguments: str) -> list[Event]:
    """A complete call, in two pieces."""
    half = len(arguments) // 2
    pieces = [piece for piece in (arguments[:half], arguments[half:]) if piece]
    return [
        CallStarted(index, call_id, name),
        *(CallDelta(index, piece) for piece in pieces),
        CallEnded(index, arguments),
    ]
