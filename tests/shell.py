"""Runs the real command line as a process, with its own home folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def default_sigint() -> None:
    """In a child: Control-C as on a terminal, also where the tests run in the background and ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Shell:
    """A place to run headrace in."""

    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "HEADRACE_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}

    def command(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "headrace", *map(str, arguments)]

    def run(
        self, *arguments: str | Path, stdin: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            check=False,
            timeout=120,
            env={**self.environment, **environment},
        )

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        options = {"preexec_fn": default_sigint, **options}
        return subprocess.Popen(self.command(*arguments), env=self.environment, **options)
