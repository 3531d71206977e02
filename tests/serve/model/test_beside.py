"""Several requests at once: each gets what it gets alone, whoever else comes, leaves, or does not read."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headrace.artifact.container import Artifact
from headrace.llm import LLM
from headrace.serve.model.worker import MOST_EVENTS
from serve.model.asking import ASKS, Asked, Json, Server, Told, serving, user

LONG = 100_000  # more tokens than any window here
SCHEMA: Json = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 999}},
    "required": ["n"],
    "additionalProperties": False,
}
MIXED: list[tuple[str, Asked]] = [
    ("chat", Asked(user("What is rain?"), 40)),
    ("responses", Asked(user("What is snow?"), 30)),
    ("messages", Asked(user("What is hail?"), 35)),
    ("ollama", Asked(user("What is wind?"), 40, 0.8, 5)),
    ("gateway", Asked(user("What is fog?"), 25, 1.0, 11)),
    ("chat", Asked(user("Give a number."), 60, 0.9, 3, schema=SCHEMA)),
    ("messages", Asked(user("Give another number."), 60, schema=SCHEMA)),
    ("ollama", Asked(user("And one more."), 60, 1.0, 2**40, schema=SCHEMA)),
]


def said(told: Told) -> tuple[object, ...]:
    return told.text, told.reason, told.prompt, told.new, told.calls


def test_eight_at_once_answer_what_each_answers_alone(real_server: Server) -> None:
    alone = [said(ASKS[d](real_server, asked, stream=False)) for d, asked in MIXED]
    for round_number in range(2):
        with ThreadPoolExecutor(len(MIXED)) as pool:
            found = pool.map(
                lambda at, n=round_number: ASKS[MIXED[at][0]](
                    real_server, MIXED[at][1], stream=bool(at + n & 1)
                ),
                range(len(MIXED)),
            )
            assert [said(told) for told in found] == alone
    assert real_server.backend.counts == (0, 0)


# One that runs on, and how it is left.


def body(text: str = "x", **more: Any) -> Json:
    return {
        "model": "painted:1m",
        "messages": user(text),
        "max_tokens": LONG,
        "temperature": 0,
        **more,
    }


@contextmanager
def open_request(
    server: Server, value: Json, path: str = "/v1/chat/completions"
) -> Iterator[socket.socket]:
    """What was asked for on a connection of its own, of which nothing is read."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(value).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\ncontent-type: application/json\r\n"
    with socket.socket() as connection:
        connection.settimeout(60)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for what has to come."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def idle(server: Server) -> None:
    until(lambda: server.backend.counts == (0, 0), "a generation goes on")


@pytest.fixture
def endless(endless_artifact: Artifact) -> Iterator[LLM]:
    """A model with a long window that never ends an answer: one generation fills what memory is planned for."""
    with LLM(endless_artifact.path, threads=1, max_context=60_000, parallel=1) as model:
        yield model


@pytest.fixture
def server(endless: LLM) -> Iterator[Server]:
    with serving(endless) as server:
        yield server


def test_metadata_answers_while_generations_run(server: Server) -> None:
    with open_request(server, body(stream=True)) as running:
        assert running.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: server.backend.counts == (1, 0), "nothing runs")
        for path in ("/v1/models", "/api/tags", "/api/ps", "/api/version", "/v4/ai/config"):
            assert server.http.get(path).status_code == 200
        counted = server.http.post(
            "/v1/messages/count_tokens", json={"model": "painted:1m", "messages": user("Hello")}
        )
        assert counted.json()["input_tokens"] > 5
        assert server.backend.counts == (1, 0)
    idle(server)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_in_decode_ends_its_generation(
    server: Server, endless: LLM, stream: bool
) -> None:
    with open_request(server, body(stream=stream)):
        until(lambda: server.backend.counts == (1, 0), "nothing runs")
        until(lambda: endless.engine.passes > 3, "nothing is written")
    idle(server)
    passes = endless.engine.passes
    assert passes < 59_000
    assert endless.engine.stats.finish_reason == "cancelled"
    time.sleep(0.05)
    assert endless.engine.passes == passes


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_in_prefill_ends_it_and_what_was_read_stays(
    server: Server, endless: LLM, stream: bool
) -> None:
    text = "".join(f"{i} " for i in range(8_000))
    before = endless.engine.passes
    with open_request(server, body(text, stream=stream)):
        until(lambda: endless.engine.passes > before + 2, "nothing is read")
    idle(server)
    stats = endless.engine.stats
    assert stats.new_tokens == 0
    assert 0 < stats.unread_tokens < stats.prompt_tokens
    read = stats.read_tokens
    with open_request(server, body(text, stream=stream)):
        until(lambda: endless.engine.passes > before + 6, "nothing is read")
    idle(server)
    again = endless.engine.stats
    assert again.prompt_tokens == stats.prompt_tokens
    assert 0 < read <= again.reused_tokens + 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_the_line_never_runs(
    server: Server, endless: LLM, stream: bool
) -> None:
    """Who is in front of it is not disturbed."""
    with open_request(server, body("a", stream=True)) as first:
        until(lambda: server.backend.counts == (1, 0), "nothing runs")
        got = first.recv(100)
        with open_request(server, body("b" * 99, stream=stream)):
            until(lambda: server.backend.counts == (1, 1), "nobody waits")
        until(lambda: server.backend.counts == (1, 0), "somebody waits")
        assert got
        assert first.recv(1000)
    idle(server)
    assert endless.engine.stats.prompt_tokens < 99


def test_others_are_not_disturbed_by_those_who_leave(wild_server: Server) -> None:
    asked = [Asked(user(f"question {i}"), 120, 1.0, i) for i in range(3)]
    alone = [said(ASKS["chat"](wild_server, one, stream=True)) for one in asked]
    over = threading.Event()

    def leave() -> None:
        at = 0
        while not over.is_set():
            at += 1
            with open_request(wild_server, body(f"{at} " * (at % 200), stream=bool(at % 2))):
                time.sleep(0.002 * (at % 9))

    leaving = threading.Thread(target=leave)
    leaving.start()
    try:
        with ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                found = pool.map(lambda one: ASKS["chat"](wild_server, one, stream=True), asked)
                assert [said(told) for told in found] == alone
    finally:
        over.set()
        leaving.join()
    idle(wild_server)


# One that does not read.


def test_a_client_that_reads_nothing_stands_still_and_others_go_on(
    server: Server, endless: LLM
) -> None:
    """Kernel and server hold some of its answer; then its generation waits, though it has tens of thousands to go.

    It holds all pages that memory is planned for, and gives them up to who comes.
    """
    with open_request(server, body("a", stream=True)) as lazy:
        until(lambda: server.backend.counts == (1, 0), "nothing runs")
        still, passes = -1, 0
        while passes != still:
            time.sleep(0.3)
            still, passes = passes, endless.engine.passes
        assert 10 < passes < 50_000
        (job,) = server.backend._worker._jobs
        assert MOST_EVENTS <= len(job._events) <= MOST_EVENTS + 8
        for i in range(3):
            told = ASKS["messages"](server, Asked(user(f"hello {i}"), 20), stream=True)
            assert told.new == 20
        assert server.backend.counts[0] + server.backend.counts[1] == 1
        took, got = 0, b""
        while took < 300_000 and (data := lazy.recv(1 << 16)):  # it reads after all
            took, got = took + len(data), data
        assert b"chat.completion.chunk" in got
        until(lambda: endless.engine.passes > passes + 20, "it does not go on")
    idle(server)


def test_a_slow_reader_gets_everything(wild_server: Server) -> None:
    asked = Asked(user("slow"), 600, 1.0, 4)
    alone = ASKS["chat"](wild_server, asked, stream=False)
    value = body("slow", temperature=1.0, seed=4, max_tokens=600, stream=True)
    text = ""
    with httpx.stream(
        "POST", f"{wild_server.url}/v1/chat/completions", json=value, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            time.sleep(0.001)
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert text == alone.text
