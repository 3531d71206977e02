"""One connection of a client, as bytes; no HTTP library between."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

SECONDS = 240  # that any answer may take


def request(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> bytes:
    """The bytes of a request; `body` as it is, or as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    fields |= headers or {}
    head = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*head, "", ""]).encode() + data


@dataclass(frozen=True)
class Head:
    status: int
    fields: dict[str, str]

    @property
    def closes(self) -> bool:
        return self.fields.get("connection", "").lower() == "close"


class Line:
    """A connection. It may be used for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.open = True
        self._used = time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since an answer came."""
        return time.monotonic() - self._used

    @classmethod
    async def to(cls, port: int, *, narrow: bool = False) -> Self:
        """narrow: whoever writes to it soon has to wait."""
        sock = socket.socket()
        if narrow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = 2048 if narrow else 1 << 20
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> Head:
        """Raises ConnectionError where the connection ends before it."""
        async with asyncio.timeout(SECONDS):
            first = await self._reader.readline()
            if not first:
                raise ConnectionResetError("no answer")
            fields = {}
            while (line := (await self._reader.readline()).decode().strip()) != "":
                name, _, value = line.partition(":")
                fields[name.lower()] = value.strip()
        return Head(int(first.split()[1]), fields)

    async def parts(self, head: Head) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        async with asyncio.timeout(SECONDS):
            if head.fields.get("transfer-encoding") != "chunked":
                yield await self._reader.readexactly(int(head.fields.get("content-length", 0)))
                return
            while size := int(await self._reader.readline(), 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            await self._reader.readexactly(2)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body."""
        head = await self.head()
        data = b"".join([part async for part in self.parts(head)])
        self._used = time.monotonic()
        if head.closes:
            await self.leave()
        return head.status, data

    async def leave(self, *, abruptly: bool = False) -> None:
        """Close it. abruptly: with a reset."""
        self.open = False
        if abruptly:
            self._writer.transport.abort()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
