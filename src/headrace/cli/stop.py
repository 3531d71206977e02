"""`headrace stop`: ends the server of this user that listens on a port. Signals nothing else."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter

from headrace import config
from headrace.cli.whole import WHOLE
from headrace.errors import HeadraceError, InputError
from headrace.serve.http.server import HOST, PORT
from headrace.serve.process import asking, lock
from headrace.serve.process.lock import Holder

SECONDS = 60.0  # that a server may take to end
_PAUSE = 0.05


class NotStoppedError(HeadraceError):
    """A server was asked to end, and is still there."""

    code = "not_stopped"


def stop(
    *,
    port: Annotated[int, WHOLE, Parameter(help="The port that the server listens on.")] = PORT,
) -> int:
    """Stop the server on a port, also one that is still loading its model.

    Requests that run end with an error, and what is to be kept of conversations is written. Without a server it says
    so, and the exit code is 0. A second stop ends a server at once.
    """
    home = config.load().home
    found = lock.holder(home)
    if found is None or found.port != port:
        return _nothing(port, found)
    if not _end(found):
        raise NotStoppedError(
            f"{found} has not ended after {SECONDS:g} s",
            hint="headrace stop, once more, ends it at once",
        )
    print(f"stopped {found}")
    return 0


def _nothing(port: int, found: Holder | None) -> int:
    """No server of this home has the port. Raises InputError for another's, which is left alone."""
    told = asking.status(HOST, port)
    if told is not None:
        raise InputError(
            f"the headrace server on port {port} (pid {told.get('pid')!s:.20}) is not of this home folder",
            hint="stop it as the user, on the machine and with the HEADRACE_HOME that started it",
        )
    print(f"no headrace server listens on port {port}")
    if found is not None:
        print(f"hint: {found} does: headrace stop --port {found.port}", file=sys.stderr)
    return 0


def _end(found: Holder) -> bool:
    """Send SIGTERM to who holds the lock, and wait; whether the process has ended.

    The lock is looked at again once the process is pinned by a descriptor. Without those its lock has to do.
    """
    home = config.load().home
    with suppress(ProcessLookupError):
        if not hasattr(os, "pidfd_open"):
            os.kill(found.pid, signal.SIGTERM)
            return _freed(found)
        process = os.pidfd_open(found.pid)
        try:
            if lock.holder(home) != found:
                return True
            signal.pidfd_send_signal(process, signal.SIGTERM)
            return bool(select.select([process], [], [], SECONDS)[0])
        finally:
            os.close(process)
    return True


def _freed(found: Holder) -> bool:
    home, end = config.load().home, time.monotonic() + SECONDS
    while lock.holder(home) == found:
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True
