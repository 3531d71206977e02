"""Processes that use the server between their requests: it does not stop by itself while one of them runs."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from headrace.serve.failure import RequestError
from headrace.serve.validation import Wire

PATH = "/headrace/clients"
MAX_CLIENTS = 256
MAX_PID = (1 << 31) - 1
_START = 19  # field of /proc/PID/stat behind the name and its bracket: when the process began


class Client(Wire):
    """A process that uses the server."""

    pid: int = Field(ge=1, le=MAX_PID, description="A running process of the server's user.")


class Clients:
    """Registered processes of this user. One that ended is forgotten, also where its number was given to another."""

    def __init__(self) -> None:
        self._births: dict[int, str] = {}

    def register(self, pid: int) -> int:
        """Register a running process; how many there are. Raises RequestError."""
        born = birth(pid)
        if born is None:
            raise RequestError(
                f"{pid} is no running process of the user that the server runs as", place="pid"
            )
        if self.count() >= MAX_CLIENTS and pid not in self._births:
            raise RequestError(f"more than {MAX_CLIENTS} processes are registered", place="pid")
        self._births[pid] = born
        return self.count()

    def count(self) -> int:
        """How many still run."""
        for pid, born in list(self._births.items()):
            if birth(pid) != born:
                self._births.pop(pid, None)
        return len(self._births)


def birth(pid: int) -> str | None:
    """What tells a running process of this user from a later one with its number; None if there is none."""
    if not 0 < pid <= MAX_PID:
        return None
    folder = Path("/proc", str(pid))
    if not Path("/proc/self/stat").exists():
        return "" if _answers(pid) else None
    try:
        stat = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        status = (folder / "status").read_text("utf-8", "replace")
    except OSError:
        return None
    user = next((line.split()[1] for line in status.splitlines() if line[:4] == "Uid:"), "")
    if len(stat) <= _START:
        return None
    return None if stat[0] in "ZXx" or user != str(os.getuid()) else stat[_START]


def _answers(pid: int) -> bool:
    """Where there is no /proc: whether this user may signal it."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
