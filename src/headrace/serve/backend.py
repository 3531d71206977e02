"""What the HTTP side needs of whatever generates. `model` is the real one; tests have one that follows a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.serve.dialect import Card
from headrace.serve.events import Event
from headrace.serve.request import Request


@dataclass(frozen=True)
class Progress:
    """Where a generation is: tokens of the prompt that are behind it, and of the answer."""

    read_tokens: int = 0
    new_tokens: int = 0


class Running(Protocol):
    """A generation in hand. Used from the event loop."""

    @property
    def progress(self) -> Progress:
        """Where it is now, or was when it was cancelled."""

    async def next(self) -> Event | None:
        """The next event; None behind `Finished` or `Failed`, and once it was cancelled."""

    def cancel(self) -> None:
        """Nobody waits for more: stop within one layer. May be called twice."""


class Backend(Protocol):
    """Generates for many clients at once. Used from the event loop; nothing of it blocks."""

    @property
    def card(self) -> Card:
        """What is served."""

    def submit(self, request: Request, *, request_id: str, arrived: float) -> Running:
        """Begin, or wait in line. What is wrong with the request comes as `Failed`. arrived: `time.monotonic`."""

    async def count(self, request: Request) -> int:
        """Tokens that the model would read. Raises HeadraceError."""
