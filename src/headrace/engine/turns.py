"""Lets many threads use one scheduler without a thread of its own.

Whoever needs a token and finds none steps the scheduler for all; the others wait, and find theirs when the step has
ended. So a generation that nobody asks for a token costs nothing, and one that is alone costs what it costs alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.engine.scheduler import Errand, Scheduler, Ticket
from headrace.values import Token


@dataclass(eq=False)
class _Waiting:
    """A thread that wants to lead, unless it is `done` first."""

    done: Callable[[], bool]


class Turns:
    """Who steps, and who waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changed = threading.Condition(threading.Lock())
        self._leader: _Waiting | None = None
        self._line: list[_Waiting] = []
        self._closed = False
        self.cancels = 0  # calls of `cancel`
        scheduler.woken = self._wake

    @property
    def closed(self) -> bool:
        """Whether nothing begins any more."""
        return self._closed

    def uses(self, salt: bytes) -> bool:
        """Whether a generation that runs or waits is of this salt."""
        return self._scheduler.uses(salt)

    def submit(self, what: Ticket | Errand) -> None:
        self._scheduler.submit(what)
        if self._closed:  # since the caller looked
            what.cancelled = True

    def cancel(self) -> None:
        """End everything that is here now. Waits for nothing, so a signal handler may call it."""
        self.cancels += 1
        self._scheduler.cancel()

    def next(self, ticket: Ticket) -> Token | None:
        """The next token; None after the last, or where the ticket was cancelled. Raises the generation's error."""
        while (token := ticket.pop()) is None and not ticket.over:
            if ticket.cancelled:
                self.close(ticket)
            else:
                self.step(lambda: ticket.over or bool(ticket.tokens))
        if token is None:
            ticket.close()
            if ticket.error is not None:
                raise ticket.error
        return token

    def close(self, ticket: Ticket) -> None:
        """Nothing more is taken; returns when it has ended."""
        ticket.cancelled = True
        while not ticket.ended:
            with self._lead(lambda: ticket.ended) as leads:
                if leads:
                    self._scheduler.reap()
        ticket.close()

    def drop(self, ticket: Ticket) -> None:
        """As `close`, but waits for nothing: for whoever may have been interrupted anywhere."""
        ticket.cancelled = True
        me = _Waiting(lambda: False)
        if not self._changed.acquire(blocking=False):
            return
        try:
            self._leader = self._leader or me
        finally:
            self._changed.release()
        if self._leader is me:
            try:
                self._scheduler.reap()
            finally:
                with self._changed:
                    self._leader = None
                    self._pass_on()
                    self._changed.notify_all()

    def run(self, act: Callable[[], Any], pages: int) -> Any:
        """What `act` returns, done between passes once as many pages can be had; in order of arrival."""
        errand = Errand(act, pages)
        self.submit(errand)
        try:
            while not errand.ended:
                self.step(lambda: errand.ended)
        finally:
            errand.cancelled = not errand.ended
        if errand.error is not None:
            raise errand.error
        return errand.result

    @contextmanager
    def between(self) -> Iterator[None]:
        """Nothing runs inside the block."""
        with self._lead(lambda: False):
            yield

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Everything has ended inside the block, and nothing begins any more."""
        with self.between():
            self._closed = True
            self._scheduler.close()
            self._scheduler.woken = lambda: None  # they held each other
            yield

    def step(self, done: Callable[[], bool]) -> None:
        """One pass at most, for all; or wait for who makes them, until `done`."""
        with self._lead(done) as leads:
            if leads:
                self._scheduler.step()

    @contextmanager
    def _lead(self, done: Callable[[], bool]) -> Iterator[bool]:
        """Alone with the scheduler inside the block, or not at all once `done`. In the order of who asked."""
        me = _Waiting(done)
        try:
            with self._changed:
                self._line.append(me)
                self._pass_on()
                while self._leader is not me and not done():
                    self._changed.wait()
            yield self._leader is me
        finally:
            with self._changed:
                if me in self._line:
                    self._line.remove(me)
                if self._leader is me:
                    self._leader = None
                    self._pass_on()
                    self._changed.notify_all()

    def _pass_on(self) -> None:
        """Who waits longest leads, where nobody does; not those who have what they came for."""
        if self._leader is None:
            self._leader = next((w for w in self._line if not w.done()), None)
            if self._leader is not None:
                self._line.remove(self._leader)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
