"""A server in a process of its own, that a worker starts and asks about."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTS = 120.0  # seconds that a server may take


class ServerProcess:
    """Ready once `path` lists its model. It ends with the worker."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        path: str,
        versions: dict[str, str],
        settings: dict[str, Any],
    ) -> None:
        self._process = process
        self._url = f"http://127.0.0.1:{port}"
        self._versions = versions
        model = self._wait(path)
        self._settings = {**settings, "url": self._url, "model": model}

    def facts(self) -> dict[str, Any]:
        return {"versions": self._versions, "settings": self._settings}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"processor": self._processor, "close": self._close}

    def _processor(self) -> dict[str, Any]:
        """Seconds of processor time that the server has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return {"seconds": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")}

    def _close(self) -> dict[str, Any]:
        self._process.terminate()
        return {"code": self._process.wait()}

    def _wait(self, path: str) -> str:
        end = time.monotonic() + STARTS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise SystemExit(f"the server ended with {self._process.returncode}")
            try:
                with urllib.request.urlopen(self._url + path, timeout=5) as answer:
                    listed: list[dict[str, Any]] = json.load(answer)["data"]
                    return str(listed[0]["id"])
            except (OSError, urllib.error.URLError):
                time.sleep(0.05)
        self._process.kill()
        raise SystemExit("the server did not start")


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
