"""Clients of an OpenAI-compatible server: as many at a time as wanted, each with one streamed request after another.

Plain sockets: what a client costs comes off the same processors as the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answered:
    """One request: seconds to its first text and to its end, and the tokens that the server counted."""

    first: float
    whole: float
    tokens: int


@dataclass(frozen=True)
class Load:
    """All requests of one run, and the seconds from the first byte sent to the last one read."""

    answers: tuple[Answered, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


def run(url: str, model: str, prompts: Sequence[str], clients: int, max_tokens: int) -> Load:
    """Ask all prompts, `clients` at a time. Raises RuntimeError for a request that fails."""
    return asyncio.run(_run(url, model, prompts, clients, max_tokens))


async def _run(url: str, model: str, prompts: Sequence[str], clients: int, most: int) -> Load:
    waiting, answers = list(reversed(prompts)), list[Answered]()

    async def client() -> None:
        while waiting:
            answers.append(await _ask(url, _body(model, waiting.pop(), most)))

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(tuple(answers), time.perf_counter() - start)


def _body(model: str, prompt: str, max_tokens: int) -> bytes:
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "presence_penalty": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(asked).encode()


async def _ask(url: str, body: bytes) -> Answered:
    place = urlsplit(url)
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    first, tokens, ended = None, 0, False
    try:
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            ended = line.startswith(b"data: [DONE]")
            if ended:
                break
            chunk = json.loads(line[6:])
            if first is None and any(c["delta"].get("content") for c in chunk["choices"]):
                first = time.perf_counter() - start
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    finally:
        writer.close()
    if not ended or first is None:
        raise RuntimeError("a request got no whole answer")
    return Answered(first, time.perf_counter() - start, tokens)
