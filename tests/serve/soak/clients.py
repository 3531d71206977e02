"""Clients of a soak. What each does next is drawn from a seed; what an answer has to be, from the first to ask it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from serve.soak.line import Line, request
from serve.soak.questions import ENDLESS, FIXED, SKY, TOLD, Question, long
from serve.soak.speech import DIALECTS, RESPONSES, Dialect, Said, frames

FRESH_SECONDS = 30  # that a connection may wait for its next request
Known = dict[str, tuple[str, list[tuple[str, Any]], int]]


@dataclass
class World:
    """What all clients share. hours: whether there is time for what takes some. known: the answer of every question;
    ends: how it ended, by dialect."""

    port: int
    model: str
    hours: bool = False
    known: Known = field(default_factory=dict)
    ends: dict[tuple[str, str], str | None] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0  # of complete answers
    longs: int = 0  # long prompts that were thought of

    def new_long(self) -> Question:
        self.longs += 1
        return long(self.longs)

    def check(self, q: Question, dialect: Dialect, said: Said) -> None:
        """The same question has the same answer, whoever asks, however, and beside whom."""
        assert said.error is None, (q.name, dialect.name, said.error)
        got = (said.text, said.calls, said.tokens)
        assert got == self.known.setdefault(q.name, got), (q.name, dialect.name)
        end = self.ends.setdefault((q.name, dialect.name), said.finish)
        assert said.finish == end, (q.name, dialect.name)
        assert bool(said.calls) == q.tool, (q.name, said)
        if q.schema:
            assert set(json.loads(said.text)) == set(q.schema["required"])
        self.tokens += said.tokens


class Client:
    """One that keeps a connection for as long as it can."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world = world
        self.dice = dice
        self._line: Line | None = None

    async def line(self) -> Line:
        """The kept connection; a new one where the server may have given up waiting for the next request."""
        if self._line is not None and self._line.idle > FRESH_SECONDS:
            await self.leave()
        if self._line is None or not self._line.open:
            self._line = await Line.to(self.world.port)
        return self._line

    async def leave(self) -> None:
        if self._line is not None and self._line.open:
            await self._line.leave()

    async def act(self, name: str) -> None:
        """One of ACTS, by its name."""
        await ACTS[name][1](self)
        self.world.done[name] += 1

    # ---- what it asks -----------------------------------------------------------------------------

    def bytes_of(self, q: Question, dialect: Dialect, stream: bool) -> bytes:
        body, headers = dialect.ask(q, self.world.model, stream)
        return request("POST", dialect.path, body, headers)

    def some(self, questions: tuple[Question, ...] = FIXED) -> tuple[Question, Dialect]:
        q = self.dice.choice(questions)
        return q, self.dice.choice([dialect for dialect in DIALECTS if dialect.able(q)])

    async def ask(
        self, q: Question, dialect: Dialect, stream: bool, line: Line | None = None
    ) -> None:
        """Asks, and checks the whole answer."""
        line = line or await self.line()
        await line.send(self.bytes_of(q, dialect, stream))
        self.heard(q, dialect, stream, *await line.answer())

    def heard(self, q: Question, dialect: Dialect, stream: bool, status: int, data: bytes) -> None:
        assert status == 200, (q.name, dialect.name, data)
        said = (
            dialect.streamed(frames(data, dialect.lines))
            if stream
            else dialect.whole(json.loads(data))
        )
        self.world.check(q, dialect, said)
        self.world.done[f"answer {dialect.name}, {'streamed' if stream else 'whole'}"] += 1
        self.world.done[f"answer to {'long' if q.name.startswith('long') else q.name}"] += 1

    # ---- what it does -----------------------------------------------------------------------------

    async def whole(self) -> None:
        await self.ask(*self.some(), False)

    async def streamed(self) -> None:
        await self.ask(*self.some(), True)

    async def long(self) -> None:
        """A prompt that nobody asked before, then the same in other words."""
        q = self.world.new_long()
        for _ in range(2):
            await self.ask(*self.some((q,)), self.dice.random() < 0.5)

    async def crowd(self) -> None:
        """So many at once that most wait in line; they leave there, but for one."""
        q = self.world.new_long()
        lines = [await Line.to(self.world.port) for _ in range(5)]
        for line in lines:
            _, dialect = self.some((self.world.new_long(),))
            await line.send(self.bytes_of(self.world.new_long(), dialect, True))
        stays = asyncio.ensure_future(self.ask(*self.some((q,)), True))
        for line in lines:
            await asyncio.sleep(self.dice.uniform(0, 0.1))
            await line.leave(abruptly=self.dice.random() < 0.5)
        await stays

    async def gone_at_once(self) -> None:
        line = await Line.to(self.world.port)
        await line.send(self.bytes_of(*self.some(), self.dice.random() < 0.5))
        await asyncio.sleep(self.dice.choice([0, 0.001, 0.01, 0.03]))
        await line.leave(abruptly=self.dice.random() < 0.5)

    async def gone_in_prefill(self) -> None:
        line = await Line.to(self.world.port)
        q = self.world.new_long()
        await line.send(self.bytes_of(*self.some((q,)), self.dice.random() < 0.5))
        await asyncio.sleep(self.dice.uniform(0.02, 0.5))
        await line.leave(abruptly=self.dice.random() < 0.5)

    async def gone_in_decode(self) -> None:
        """Leaves behind the third part of a stream or later."""
        line = await Line.to(self.world.port)
        _, dialect = self.some((TOLD,))
        await line.send(self.bytes_of(TOLD, dialect, True))
        head = await line.head()
        assert head.status == 200
        count = self.dice.randrange(5, 40)
        async for _ in line.parts(head):
            count -= 1
            if not count:
                break
        await line.leave(abruptly=self.dice.random() < 0.5)

    async def stalled(self) -> None:
        """Reads nothing for a while, then all of it."""
        long = self.world.hours and self.dice.random() < 0.2
        q, pause = (ENDLESS, (10.0, 25.0)) if long else (TOLD, (0.3, 1.5))
        line = await Line.to(self.world.port, narrow=True)
        _, dialect = self.some((q,))
        dialect = RESPONSES if long else dialect  # its frames are the largest
        await line.send(self.bytes_of(q, dialect, True))
        head, data = await line.head(), []
        async for part in line.parts(head):
            if not data:
                await asyncio.sleep(self.dice.uniform(*pause))
            data.append(part)
        await line.leave()
        self.heard(q, dialect, True, head.status, b"".join(data))

    async def bad(self) -> None:
        """A wrong request, and a right one behind it."""
        await self.refused(*self.dice.choice(bad_requests(self.world.model)))
        await self.ask(*self.some((SKY,)), self.dice.random() < 0.5)

    async def refused(self, about: str, status: int, data: bytes) -> None:
        line = await self.line()
        await line.send(data)
        got, body = await line.answer()
        assert (got, body[:1]) == (status, b"{"), (about, got, body)

    async def torn(self) -> None:
        """Part of a request, and then the end of the connection."""
        data = self.bytes_of(*self.some(), True)
        line = await Line.to(self.world.port)
        await line.send(data[: self.dice.randrange(1, len(data))])
        await asyncio.sleep(self.dice.uniform(0, 0.05))
        await line.leave(abruptly=self.dice.random() < 0.5)

    async def looked(self) -> None:
        """Asks what is told without the model; at times all at once, before any answer."""
        line = await self.line()
        show = request("POST", "/api/show", {"model": self.world.model})
        asked = self.dice.sample([*LOOKS, show], 3)
        if self.dice.random() < 0.5:
            await line.send(b"".join(asked))
            found = [await line.answer() for _ in asked]
        else:
            found = []
            for one in asked:
                await line.send(one)
                found.append(await line.answer())
        for data, (status, body) in zip(asked, found, strict=True):
            assert status == 200, (data, status, body[:500])

    async def counted(self) -> None:
        line = await self.line()
        body = {"model": self.world.model, "messages": [{"role": "user", "content": SKY.text}]}
        await line.send(request("POST", "/v1/messages/count_tokens", body))
        status, data = await line.answer()
        assert (status, list(json.loads(data))) == (200, ["input_tokens"])


# How often, of all.
ACTS: dict[str, tuple[int, Callable[[Client], Awaitable[None]]]] = {
    "whole": (5, Client.whole),
    "streamed": (5, Client.streamed),
    "long": (2, Client.long),
    "crowd": (1, Client.crowd),
    "gone at once": (3, Client.gone_at_once),
    "gone in prefill": (2, Client.gone_in_prefill),
    "gone in decode": (2, Client.gone_in_decode),
    "stalled": (1, Client.stalled),
    "bad": (3, Client.bad),
    "torn": (3, Client.torn),
    "looked": (3, Client.looked),
    "counted": (1, Client.counted),
}
LOOKS = [
    request("GET", path)
    for path in (
        "/", "/health", "/metrics", "/openapi.json", "/headrace/status", "/v1/models", "/api/tags", "/api/ps",
        "/api/version", "/v4/ai/config", "/coding-agent/v1/models", "/v1/credits",
    )
]  # fmt: skip


def bad_requests(model: str) -> list[tuple[str, int, bytes]]:
    """What is wrong, the status, and the bytes."""
    chat, hello = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
    right = {"model": model, "messages": hello, "max_tokens": 4}
    endless = [{"role": "user", "content": "word " * 5000}]
    recursive = {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}
    return [
        ("no JSON", 400, request("POST", chat, b'{"model": ')),
        ("no field", 400, request("POST", chat, right | {"colour": 1})),
        ("a wrong type", 400, request("POST", chat, right | {"max_tokens": "4"})),
        ("another model", 400, request("POST", chat, right | {"model": "gpt-9"})),
        ("another model", 404, request("POST", "/v1/messages", right | {"model": "gpt-9"})),
        ("no messages", 400, request("POST", "/v1/messages", right | {"messages": []})),
        ("too long", 400, request("POST", chat, right | {"messages": endless})),
        ("a wrong schema", 400, request("POST", "/api/chat", {"model": model, "messages": hello, "format": recursive})),
        ("no such path", 404, request("GET", "/v1/nothing")),
        ("no such method", 405, request("DELETE", chat)),
        ("no such host", 403, request("GET", "/v1/models", headers={"Host": "evil.example"})),
        ("no JSON type", 415, request("POST", chat, b"x", {"Content-Type": "image/png"})),
        ("a picture", 400, request("POST", "/api/generate", {"model": model, "prompt": "Hi", "images": ["iVBORw0KGgo="]})),
        ("embeddings", 400, request("POST", "/api/embed", {"model": model, "input": "Hi"})),
        ("two lengths", 400, request("POST", chat, right, {"content-length": "3"})),
    ]  # fmt: skip


async def play(world: World, seed: int, *, clients: int, seconds: float, most: int) -> None:
    """Clients that act for so long, each at most so often."""
    end = asyncio.get_running_loop().time() + seconds

    async def one(number: int) -> None:
        client = Client(world, random.Random(f"{seed} {number}"))
        names = [name for name, (weight, _) in ACTS.items() for _ in range(weight)]
        for _ in range(most):
            if asyncio.get_running_loop().time() >= end:
                break
            await client.act(client.dice.choice(names))
        await client.leave()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one(number))


async def warm(world: World) -> None:
    """Every question, every wrong request, every act, and so many long prompts that all pages were used."""
    client = Client(world, random.Random(0))
    for q in FIXED:
        await client.ask(*client.some((q,)), client.dice.random() < 0.5)
    for wrong in bad_requests(world.model):
        await client.refused(*wrong)
    for name in ACTS:
        await client.act(name)
    await client.leave()
    crowd = [Client(world, random.Random(number)) for number in range(2)]
    await asyncio.gather(*(one.act("crowd") for one in crowd))
    for one in crowd:
        await one.leave()
