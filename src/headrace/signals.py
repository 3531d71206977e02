"""What Control-C does before a command begins, and after. Imports nothing that takes time."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def exit_on_interrupt() -> None:
    """Until a command begins there is nothing to undo, and an exception inside an import can be lost.

    Where SIGINT is ignored on entry (a background job of nohup), it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """A command begins: from here on Control-C is KeyboardInterrupt, so that what is half done is removed."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_interrupt() -> None:
    """The work is done, and its exit code stands."""
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _exit):
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _exit(number: int, frame: object) -> None:
    try:
        os.write(2, b"\n")  # leaves the line with the ^C
    finally:
        os._exit(INTERRUPTED)
