"""Bodies of the Messages API through the dialect, without a server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from headrace.serve.dialect import Context, Count, Exchange, Generate
from headrace.serve.dialects import anthropic
from headrace.serve.events import Event
from headrace.serve.request import Json, Request
from headrace.serve.validation import read
from serve.scripted import CARD

CONTEXT = Context(CARD, id="5" * 32, now=1_800_000_000.0)
HI = [{"role": "user", "content": "Hi"}]
BODY: Json = {"model": CARD.name, "max_tokens": 64, "messages": HI}
GET: Json = {"name": "get", "description": "Gets.", "input_schema": {"type": "object"}}
# What a coding agent puts in front of its instructions.
HEADER = "x-anthropic-billing-header: cc_version=2.1.270.abc; cc_entrypoint=cli; cch=00000;"

_MESSAGES, _COUNT = anthropic.ENDPOINTS


def opened(**fields: Any) -> Exchange:
    """The exchange of a body with these fields in place of the shortest one's."""
    assert isinstance(_MESSAGES, Generate)
    exchange = _MESSAGES.open(read(_MESSAGES.body, {**BODY, **fields}), CONTEXT)
    assert isinstance(exchange, Exchange)
    return exchange


def asked(**fields: Any) -> Request:
    return opened(**fields).request


def counted(**fields: Any) -> Request:
    """What a count asks for."""
    assert isinstance(_COUNT, Count)
    body = {"model": CARD.name, "messages": HI, **fields}
    return _COUNT.open(read(_COUNT.body, body), CONTEXT).request


def frames(events: Iterable[Event], **fields: Any) -> list[Json]:
    """The data of a stream's frames; each is named by its type."""
    exchange = opened(**fields, stream=True)
    return [parsed(frame) for event in events for frame in exchange.push(event)]


def parsed(frame: bytes) -> Json:
    head, data, *rest = frame.decode().split("\n")
    assert rest == ["", ""]
    value: Json = json.loads(data.removeprefix("data: "))
    assert head == f"event: {value['type']}"
    return value
