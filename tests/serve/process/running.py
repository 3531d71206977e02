"""Starts real server processes, and talks to them."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shell import default_sigint

PROGRAM = Path(__file__).with_name("scripted_server.py")
TESTS = PROGRAM.parents[2]
SECONDS = 30


class Server:
    """A process. lines: of its standard error, as they come."""

    def __init__(self, home: Path, **given: Any) -> None:
        self.given = given
        arguments = {"model": "painted:1m", "home": str(home), "port": 0, **given}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS), "HEADRACE_HOME": str(home)},
            preexec_fn=default_sigint,
        )
        self.lines: list[str] = []
        self.port = 0
        self._new: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._new.put(line.rstrip("\n"))

    def line(self, part: str) -> str:
        """The next line that holds this."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            try:
                self.lines.append(self._new.get(timeout=0.05))
            except queue.Empty:
                assert self.process.poll() is None or self._reader.is_alive(), self.lines
                continue
            if part in self.lines[-1]:
                return self.lines[-1]
        raise AssertionError(f"{part!r} never came: {self.lines}")

    def ready(self) -> Server:
        """Once it serves."""
        self.port = int(self.line("serving painted:1m on http://").rstrip('"}').rpartition(":")[2])
        return self

    def opening(self) -> Server:
        """Once it loads."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "opening\n"
        return self

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON, or text."""
        with self.asked(method, path, body) as answer:
            return answer.status, answer.read()

    @contextmanager
    def asked(self, method: str, path: str, body: Any = None) -> Iterator[Answer]:
        """An answer that may still come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, data, headers)
            yield Answer(connection)
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        code, told = self.ask("GET", "/headrace/status")
        assert code == 200
        return dict(told)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """The exit code, once it has ended; all lines are there then."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        while not self._new.empty():
            self.lines.append(self._new.get())
        return code


@dataclass
class Answer:
    connection: http.client.HTTPConnection
    _response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    @property
    def status(self) -> int:
        return self.response.status

    def line(self) -> Any:
        """The next line of a stream."""
        return json.loads(self.response.readline())

    def read(self) -> Any:
        """The rest."""
        data = self.response.read()
        plain = (self.response.getheader("content-type") or "").startswith("application/json")
        return json.loads(data) if plain else data.decode()


@contextmanager
def server(home: Path, **given: Any) -> Iterator[Server]:
    """A process that has ended behind the block."""
    running = Server(home, **given)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(SECONDS)
        for stream in (running.process.stdout, running.process.stderr):
            assert stream is not None
            stream.close()
