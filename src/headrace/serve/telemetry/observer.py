"""Who looks on while requests are answered: it may refuse one at its beginning, and hears what a generation tells.

The base classes see nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.serve.backend import Running
from headrace.serve.dialect import Context, Endpoint
from headrace.serve.events import Failure
from headrace.serve.request import Request


class Watch:
    """Looks on at one request. Used from the event loop."""

    def admit(self) -> None:
        """The request begins. Raises RequestError for one that may not."""

    def found(self, dialect: str, endpoint: Endpoint, context: Context) -> None:
        """What will answer it. dialect: its module's name, or "routes" for what is no dialect's."""

    def told(self, status: int) -> None:
        """The head of the answer is about to be sent."""

    def failed(self, what: Failure) -> None:
        """The answer is this error."""

    def refused(self, what: Failure) -> None:
        """This was answered in the application's place, whatever it was about to say."""

    def heard(self, running: Running, request: Request) -> Running:
        """The generation as it is to be used: what it tells is heard on the way."""
        return running


class Observer:
    """Looks on at all requests. endpoints: its own, to tell what it saw."""

    endpoints: Sequence[Endpoint] = ()

    @contextmanager
    def request(self, path: str, request_id: str) -> Iterator[Watch]:
        """A request, from its head to the end of its answer. request_id: 32 hex digits."""
        yield Watch()

    def refused(self, request_id: str, what: Failure, seconds: float) -> None:
        """A request was answered with this before it began. seconds: since its first byte."""
