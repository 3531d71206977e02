"""What HTTP and the application share: an application with its table and policy, and one response of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Scope, Send

from headrace.serve.events import Failure
from headrace.serve.http import guard
from headrace.serve.http.guard import Policy
from headrace.serve.http.routes import Table
from headrace.serve.request import Json
from headrace.serve.telemetry.observer import Observer, Watch

_HANDED = "headrace"  # the key of a scope's state


class App(Starlette):
    """An ASGI application. table, policy and observer: for whoever answers in its place, as `protocol` does."""

    def __init__(self, table: Table, policy: Policy, observer: Observer, served: ASGIApp) -> None:
        super().__init__()
        self.table = table
        self.policy = policy
        self.observer = observer
        self.router.redirect_slashes = False
        self.router.default = served


@dataclass
class Handed:
    """What a connection and the application both know of a request. refused: what the connection answered in the
    application's place, which then learns that the client is gone."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    refused: Failure | None = None

    @property
    def state(self) -> dict[str, object]:
        """For the state of the request's scope."""
        return {_HANDED: self}

    @staticmethod
    def of(scope: Scope) -> Handed:
        """What came with a request; its own where nothing did."""
        handed = scope.get("state", {}).get(_HANDED)
        return handed if isinstance(handed, Handed) else Handed()


class Answer:
    """One response. headers: of it besides those that are always there. begun: whether the client has seen some.

    A body that nobody asked for is thrown away first, for many clients read no answer before they have sent it all.
    Who waits for "100 Continue" sends none; then the connection ends, for what comes next on it could be either.
    """

    def __init__(self, http: HttpRequest, send: Send, always: guard.Pairs) -> None:
        self._http = http
        self._unread = True
        self._send = send
        self._always = always
        self.headers: list[tuple[str, str]] = []
        self.begun = False
        self.watch = Watch()

    def body(self) -> AsyncIterator[bytes]:
        """The parts of the request's body."""
        self._unread = False
        return self._http.stream()

    async def start(self, status: int, headers: guard.Pairs, default: guard.Pairs = ()) -> None:
        """default: headers that the answer's own may replace."""
        pairs = {name.lower(): value for name, value in (*default, *self.headers, *headers)}
        pairs.update(self._always)
        if self._unread and "expect" in self._http.headers:
            pairs["connection"] = "close"
        elif self._unread:
            async for _ in self.body():
                pass
        raw = [(name.encode(), value.encode("latin-1")) for name, value in pairs.items()]
        self.begun = True
        self.watch.told(status)
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def push(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    async def empty(self, status: int, headers: guard.Pairs) -> None:
        length = [] if status == 204 else [("content-length", "0")]
        await self.start(status, [*headers, *length])
        await self.push(b"", more=False)

    async def json(self, body: Json, status: int = 200, headers: guard.Pairs = ()) -> None:
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        await self.text(text, "application/json", status, headers)

    async def text(
        self, text: str, media_type: str, status: int = 200, headers: guard.Pairs = ()
    ) -> None:
        data = text.encode()
        kind = [("content-type", media_type), ("content-length", str(len(data)))]
        await self.start(status, [*kind, *headers])
        await self.push(data, more=False)


def named(request_id: str) -> guard.Pairs:
    """Headers that name a request as its line in the log does, for OpenAI's clients and for Anthropic's."""
    return (("x-request-id", request_id), ("request-id", f"req_{request_id}"))


def hints(status: int) -> guard.Pairs:
    """Headers that go with a status."""
    return {401: [("www-authenticate", "Bearer")], 503: [("retry-after", "1")]}.get(status, [])
