"""Many connections, right, wrong and torn: every one has an answer or an end, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.serve.app import create_app
from headrace.serve.events import Finished, Started, TextDelta, Usage
from headrace.serve.http.body import Room
from serve.http.plain import plain
from serve.http.wired import QUICK, Raw, asked, request, wait, wired
from serve.scripted import ScriptedBackend

SCRIPT = [
    Started(3, 0),
    TextDelta("Hello"),
    0.01,
    TextDelta("you"),
    Finished("stop", Usage(3, 0, 1)),
]
ASK = b'{"text": "Hi"}'
STREAM = b'{"text": "Hi", "stream": true}'
GOOD = [
    request("POST", "/plain/ask", ASK, "Content-Type: application/json"),
    request("POST", "/plain/ask", STREAM, "Origin: http://localhost:3000"),
    request("GET", "/plain/model?x=y", b"", "Connection: close"),
    request("POST", "/plain/count", ASK, "Expect: 100-continue") + request("GET", "/health"),
]
PIECES = [b"\r\n", b"\n", b"\x00", b" ", b":", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
          b"\xff", b"9" * 30, b"[" * 300, b'"', b"%00", b"HTTP/1.1", b"\r\n\r\n"]  # fmt: skip


def mutated(dice: random.Random) -> bytes:
    """A right request with something wrong, or with nothing wrong."""
    data = dice.choice(GOOD)
    for _ in range(dice.randrange(3)):
        at = dice.randrange(len(data))
        kind = dice.randrange(3)
        if kind == 0:
            data = data[:at] + dice.choice(PIECES) + data[at:]
        elif kind == 1:
            data = data[:at] + data[at + dice.randrange(1, 9) :]
        else:
            data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
    return data


def played(port: int, seed: int) -> int | None:
    """The first status, or None where the client left early or the server ended the connection."""
    dice = random.Random(seed)
    data = mutated(dice)
    with (
        Raw(port) as raw,
        suppress(ConnectionError),
    ):  # what follows the last request may meet a closed door
        if dice.random() < 0.3:
            raw.send(data[: dice.randrange(1, len(data))])
            return None
        raw.send(data, step=dice.choice([0, 0, 0, 1, 7]))
        if dice.random() < 0.2:
            raw.socket.shutdown(socket.SHUT_WR)
        first = raw.line()
        return int(first.split()[1]) if first else None
    return None


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="open files are counted in /dev/fd")
def test_nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    room, limits = Room(), replace(QUICK, head_seconds=0.5, body_seconds=0.5)
    free = room.free
    backend = ScriptedBackend(SCRIPT)
    with (
        wired(create_app(backend, [plain()], room=room), limits) as port,
        ThreadPoolExecutor(8) as pool,
    ):
        assert asked(port, GOOD[0]).status == 200
        statuses = list(pool.map(lambda seed: played(port, seed), range(64)))
        threads, files = threading.active_count(), len(os.listdir("/dev/fd"))
        statuses += pool.map(lambda seed: played(port, seed), range(64, 600))
        known = {None, 100, 200, 204, 400, 403, 404, 405, 408, 411, 413, 415, 417, 431, 501, 505}
        assert set(statuses) <= known
        assert {100, 200, 400, None} <= set(statuses)
        wait(lambda: all(run.cancelled or not run.script for run in backend.runs))
        wait(lambda: len(os.listdir("/dev/fd")) <= files)
        wait(lambda: room.free == free)
        assert threading.active_count() <= threads
        assert asked(port, GOOD[0]).status == 200
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []
