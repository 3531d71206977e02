"""A real `headrace serve`, and what the system and the process itself say about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("watched.py")
SECONDS = 60


def wait(what: Callable[[], Any], about: str, seconds: float = SECONDS) -> Any:
    """What `what` returns, once it is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"it never came: {about}"
        time.sleep(0.05)
    return found


@dataclass
class Process:
    """folder: of its log and its reports."""

    popen: subprocess.Popen[bytes]
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Of its log so far."""
        text = (self.folder / "log").read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def ready(self) -> int:
        """The port, once it serves."""

        def served() -> str | None:
            assert self.popen.poll() is None, (self.folder / "log").read_text()
            said = [line["message"] for line in self.lines]
            return next((text for text in said if text.startswith("serving ")), None)

        return int(wait(served, "the server").rpartition(":")[2])

    def told(self) -> dict[str, Any]:
        """See `watched`."""
        report = self.folder / "report"
        report.unlink(missing_ok=True)
        self.popen.send_signal(signal.SIGUSR1)
        wait(report.exists, "a report")
        return dict(json.loads(report.read_text()))

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    @property
    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/task"))

    @property
    def resident(self) -> float:
        """MiB of memory."""
        text = Path(f"/proc/{self.popen.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) / 1024

    def stopped(self) -> int:
        """The exit code after SIGTERM."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(SECONDS)


@contextmanager
def serving(folder: Path, model: Path, *flags: str) -> Iterator[Process]:
    """A process that has ended behind the block."""
    command = [sys.executable, str(PROGRAM), str(folder / "report"), "serve", str(model)]
    environment = {**os.environ, "HEADRACE_HOME": str(folder / "home")}
    with (folder / "log").open("wb") as log:
        popen = subprocess.Popen(
            [*command, "--port", "0", "--log-json", *flags],
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=environment,
        )
    try:
        yield Process(popen, folder)
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(SECONDS)
