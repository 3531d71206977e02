"""The application: every dialect's endpoints over one backend. The one place that joins HTTP and generations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.serve.backend import Backend, Running
from headrace.serve.dialect import Context, Count, Counting, Endpoint, Exchange, Page, Tell
from headrace.serve.events import Event, Failed, Failure, Finished, collected
from headrace.serve.failure import UNSUPPORTED_IMAGE, RequestError, failure
from headrace.serve.http import guard
from headrace.serve.http.answer import Answer, App, Handed, hints, named
from headrace.serve.http.body import Room, apart, check_type, parsed, received
from headrace.serve.http.guard import Policy
from headrace.serve.http.openapi import described
from headrace.serve.http.routes import Place, Table
from headrace.serve.request import Json, Request
from headrace.serve.telemetry.observer import Observer
from headrace.serve.validation import check_stops, read

KEEPALIVE_SECONDS = 10.0
MAX_LOGGED = 1024  # names of ignored fields
MAX_HEADER = 1024  # characters of the header that lists them

log = logging.getLogger(__name__)

T = TypeVar("T")


def create_app(
    backend: Backend,
    dialects: Sequence[ModuleType],
    *,
    policy: Policy | None = None,
    keepalive: float | None = None,
    room: Room | None = None,
    observer: Observer | None = None,
) -> App:
    """An application that serves `dialects` (modules of `serve.dialects`). keepalive: seconds of silence; room: for
    bodies."""
    description: Json = {}
    observer = observer or Observer()
    own = (
        Tell("GET", "/health", lambda _body, _context: {"status": "ok"}),
        Tell("GET", "/openapi.json", lambda _body, _context: description),
        *observer.endpoints,
    )
    table, policy = Table(dialects, own), policy or Policy()
    if keepalive is None:
        keepalive = KEEPALIVE_SECONDS
    description.update(described(dialects, own, backend.card.version, policy.api_key is not None))
    served = Served(backend, table, policy, keepalive, room or Room(), observer)
    return App(table, policy, observer, served)


class Served:
    """All endpoints as one ASGI application."""

    def __init__(
        self,
        backend: Backend,
        table: Table,
        policy: Policy,
        keepalive: float,
        room: Room,
        observer: Observer,
    ) -> None:
        self._backend = backend
        self._table = table
        self._policy = policy
        self._keepalive = keepalive
        self._logged: set[str] = set()
        self._room = room
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        http = HttpRequest(scope, receive)
        headers = {name.lower(): value for name, value in http.headers.items()}
        handed = Handed.of(scope)
        always = (*named(handed.id), *guard.cors(headers.get("origin"), self._policy))
        answer = Answer(http, send, always)
        with self._observer.request(scope["path"], handed.id) as answer.watch:
            with suppress(ClientDisconnect):
                await self._try(http, headers, handed.id, answer)
            if handed.refused is not None:
                answer.watch.refused(handed.refused)

    async def _try(
        self, http: HttpRequest, headers: Mapping[str, str], request_id: str, answer: Answer
    ) -> None:
        """Answer, if need be with an error."""
        try:
            await self._answer(http, headers, request_id, answer)
        except ClientDisconnect:
            raise
        except Exception as error:
            if answer.begun:  # the server cuts the connection, which no client takes for an end
                raise
            if not isinstance(error, HeadraceError):
                log.exception("a request failed")
            await self._fail(failure(error), http.scope["path"], answer)

    async def _answer(
        self, http: HttpRequest, headers: Mapping[str, str], request_id: str, answer: Answer
    ) -> None:
        answer.watch.admit()
        path, method = http.scope["path"], http.method
        found = self._table.find(path)
        methods = found[0].methods if found else ("OPTIONS",)
        if method == "OPTIONS" and "access-control-request-method" in headers:
            guard.check(guard.OPEN_PATHS[0], headers, http.scope.get("server"), self._policy)
            await answer.empty(204, guard.preflight(headers, methods))
            return
        guard.check(path, headers, http.scope.get("server"), self._policy)
        if method == "OPTIONS" and (found or path == "*"):
            await answer.empty(204, [("allow", ", ".join(methods))])
        elif found is None:
            raise RequestError(f"there is no {path!r:.200} here", status=404, code="not_found")
        elif (endpoint := _endpoint(found[0], method)) is not None:
            context = Context(self._backend.card, request_id, time.time(), headers, dict(found[1]))
            answer.watch.found(found[0].dialect, endpoint, context)
            await self._serve(endpoint, context, http, answer)
        elif method == "HEAD":
            await answer.empty(200, ())
        else:
            what = Failure(405, "method_not_allowed", f"{method[:40]} is not for this path")
            answer.watch.failed(what)
            await answer.json(found[0].error(what), 405, [("allow", ", ".join(methods))])

    async def _serve(
        self, endpoint: Endpoint, context: Context, http: HttpRequest, answer: Answer
    ) -> None:
        with self._room.share() as share:
            data, arrived = b"", time.monotonic()
            if endpoint.body is not None:
                check_type(context.headers)
                data = await received(answer.body(), share)
                arrived = time.monotonic()  # all of it
            opened = await apart(partial(_opened, endpoint, data, context), len(data))
        if isinstance(endpoint, Page):
            assert isinstance(opened, str)
            await answer.text(opened, endpoint.media_type)
        elif isinstance(opened, dict):
            await answer.json(opened)
        elif isinstance(opened, Counting):
            assert isinstance(endpoint, Count)
            self._check(opened.request)
            answer.headers = self._ignored(opened.ignored, context)
            counted = await _while_there(http, self._backend.count(opened.request))
            await answer.json(endpoint.whole(counted))
        elif isinstance(opened, Exchange):
            self._check(opened.request)
            await self._generate(opened, context, http, answer, arrived)

    def _check(self, request: Request) -> None:
        """Refuse what no dialect may ask for."""
        check_stops(request.stop)
        if not self._backend.card.vision and any(turn.images for turn in request.turns):
            raise RequestError(
                f"the model {self._backend.card.name!r} takes no images", code=UNSUPPORTED_IMAGE
            )

    async def _generate(
        self,
        exchange: Exchange,
        context: Context,
        http: HttpRequest,
        answer: Answer,
        arrived: float,
    ) -> None:
        """Answer until it is complete or the client has left. arrived: see `Backend.submit`."""
        answer.headers = self._ignored(exchange.ignored, context)
        running = self._backend.submit(exchange.request, request_id=context.id, arrived=arrived)
        running = answer.watch.heard(running, exchange.request)
        answering = asyncio.ensure_future(self._tell(exchange, running, http.scope["path"], answer))
        gone = asyncio.ensure_future(_gone(http))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            gone.cancel()
            answering.cancel()
            ended = await asyncio.gather(answering, gone, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]

    async def _tell(self, exchange: Exchange, running: Running, path: str, answer: Answer) -> None:
        events = _events(running)
        first = await anext(events)
        if isinstance(first, Failed):
            await self._fail(first.failure, path, answer)
        elif exchange.stream:
            await _stream(exchange, first, events, self._keepalive, answer)
        else:
            reply = collected([first, *[event async for event in events]])
            if isinstance(reply, Failure):
                await self._fail(reply, path, answer)
            else:
                await answer.json(exchange.whole(reply))

    def _ignored(self, ignored: Sequence[str], context: Context) -> list[tuple[str, str]]:
        """The header that names fields without effect; each is logged once."""
        names = [quote(name[:100], safe="[].") for name in ignored if name]
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.info("request %s: the field %s has no effect", context.id, name)
        listed = ", ".join(names)
        if len(listed) > MAX_HEADER:
            listed = listed[:MAX_HEADER].rpartition(", ")[0] + ", ..."
        return [("x-headrace-ignored-fields", listed)] if names else []

    async def _fail(self, what: Failure, path: str, answer: Answer) -> None:
        answer.watch.failed(what)
        await answer.json(self._table.error(path)(what), what.status, hints(what.status))


def _endpoint(place: Place, method: str) -> Endpoint | None:
    return place.endpoints.get("GET" if method == "HEAD" else method)


def _opened(endpoint: Endpoint, data: bytes, context: Context) -> Exchange | Counting | Json | str:
    body = None if endpoint.body is None else read(endpoint.body, parsed(data))
    return (
        endpoint.answer(body, context)
        if isinstance(endpoint, Tell | Page)
        else endpoint.open(body, context)
    )


async def _stream(
    exchange: Exchange, event: Event, events: AsyncIterator[Event], keepalive: float, answer: Answer
) -> None:
    """Send what the dialect makes of every event, and something when it makes nothing for a while."""
    kind = [("content-type", exchange.media_type), ("cache-control", "no-cache")]
    await answer.start(200, (), kind)
    clock = asyncio.get_running_loop().time
    told = clock()
    while True:
        for frame in exchange.push(event):
            await answer.push(frame, more=True)
            told = clock()
        if isinstance(event, Finished | Failed):
            break
        following = asyncio.ensure_future(anext(events))
        try:
            left = max(0.0, told + keepalive - clock())
            while not (await asyncio.wait((following,), timeout=left))[0]:
                if frame := exchange.keepalive():
                    await answer.push(frame, more=True)
                told, left = clock(), keepalive
            event = following.result()
        finally:
            following.cancel()
    await answer.push(b"", more=False)


async def _events(running: Running) -> AsyncIterator[Event]:
    """Events up to an end. A backend that breaks or gives up has failed, which the dialect tells in its own way."""
    try:
        while (event := await running.next()) is not None:
            yield event
            if isinstance(event, Finished | Failed):
                return
    except Exception as error:
        log.exception("a generation failed")
        yield Failed(failure(error))
        return
    yield Failed(Failure(503, "cancelled", "the server ended the generation"))


async def _while_there(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, which is cancelled when the client leaves. Then raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(http: HttpRequest) -> None:
    """Returns when the client leaves."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
