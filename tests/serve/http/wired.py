"""A client that says exactly the bytes it is told, and a server that is less patient than in earnest."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace.serve.http.answer import App
from headrace.serve.http.protocol import Limits
from serve.served import served

QUICK = replace(Limits(), tick_seconds=0.02, ending_pause=0.5, ending_seconds=5.0)


@contextmanager
def wired(app: App, limits: Limits = QUICK) -> Iterator[int]:
    """The port of `app`, which is served inside the block."""
    with served(app, limits) as url:
        yield int(url.rpartition(":")[2])


def wait(what: Callable[[], Any]) -> None:
    """Until something is so; a test that waits for what never comes fails."""
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


@dataclass(frozen=True)
class Got:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Raw:
    """A connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._file = self.socket.makefile("rb")
        self.port = port

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes, *, step: int = 0) -> None:
        """step: bytes at a time, each its own packet as far as the kernel allows."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(0, len(data), step or len(data)):
            self.socket.sendall(data[i : i + (step or len(data))])

    def line(self) -> bytes:
        return self._file.readline()

    def head(self) -> Got:
        """Status and headers of the next answer."""
        first = self.line()
        assert first, "the connection ended without an answer"
        headers = {}
        while (line := self.line()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            assert name.lower() not in headers, f"{name} is there twice"
            headers[name.lower()] = value.strip()
        return Got(int(first.split()[1]), headers, b"")

    def answer(self, *, head: bool = False) -> Got:
        """The next answer. head: to a HEAD request."""
        got = self.head()
        length = int(got.headers.get("content-length", 0))
        return replace(got, body=b"" if head else self._file.read(length))

    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._file.read(1) == b""


def request(
    method: str = "POST",
    path: str = "/plain/ask",
    body: bytes = b"",
    *fields: str,
    host: str = "localhost",
) -> bytes:
    """Bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *fields]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def asked(port: int, data: bytes, *, step: int = 0) -> Got:
    """The answer to some bytes on a connection of their own."""
    with Raw(port) as raw:
        raw.send(data, step=step)
        return raw.answer(head=data[:5] == b"HEAD ")
