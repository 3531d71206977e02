"""Writes an answer to standard output as it comes, and lets Control-C end it in order."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any

from headrace.errors import CancelledError
from headrace.llm import LLM


def answer(llm: LLM, pieces: Generator[str, None, None], *, quiet: bool = False) -> int:
    """Write an answer as it comes; 130 when it was cancelled, else 0."""
    with closing(pieces), cancel_on_interrupt(llm.cancel):
        for piece in pieces:
            if not quiet:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if not quiet:
        print(flush=True)
    return CancelledError.exit_code if llm.last and llm.last.finish_reason == "cancelled" else 0


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """The first Control-C asks the generation to end; a second one does not wait for it.

    Where SIGINT is ignored, it stays so.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        cancel()

    before: Any = signal.getsignal(signal.SIGINT)
    if before in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
