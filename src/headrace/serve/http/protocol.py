"""The server's side of a connection: uvicorn's, behind a gate that measures heads, bodies and time.

The gate reads each head itself (`head`) and hands on what is right in its plainest form, one request after the
other. What is refused here is answered so that the client can read it: the answer, the end of the stream, and then what
the client still sends is thrown away for a while, because a connection that is closed with unread input is reset, and
takes the answer with it.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.serve.failure import RequestError, failure
from headrace.serve.http import guard
from headrace.serve.http.answer import App, Handed, hints, named
from headrace.serve.http.head import (
    MAX_EMPTY,
    MAX_HEAD,
    begins_well,
    end_of_head,
    head_too_large,
    origin_of,
    path_of,
    read_head,
)

Phase = Literal["head", "body", "answer", "ending", "closed"]


@dataclass(frozen=True)
class Limits:
    """Seconds and bytes that one connection may take, and how many connections there may be.

    connections: with a place; as many more may send a request, or be told that there is no place. young_seconds: in
    which a connection may send its request before it is closed to make room. head_seconds: for a whole head.
    body_seconds and body_rate: for a body of so many bytes a second. idle_seconds: between requests. stall_seconds: of
    a reader that takes nothing. ending_*: of what is thrown away behind a refusal. ahead_bytes: of requests that were
    sent before the answer to the one in hand. grace_seconds: for answers when the server ends.
    """

    connections: int = 256
    young_seconds: float = 0.5
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_rate: int = 64 << 10
    idle_seconds: int = 65
    stall_seconds: float = 120.0
    ending_seconds: float = 10.0
    ending_pause: float = 2.0
    ending_bytes: int = 256 << 20
    ahead_bytes: int = 1 << 20
    unsent_bytes: int = 64 << 10
    tick_seconds: float = 0.5
    grace_seconds: int = 10


@dataclass
class Clock:
    """When things happened on a connection, by the loop's clock."""

    phase: Phase = "head"
    begun: float = 0.0  # the phase
    moved: float = 0.0  # the last bytes came
    taken: float = 0.0  # the reader last took something
    unsent: int = 0  # bytes, at the last look
    length: int = 0  # bytes of the body
    crowded: bool = False  # without a place


def overdue(clock: Clock, now: float, *, some: bool, limits: Limits) -> str | None:
    """What took too long: "head", "body", "ending" or "reader". some: whether a head has begun or must."""
    if clock.unsent and now - clock.taken > limits.stall_seconds:
        return "reader"
    spent = now - clock.begun
    allowed = limits.ending_pause if clock.crowded else limits.head_seconds
    if clock.phase == "head" and some and spent > allowed:
        return "head"
    if clock.phase == "body" and spent > limits.body_seconds + clock.length / limits.body_rate:
        return "body"
    if clock.phase == "ending" and (
        spent > limits.ending_seconds or now - clock.moved > limits.ending_pause
    ):
        return "ending"
    return None


class Crowd:
    """The connections of one server. placed: those that count as open. Without a request in hand are, longest first,
    `_waiting` with a place, and `_outside` without one: their heads are not whole, or they were refused."""

    def __init__(self) -> None:
        self.placed: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        self._outside: dict[Connection, None] = {}

    def put(self, connection: Connection) -> None:
        """A phase of it began, or began again, or it lost its place and is last in line without one."""
        self.remove(connection)
        clock = connection._clock
        if clock.phase == "closed":
            return
        placed = not clock.crowded and clock.phase != "ending"
        if placed:
            self.placed.add(connection)
        if clock.phase in ("head", "ending"):
            (self._waiting if placed else self._outside)[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        self.placed.discard(connection)
        self._waiting.pop(connection, None)
        self._outside.pop(connection, None)

    def longest(self, *, placed: bool) -> Connection | None:
        """Which has been without a request in hand for longest, of those with a place or without."""
        found = self._waiting if placed else self._outside
        return next((connection for connection in found if connection.is_idle), None)


def protocol_class(app: App, limits: Limits) -> type[asyncio.Protocol]:
    """The class of the connections to `app`, for uvicorn's `http` setting."""

    class Bound(Connection):
        served = app
        bounds = limits
        _crowd = Crowd()

    return Bound


class Connection(H11Protocol):
    """One connection."""

    served: App
    bounds: Limits
    _crowd: Crowd

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._input = bytearray()
        self._seen = 0  # bytes of the input without an end of a head
        self._empty = 0  # lines in front of the head that were dropped
        self._body_left = 0
        self._answered = False  # before the body was there
        self._discarded = 0
        self._path = ""
        self._origin: str | None = None
        self._handed = Handed()
        self._clock = Clock("head", now, now, now)
        self._timer = self.loop.call_later(self.bounds.tick_seconds, self._tick)
        transport.set_write_buffer_limits(high=self.bounds.unsent_bytes)
        self._thin_out()
        self._clock.crowded = not self._make_room()
        self._crowd.put(self)

    def _thin_out(self) -> None:
        """Where far too many connections are open, end the one that has been longest without a request in hand. It may
        be one that was refused; then it has had its answer."""
        if len(self.connections) <= 2 * self.bounds.connections:
            return
        found = [c for c in (self._crowd.longest(placed=p) for p in (True, False)) if c]
        if found:
            min(found, key=lambda c: c._clock.begun)._leave()
        else:
            self.transport.abort()

    def _make_room(self, *, whole: bool = False) -> bool:
        """Whether there is a place for this one: a free one, or that of the connection that has waited longest for a
        head, which ends. A young one has sent its request maybe, and nobody has read it yet: it does not end, but loses
        its place to a whole request."""
        if len(self._crowd.placed) < self.bounds.connections:
            return True
        longest = self._crowd.longest(placed=True)
        if longest is None:
            return False
        if self.loop.time() - longest._clock.begun > self.bounds.young_seconds:
            longest._leave()
        elif whole:
            longest._clock.crowded = True
            self._crowd.put(longest)
        else:
            return False
        return True

    def _leave(self) -> None:
        """End it to make room."""
        ending = self._clock.phase == "ending"
        self._enter("closed")
        self.connections.discard(self)
        if ending:
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether it may end to make room, which costs nobody an answer."""
        if self.transport.is_closing():
            return False
        return self._clock.phase == "ending" or not self.transport.get_write_buffer_size()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._enter("closed")
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._clock.moved = self.loop.time()
        if self._clock.phase == "ending":
            self._discarded += len(data)
            if self._discarded > self.bounds.ending_bytes:
                self.transport.abort()
            return
        if self._clock.phase == "head" and not self._input:
            self._clock.begun = self._clock.moved
            self._crowd.put(self)
        self._input += data
        self._advance()

    def _advance(self) -> None:
        """Hand on what the input has of the request in hand."""
        while not self.transport.is_closing():
            match self._clock.phase:
                case "head":
                    if not self._read_head():
                        return
                case "body":
                    if not self._read_body():
                        return
                case "answer":
                    if len(self._input) > self.bounds.ahead_bytes:
                        self.transport.abort()
                    return
                case _:
                    return

    def _read_head(self) -> bool:
        while self._empty < MAX_EMPTY and self._input[:2] == b"\r\n":  # some end a body with them
            del self._input[:2]
            self._empty, self._seen = self._empty + 1, 0
        if not self._input:  # and is as idle as before
            return False
        self._unset_keepalive_if_required()
        end = end_of_head(self._input, self._seen)
        self._seen = len(self._input)
        if (end if end >= 0 else self._seen) > MAX_HEAD:
            self._refuse(head_too_large())
            return False
        if not begins_well(self._input):
            self._refuse(RequestError("this is no HTTP/1 request"))
            return False
        if end < 0:
            return False
        try:
            head = read_head(bytes(self._input[:end]))
            if self._clock.crowded and not self._make_room(whole=True):
                raise RequestError(
                    "too many connections are open", status=503, code="too_many_connections"
                )
        except RequestError as error:
            self._refuse(error)
            return False
        del self._input[:end]
        self._clock.crowded = False
        self._path, self._origin = head.path, head.field(b"origin")
        self._seen, self._body_left = 0, head.length
        self._empty, self._answered = 0, False
        self._handed = Handed()
        self.app_state = self._handed.state  # uvicorn puts it into the scope
        self._enter("body")
        self._clock.length = head.length
        super().data_received(head.wire)
        if not head.length:
            self._request_read()
        return True

    def _read_body(self) -> bool:
        part = bytes(self._input[: self._body_left])
        if not part:
            return False
        del self._input[: len(part)]
        self._body_left -= len(part)
        super().data_received(part)
        if not self._body_left:
            self._request_read()
        return not self._body_left

    def _request_read(self) -> None:
        if self._clock.phase == "body":  # else h11 refused it
            self._enter("head" if self._answered else "answer")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered = True
        if self._clock.phase == "answer":
            self._enter("head")
            self._advance()

    def _enter(self, phase: Phase) -> None:
        if self._clock.phase == "closed":
            return
        self._clock.phase = phase
        self._clock.begun = self._clock.moved = self.loop.time()
        self._crowd.put(self)

    @property
    def _is_running(self) -> bool:
        """Whether the application has a request in hand."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: RequestError) -> None:
        """Answer in the server's place, and end the connection so that the answer arrives."""
        self._unset_keepalive_if_required()
        what, bare = failure(error), False
        if self._clock.phase == "head":  # the one in hand was not understood
            self._path, self._origin = path_of(self._input), origin_of(self._input)
            self._handed, bare = Handed(), self._input[:5] == b"HEAD "
        if self._is_running:
            bare = self.scope["method"] == "HEAD"
            self._handed.refused = what
            self.cycle.disconnected = True  # the application learns that nobody is there
            self.cycle.message_event.set()
        else:
            seconds = self.loop.time() - self._clock.begun
            self.served.observer.refused(self._handed.id, what, seconds)
        body = json.dumps(self.served.table.error(self._path)(what), ensure_ascii=False).encode()
        fields = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *hints(what.status),
            *named(self._handed.id),
            *guard.cors(self._origin, self.served.policy),
        ]
        phrase = HTTPStatus(what.status).phrase
        lines = [
            f"HTTP/1.1 {what.status} {phrase}",
            *(f"{name}: {value}" for name, value in fields),
        ]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        self.transport.write(head if bare else head + body)
        self._input.clear()
        self._enter("ending")
        try:
            self.transport.write_eof()
        except OSError:  # the client was faster to leave
            self.transport.abort()
        self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What h11 refuses; nothing that the gate let through is known to be."""
        self._refuse(RequestError("the request is malformed"))

    def _tick(self) -> None:
        now, clock = self.loop.time(), self._clock
        unsent = self.transport.get_write_buffer_size()
        if not unsent or not clock.unsent or unsent < clock.unsent:
            clock.taken = now
        clock.unsent = unsent
        some = bool(self._input) or self.cycle is None
        late = overdue(clock, now, some=some, limits=self.bounds)
        if late in ("reader", "ending"):
            self.transport.abort()
        elif late is not None and not self.transport.is_closing():
            self._cut(late)
        self._timer = self.loop.call_later(self.bounds.tick_seconds, self._tick)

    def _cut(self, late: str) -> None:
        """End a connection whose client is too slow."""
        if (late == "head" and not self._input) or (late == "body" and self._answered):
            self.transport.close()
        elif self._is_running and self.cycle.response_started:
            self.transport.abort()
        else:
            self._refuse(
                RequestError(
                    f"the {late} of the request came too slowly",
                    status=408,
                    code="request_timeout",
                )
            )

    def _should_upgrade(self) -> bool:
        return False

    def shutdown(self) -> None:
        """The server ends: idle and refused connections close, others when they are answered."""
        if self._clock.phase in ("ending", "closed"):
            self.transport.close()
        else:
            super().shutdown()
