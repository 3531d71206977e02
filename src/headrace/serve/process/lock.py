"""One model process a user: the lock that a server holds alone, and that commands with a model hold beside each other.

A server plans with all the memory there is, so nothing with a model runs beside it. Commands plan with what is free,
and may run beside each other. The system frees the lock when a process ends, however it ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import InputError

try:
    import fcntl
except ImportError:  # a system without file locks has no such lock either
    fcntl = None  # type: ignore[assignment]

LOCK = "model.lock"
PATIENCE = 1.0  # seconds of a server: `holder` looks by sharing the lock for a moment
_PAUSE = 0.02
_MAX_BYTES = 1 << 16


class ModelBusyError(InputError):
    """Another process of this user has a model, and may have it alone."""

    code = "model_busy"
    http_status = 409


@dataclass(frozen=True)
class Holder:
    """The server that holds the lock."""

    pid: int
    port: int
    model: str

    def __str__(self) -> str:
        return f"the headrace server of {self.model} (pid {self.pid}, port {self.port})"


@contextmanager
def alone(home: Path, who: Holder) -> Iterator[None]:
    """Hold the lock as a server. Raises ModelBusyError, which names who has it."""
    home.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(home / LOCK, flags, 0o600)
    try:
        if not _taken(handle, shared=False):
            raise _busy(holder(home))
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(asdict(who)).encode(), 0)
        yield
    finally:
        with suppress(OSError):
            if _mine(handle, who):
                os.ftruncate(handle, 0)
        os.close(handle)


@contextmanager
def beside(home: Path) -> Iterator[None]:
    """Hold the lock as a command. Raises ModelBusyError while a server runs. Without a home there is none to hold."""
    handle = _opened(home)
    try:
        if handle is not None and not _taken(handle, shared=True):
            raise _busy(holder(home))
        yield
    finally:
        if handle is not None:
            os.close(handle)


def holder(home: Path) -> Holder | None:
    """The server that holds the lock, if one does."""
    end = time.monotonic() + PATIENCE
    while (handle := _opened(home)) is not None:
        try:
            if _try(handle, shared=True):
                return None
            data = os.pread(handle, _MAX_BYTES, 0)
        finally:
            os.close(handle)
        if (found := _read(data)) is not None or time.monotonic() > end:
            return found
        time.sleep(_PAUSE)  # it is about to be written
    return None


def _opened(home: Path) -> int | None:
    """The lock file, made if the home is there; None where there is none and none can be made."""
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with suppress(OSError):
            return os.open(home / LOCK, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return None


def _taken(handle: int, *, shared: bool) -> bool:
    end = time.monotonic() + (0 if shared else PATIENCE)
    while not _try(handle, shared=shared):
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


def _try(handle: int, *, shared: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _mine(handle: int, who: Holder) -> bool:
    return _read(os.pread(handle, _MAX_BYTES, 0)) == who


def _read(data: bytes) -> Holder | None:
    try:
        found = Holder(**json.loads(data))
    except (ValueError, TypeError, RecursionError):
        return None
    plain = type(found.pid) is int and type(found.port) is int and type(found.model) is str
    return found if plain and found.pid > 0 else None


def _busy(found: Holder | None) -> ModelBusyError:
    if found is None:
        return ModelBusyError(
            "another headrace command of yours has a model loaded",
            hint="a server runs alone; end the command first",
        )
    return ModelBusyError(
        f"{found} is running; one process of yours may have a model",
        hint=f"headrace stop --port {found.port} ends it",
    )
