"""Looks on at every request of a server: admits it, counts and logs it, and knows when nobody needs the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from headrace.serve.backend import Progress, Running
from headrace.serve.dialect import Context, Endpoint, Memory, Page, Tell
from headrace.serve.events import Event, Failed, Failure
from headrace.serve.failure import RequestError
from headrace.serve.process import clients
from headrace.serve.process.clients import Client, Clients
from headrace.serve.process.idle import IdleClock
from headrace.serve.request import Json, Request
from headrace.serve.telemetry.account import GONE, Account, Fields
from headrace.serve.telemetry.metrics import MEDIA_TYPE, Metrics
from headrace.serve.telemetry.observer import Observer, Watch
from headrace.serve.telemetry.status import METRICS, QUIET, STATUS, Facts, status

STOPPING = Failure(503, "server_stopping", "the server is stopping")

BEAT_SECONDS = 10.0

log = logging.getLogger(__name__)


class Attendant(Observer):
    """Used from the event loop. counts: generations that run, and that wait; cache_bytes: see `Metrics`."""

    def __init__(
        self,
        facts: Facts,
        *,
        counts: Callable[[], tuple[int, int]],
        cache_bytes: Mapping[str, Callable[[], int]],
        memory: Callable[[], Memory] = Memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._memory = memory
        self._clock = clock
        minutes = facts.idle_exit_minutes
        self._idle = IdleClock(clock(), None if minutes is None else minutes * 60)
        self._clients = Clients()
        self._metrics = Metrics(
            counts=counts, cache_bytes=cache_bytes, active=lambda: self._idle.active
        )
        self._running = set[Heard]()
        self.stopping = False
        self.endpoints = (
            Tell("GET", STATUS, lambda _body, _context: self.status()),
            Tell("POST", clients.PATH, self._register, body=Client),
            Page(METRICS, MEDIA_TYPE, lambda _body, _context: self._metrics.text()),
        )

    def status(self) -> Json:
        """The body of the status, now."""
        self._look()
        return status(
            self._facts,
            self._memory(),
            active=self._idle.active,
            clients=self._clients.count(),
            idle_seconds=self._idle.idle_seconds(self._clock()),
            stopping=self.stopping,
        )

    def due(self) -> bool:
        """Whether the server has been idle for as long as it may be."""
        self._look()
        return self._idle.due(self._clock())

    def beat(self) -> None:
        """Tell of every generation that has gone on for a while, again and again."""
        now = self._clock()
        for heard in self._running:
            if told := heard.standing(now):
                log.info("running", extra={"fields": told})

    def stop(self) -> None:
        """From now on nothing begins, and what runs fails."""
        self.stopping = True
        for heard in list(self._running):
            heard.stop()

    @contextmanager
    def request(self, path: str, request_id: str) -> Iterator[Watch]:
        """See `Observer`."""
        quiet = path.rstrip("/") in QUIET
        watch = Attended(self, path, Account(self._clock(), request_id), self._clock)
        if not quiet:
            self._idle.begin()
        try:
            yield watch
        finally:
            now = self._clock()
            if not quiet:
                self._idle.end(now)
            if watch.generation is not None:
                self._running.discard(watch.generation)
                watch.account.progress = watch.generation.progress
            watch.account.end(now)
            self._metrics.count(watch.account)
            if not quiet or (watch.account.status or 0) >= 400:
                log.info("request", extra={"fields": watch.account.fields()})

    def refused(self, request_id: str, what: Failure, seconds: float) -> None:
        """See `Observer`. It is no use of the server."""
        now = self._clock()
        account = Account(now - seconds, request_id, status=what.status, error=what.code)
        account.end(now)
        self._metrics.count(account)
        log.info("request", extra={"fields": account.fields()})

    def _register(self, body: Client, _context: Context) -> Json:
        return {"clients": self._clients.register(body.pid)}

    def hold(self, heard: Heard) -> None:
        """A generation that `stop` ends, until its request does."""
        self._running.add(heard)
        if self.stopping:
            heard.stop()

    def _look(self) -> None:
        self._idle.clients(self._clients.count(), self._clock())


class Attended(Watch):
    """Looks on at one request."""

    def __init__(
        self, attendant: Attendant, path: str, account: Account, clock: Callable[[], float]
    ) -> None:
        self._attendant = attendant
        self._path = path
        self._clock = clock
        self.account = account
        self.generation: Heard | None = None

    def admit(self) -> None:
        """See `Watch`."""
        if self._attendant.stopping and self._path.rstrip("/") != STATUS:
            raise RequestError(STOPPING.message, status=STOPPING.status, code=STOPPING.code)

    def found(self, dialect: str, endpoint: Endpoint, context: Context) -> None:
        """See `Watch`."""
        self.account.endpoint = endpoint.path
        if dialect != "routes":
            self.account.dialect = dialect

    def told(self, status: int) -> None:
        """See `Watch`."""
        if self.account.error != GONE:  # else nobody hears it
            self.account.status = status

    def failed(self, what: Failure) -> None:
        """See `Watch`."""
        self.account.error = self.account.error or what.code

    def refused(self, what: Failure) -> None:
        """See `Watch`."""
        self.account.status, self.account.error = what.status, what.code

    def heard(self, running: Running, request: Request) -> Running:
        """See `Watch`."""
        self.account.model, self.account.submitted = request.model, self._clock()
        self.generation = Heard(running, self.account, self._clock)
        self._attendant.hold(self.generation)
        return self.generation


class Heard:
    """A generation whose events go into an account on their way. Once it was stopped, it ends as a failure."""

    def __init__(self, running: Running, account: Account, clock: Callable[[], float]) -> None:
        self._running = running
        self._account = account
        self._clock = clock
        self._stopped = False
        self._left = False
        # When its standing was told last, and how much was read by then.
        self._told = (account.began, 0)

    @property
    def progress(self) -> Progress:
        """See `Running`."""
        return self._running.progress

    def standing(self, now: float) -> Fields:
        """Where it is, once in BEAT_SECONDS; `left`: seconds of its prefill at the rate of late."""
        then, before = self._told
        if now - then < BEAT_SECONDS:
            return {}
        account = self._account
        account.progress = progress = self.progress
        out = account.standing(now)
        new = progress.read_tokens - max(before, account.cached_tokens)
        if out["phase"] == "prefill" and new > 0:
            unread = account.prompt_tokens - progress.read_tokens
            out["left"] = round(unread * (now - max(then, account.started or then)) / new, 1)
        self._told = (now, progress.read_tokens)
        return out

    async def next(self) -> Event | None:
        """See `Running`."""
        try:
            event = await self._running.next()
        except Exception:
            self._account.error = "inference_error"
            raise
        if event is None and self._stopped:
            event = Failed(STOPPING)
        if event is None:
            self._account.error = GONE if self._left else "cancelled"
        else:
            self._account.heard(event, self._clock())
        return event

    def cancel(self) -> None:
        """See `Running`."""
        self._left = True
        self._running.cancel()

    def stop(self) -> None:
        """The server stops."""
        self._stopped = True
        self._running.cancel()
