"""Ollama's bodies through the dialect alone, for its tests."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image as Pillow

from headrace.serve.dialect import Context, Exchange, Generate
from headrace.serve.dialects import ollama
from headrace.serve.failure import RequestError
from headrace.serve.request import Image, Json, Request, Text, Turn
from headrace.serve.validation import read
from serve.scripted import CARD

MODEL = CARD.name
CONTEXT = Context(CARD, "0" * 32, 1_700_000_000.25)
HELLO = {"role": "user", "content": "Hello"}
ASKED = Turn("user", (Text("Hello"),))
ENDPOINTS = {e.path: e for e in ollama.ENDPOINTS if isinstance(e, Generate)}
CHAT, GENERATE = "/api/chat", "/api/generate"
BASIC = {CHAT: {"messages": [HELLO]}, GENERATE: {"prompt": "Hello"}}
PLAIN = Request(MODEL, (ASKED,), limit=512)
BOTH = pytest.mark.parametrize("path", [CHAT, GENERATE])


def opened(path: str, body: Json, context: Context = CONTEXT) -> Exchange | Json:
    endpoint = ENDPOINTS[path]
    return endpoint.open(read(endpoint.body, {"model": MODEL, **body}), context)


def asked(path: str, **body: Any) -> Request:
    exchange = opened(path, {**BASIC[path], **body})
    assert isinstance(exchange, Exchange)
    return exchange.request


def chat(*messages: Json, **body: Any) -> Request:
    return asked(CHAT, messages=list(messages), **body)


def refused(said: str, path: str, told: Context = CONTEXT, **body: Any) -> RequestError:
    with pytest.raises(RequestError, match=said) as caught:
        opened(path, {**BASIC[path], **body}, told)
    assert caught.value.status == 400
    return caught.value


def picture() -> bytes:
    out = io.BytesIO()
    Pillow.new("RGB", (2, 2), "red").save(out, "PNG")
    return out.getvalue()


PNG = picture()
PNG64 = base64.b64encode(PNG).decode()
RED = Image(PNG, "image/png")
