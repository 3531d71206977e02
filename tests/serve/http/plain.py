"""A dialect with as little of its own as there can be: what is HTTP's is tested without any real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from headrace.serve.dialect import (
    LINES,
    Context,
    Count,
    Counting,
    Endpoint,
    Exchange,
    Generate,
    Tell,
)
from headrace.serve.events import Event, Failed, Failure, Finished, Reply, TextDelta
from headrace.serve.failure import RequestError
from headrace.serve.request import Image, Json, Request, Text, Turn
from headrace.serve.validation import OpenWire, Wire


class Ask(OpenWire):
    """What is asked."""

    text: str = Field(max_length=40 << 20)
    stream: bool | None = None
    image: bool | None = None
    limit: int | None = Field(None, ge=1, le=100)


class Name(Wire):
    name: str


class PlainExchange(Exchange):
    media_type = LINES

    def __init__(self, ask: Ask) -> None:
        part = Image(b"picture", "image/png") if ask.image else Text(ask.text)
        turn = Turn("user", (part,))
        super().__init__(Request("painted:1m", (turn,)), stream=bool(ask.stream))
        self.ignored = tuple(ask.model_extra or ())

    def whole(self, reply: Reply) -> Json:
        return {"text": reply.text}

    def push(self, event: Event) -> Iterator[bytes]:
        match event:
            case TextDelta(text):
                yield json.dumps({"text": text}).encode() + b"\n"
            case Failed(failure):
                yield json.dumps({"failed": failure.code}).encode() + b"\n"
            case Finished(reason):
                yield json.dumps({"done": reason}).encode() + b"\n"

    def keepalive(self) -> bytes:
        return b"\n"


def error(failure: Failure) -> Json:
    return {"wrong": failure.text, "code": failure.code}


def _exchange(ask: Ask, context: Context) -> Exchange:
    return PlainExchange(ask)


def _tell(_body: None, context: Context) -> Json:
    return {"name": context.card.name}


def _thing(_body: None, context: Context) -> Json:
    raise RequestError(f"no {context.path['id']}", status=404, code="not_found")


@dataclass
class Dialect:
    """Stands for a module."""

    ENDPOINTS: tuple[Endpoint, ...]
    error: Callable[[Failure], Json]
    __name__: str


def plain(opening: Callable[[Any, Context], Exchange | Json] = _exchange) -> Any:
    """The dialect. opening: what its endpoint does with a body."""
    return Dialect(
        (
            Generate("/plain/ask", Ask, opening),
            Count(
                "/plain/count",
                Ask,
                lambda ask, context: Counting(PlainExchange(ask).request),
                lambda n: {"tokens": n},
            ),
            Tell("GET", "/plain/model", _tell),
            Tell("GET", "/plain/things/{id}", _thing),
            Tell("DELETE", "/plain/things/{id}", _thing),
            Tell("POST", "/plain/named", lambda body, context: {"name": body.name}, Name),
        ),
        error,
        "tests.plain",
    )
