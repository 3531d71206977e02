"""The application: every dialect's endpoints over one backend. The one place that joins HTTP and generations."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from types import ModuleType

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serve.backend import Backend, Running
from headrace.serve.dialect import Context, Count, Endpoint, ErrorBody, Exchange, Generate
from headrace.serve.events import Event, Failed, Failure, Started, collected
from headrace.serve.failure import RequestError, failure
from headrace.serve.request import Json
from headrace.serve.validation import decoded, read

KEEPALIVE_SECONDS = 10.0
MAX_BODY = 32 << 20


def create_app(backend: Backend, dialects: Sequence[ModuleType]) -> Starlette:
    """An ASGI application that serves `dialects` (modules of `serve.dialects`)."""
    routes = [
        Route(endpoint.path, Served(backend, endpoint, dialect.error), methods=[endpoint.method])
        for dialect in dialects
        for endpoint in dialect.ENDPOINTS
    ]
    return Starlette(routes=routes)


class Served:
    """One endpoint as an ASGI application."""

    def __init__(self, backend: Backend, endpoint: Endpoint, error: ErrorBody) -> None:
        self._backend = backend
        self._endpoint = endpoint
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        try:
            await self._answer(http, send)
        except ClientDisconnect:
            pass
        except HeadraceError as error:
            await self._fail(failure(error), http, send)

    async def _answer(self, http: HttpRequest, send: Send) -> None:
        endpoint, context = self._endpoint, _context(self._backend, http)
        body = None
        if endpoint.body is not None:
            body = read(endpoint.body, decoded(await _body(http)))
        if isinstance(endpoint, Generate):
            opened = endpoint.open(body, context)
            if isinstance(opened, Exchange):
                await self._generate(opened, context, http, send)
                return
            told = opened
        elif isinstance(endpoint, Count):
            told = endpoint.whole(await self._backend.count(endpoint.open(body, context)))
        else:
            told = endpoint.answer(body, context)
        await _json(told, 200, {}, http, send)

    async def _generate(
        self, exchange: Exchange, context: Context, http: HttpRequest, send: Send
    ) -> None:
        running = self._backend.submit(
            exchange.request, request_id=context.id, arrived=time.monotonic()
        )
        gone = asyncio.ensure_future(_gone(http, running))
        try:
            first = await running.next()
            if isinstance(first, Failed):
                await self._fail(first.failure, http, send)
            elif first is not None and exchange.stream:
                await _stream(exchange, first, running, send)
            elif first is not None:
                await self._whole(exchange, first, running, http, send)
        finally:
            running.cancel()
            gone.cancel()

    async def _whole(
        self, exchange: Exchange, first: Event, running: Running, http: HttpRequest, send: Send
    ) -> None:
        events = [first]
        while (event := await running.next()) is not None:
            events.append(event)
        if isinstance(events[-1], Started):  # cancelled: nobody is there
            return
        reply = collected(events)
        if isinstance(reply, Failure):
            await self._fail(reply, http, send)
        else:
            await _json(exchange.whole(reply), 200, dict(exchange.headers), http, send)

    async def _fail(self, what: Failure, http: HttpRequest, send: Send) -> None:
        await _json(self._error(what), what.status, {}, http, send)


async def _stream(exchange: Exchange, first: Event, running: Running, send: Send) -> None:
    """Send what the dialect makes of every event, and something when nothing happens for a while."""
    headers = {"content-type": exchange.media_type, "cache-control": "no-cache", **exchange.headers}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    event: Event | None = first
    told = time.monotonic()
    while event is not None:
        for frame in exchange.push(event):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            told = time.monotonic()
        following = asyncio.ensure_future(running.next())
        done: set[asyncio.Future[Event | None]] = set()
        while not done:  # events of which a dialect tells nothing are silence too
            left = told + KEEPALIVE_SECONDS - time.monotonic()
            if left > 0:
                done, _ = await asyncio.wait([following], timeout=left)
                continue
            if frame := exchange.keepalive():
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            told = time.monotonic()
        event = following.result()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _context(backend: Backend, http: HttpRequest) -> Context:
    headers = {name.lower(): value for name, value in http.headers.items()}
    path = {name: str(value) for name, value in http.path_params.items()}
    return Context(backend.card, uuid.uuid4().hex, time.time(), headers, path)


async def _body(http: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_BODY:
            raise RequestError(
                f"the body is larger than {MAX_BODY:,} bytes", status=413, code="request_too_large"
            )
        parts.append(part)
    return b"".join(parts)


async def _gone(http: HttpRequest, running: Running) -> None:
    """Cancel when the client leaves."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    running.cancel()


async def _json(
    body: Json, status: int, headers: dict[str, str], http: HttpRequest, send: Send
) -> None:
    data = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    response = Response(data, status, headers, "application/json")
    await response(http.scope, http.receive, send)
