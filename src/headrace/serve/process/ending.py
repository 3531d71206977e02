"""What SIGTERM and SIGINT do to a server: the first asks it to end in order, a second ends the process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from headrace.errors import CancelledError

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """Handles them inside a `with`, in the main thread. One that is ignored on entry, as by nohup, stays so.

    first: the one that came first. While nobody was told how to ask (`asking`), it interrupts what is done.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._ask: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in HANDLED:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def name(self) -> str:
        """Of the first."""
        return "" if self.first is None else signal.Signals(self.first).name

    @property
    def exit_code(self) -> int:
        """A server that somebody stopped has done its work, unless it was by Control-C."""
        return CancelledError.exit_code if self.first == signal.SIGINT else 0

    @contextmanager
    def asking(self, ask: Callable[[], None]) -> Iterator[None]:
        """Inside the block a signal calls `ask`; at once if there was one. After it nothing is interrupted either."""
        self._ask = ask
        if self.first is not None:
            ask()
        yield

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is not None:
            os._exit(128 + number)
        self.first = number
        if self._ask is None:
            raise KeyboardInterrupt
        self._ask()
