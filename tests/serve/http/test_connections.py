"""Connections: how many, how slow, and what becomes of the work of a client that is gone."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from headrace.serve.app import create_app
from headrace.serve.events import Event, Finished, Started, TextDelta, Usage
from headrace.serve.http.protocol import Clock, Limits, overdue
from serve.http.plain import plain
from serve.http.wired import QUICK, Raw, asked, request, wait, wired
from serve.pages import DOCS
from serve.scripted import ScriptedBackend

ASK = b'{"text": "Hi"}'
STREAM = b'{"text": "Hi", "stream": true}'
PATIENT = replace(
    QUICK,
    connections=3,
    young_seconds=1000,
    head_seconds=1000,
    ending_pause=1000,
    ending_seconds=1000,
)
HANGING = 1000.0  # seconds of a script that no test waits for
DONE = Finished("stop", Usage(3, 0, 1))


@contextmanager
def serving(
    script: list[Event | float], limits: Limits = QUICK, **more: float
) -> Iterator[tuple[int, ScriptedBackend]]:
    backend = ScriptedBackend(script)
    with wired(create_app(backend, [plain()], **more), limits) as port:
        yield port, backend


def reset(raw: Raw) -> None:
    """Close as a process that was killed with unread input does."""
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.parametrize("leave", [Raw.close, reset])
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "script",
    [
        [HANGING, Started(3, 0), DONE],
        [Started(3, 0), HANGING, TextDelta("So"), DONE],
        [Started(3, 0), TextDelta("So"), HANGING, DONE],
    ],
    ids=["queued", "prefill", "decode"],
)
def test_a_client_that_is_gone_is_not_worked_for(
    script: list[Event | float], body: bytes, leave: object
) -> None:
    with serving(script) as (port, backend):
        raw = Raw(port)
        raw.send(request("POST", "/plain/ask", body))
        wait(
            lambda: (
                backend.runs
                and len(backend.runs[0].taken) == [type(x) for x in script].index(float)
            )
        )
        leave(raw)  # type: ignore[operator]
        wait(lambda: backend.runs[0].cancelled)
        assert asked(port, request("GET", "/health")).status == 200


def test_a_client_that_is_gone_ends_no_other() -> None:
    with (
        serving([Started(3, 0), 0.3, TextDelta("Hello"), DONE]) as (port, backend),
        Raw(port) as stays,
    ):
        stays.send(request("POST", "/plain/ask", ASK))
        wait(lambda: len(backend.runs) == 1)
        leaves = Raw(port)
        leaves.send(request("POST", "/plain/ask", ASK))
        wait(lambda: len(backend.runs) == 2)
        leaves.close()
        wait(lambda: backend.runs[1].cancelled)
        assert stays.answer().json == {"text": "Hello"}
        assert not backend.runs[0].cancelled


def test_a_client_that_leaves_in_its_body_starts_nothing() -> None:
    with serving([Started(3, 0), DONE]) as (port, backend):
        raw = Raw(port)
        raw.send(request("POST", "/plain/ask", ASK)[:-1])
        raw.close()
        assert asked(port, request("POST", "/plain/ask", ASK)).status == 200
        assert len(backend.requests) == 1


def test_a_server_that_ends_cancels_nothing_that_is_answered() -> None:
    with serving([Started(3, 0), 0.3, TextDelta("Hello"), DONE]) as (port, backend):
        raw = Raw(port)
        raw.send(request("POST", "/plain/ask", ASK))
        wait(lambda: backend.runs)
    assert raw.answer().json == {"text": "Hello"}
    assert raw.ended()
    raw.close()


def test_a_server_that_ends_does_not_wait_for_ever() -> None:
    with serving([Started(3, 0), HANGING, DONE], replace(QUICK, grace_seconds=1)) as (
        port,
        backend,
    ):
        raw = Raw(port)
        raw.send(request("POST", "/plain/ask", STREAM))
        assert raw.head().status == 200
    assert backend.runs[0].cancelled
    assert raw.ended()
    raw.close()


@pytest.mark.parametrize("step", [1, 20])
def test_a_head_that_comes_too_slowly_is_cut_off(step: int) -> None:
    with serving([], replace(QUICK, head_seconds=0.2)) as (port, _), Raw(port) as raw:
        raw.send(b"GET /plain/model HTTP/1.1\r\nHost: local"[: 30 + step])
        got = raw.answer()
        assert (got.status, got.json) == (
            408,
            {"wrong": "the head of the request came too slowly", "code": "request_timeout"},
        )
        assert raw.ended()


def test_every_byte_does_not_buy_more_time() -> None:
    with serving([], replace(QUICK, head_seconds=0.3)) as (port, _), Raw(port) as raw:
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.02):
                try:
                    raw.send(b"x")
                except OSError:
                    return

        raw.send(b"GET /plain/model HTTP/1.1\r\nX: ")
        dripping = threading.Thread(target=drip)
        dripping.start()
        assert raw.answer().status == 408
        stop.set()
        dripping.join()


def test_a_connection_that_says_nothing_is_closed() -> None:
    with serving([], replace(QUICK, head_seconds=0.2)) as (port, _), Raw(port) as raw:
        assert raw.ended()


@pytest.mark.parametrize("sent", [0, 7])
def test_a_body_that_comes_too_slowly_is_cut_off(sent: int) -> None:
    with serving([], replace(QUICK, body_seconds=0.2)) as (port, backend), Raw(port) as raw:
        raw.send(request("POST", "/plain/ask", ASK)[: -len(ASK) + sent])
        got = raw.answer()
        assert (got.status, got.json["code"]) == (408, "request_timeout")
        assert raw.ended()
        assert backend.requests == []


def test_slow_senders_hold_nobody_up() -> None:
    with serving([Started(3, 0), DONE]) as (port, _), ExitStack() as stack:
        for i in range(100):
            raw = stack.enter_context(Raw(port))
            raw.send(request("POST", "/plain/ask", ASK)[: 20 if i % 2 else -1])
        assert asked(port, request("POST", "/plain/ask", ASK)).status == 200


def test_an_idle_connection_is_closed_and_a_used_one_kept() -> None:
    with (
        serving([], replace(QUICK, idle_seconds=1, head_seconds=30)) as (port, _),
        Raw(port) as raw,
    ):
        for _ in range(3):
            raw.send(request("GET", "/health"))
            assert raw.answer().status == 200
        assert raw.ended()


def test_an_empty_line_keeps_no_idle_connection() -> None:
    limits = replace(QUICK, idle_seconds=1, head_seconds=1000)
    with serving([], limits) as (port, _), Raw(port) as raw:
        raw.send(request("GET", "/health") + b"\r\n")
        assert raw.answer().status == 200
        raw.send(b"\r\n")
        assert raw.ended()


def test_too_many_connections_are_told_so() -> None:
    limits = replace(QUICK, connections=3)
    with serving([Started(3, 0), HANGING, DONE], limits) as (port, backend), ExitStack() as stack:
        held = [stack.enter_context(Raw(port)) for _ in range(3)]
        for raw in held:
            raw.send(request("POST", "/plain/ask", ASK))
        wait(lambda: len(backend.runs) == 3)
        with Raw(port) as late:
            late.send(request("POST", "/plain/ask", ASK))
            got = late.answer()
            assert (got.status, got.json["code"]) == (503, "too_many_connections")
            assert got.headers["retry-after"] == "1"
            assert late.ended()
        assert len(backend.runs) == 3
        held[0].close()
        wait(lambda: asked(port, request("GET", "/health")).status == 200)


def test_idle_connections_make_room() -> None:
    limits = replace(QUICK, connections=2, young_seconds=0)
    with serving([], limits) as (port, _), ExitStack() as stack:
        held = []
        for _ in range(3):
            held.append(stack.enter_context(Raw(port)))
            held[-1].send(request("GET", "/health"))
            assert held[-1].answer().status == 200
        assert held[0].ended()  # it had waited longest
        for raw in held[1:]:
            raw.send(request("GET", "/health"))
            assert raw.answer().status == 200


@pytest.mark.parametrize("sent", [b"", b"GET /plain/model HTTP/1.1\r\nHost: local"])
def test_connections_without_a_request_make_room(sent: bytes) -> None:
    with serving([], replace(PATIENT, young_seconds=0.1)) as (port, _), ExitStack() as stack:
        held = [stack.enter_context(Raw(port)) for _ in range(3)]
        for raw in held if sent else ():
            raw.send(sent)
        time.sleep(0.2)  # now none is young
        assert asked(port, request("GET", "/health")).status == 200
        assert held[0].ended()  # it had waited longest


@pytest.mark.parametrize("sent", [0, 20])
def test_a_young_connection_gives_its_place_to_a_whole_request_and_stays(sent: int) -> None:
    ask = request("GET", "/plain/model")
    with serving([], PATIENT) as (port, _), ExitStack() as stack:
        held = [stack.enter_context(Raw(port)) for _ in range(3)]
        for raw in held if sent else ():
            raw.send(ask[:sent])
        for _ in range(5):
            assert asked(port, request("GET", "/health")).status == 200
        for raw in held:
            raw.send(ask[sent:])
            assert raw.answer().status == 200


def test_requests_are_answered_in_a_crowd_of_connections_without_any() -> None:
    with serving([], PATIENT) as (port, _), ExitStack() as stack:
        held = [stack.enter_context(Raw(port)) for _ in range(20)]
        for raw in held[10:]:
            with suppress(ConnectionError):  # it was one too many
                raw.send(b"GET /plain/model HTTP/1.1\r\nHost: local")
        for _ in range(8):
            assert asked(port, request("GET", "/health", b"", "Connection: close")).status == 200
        assert held[0].ended()
        held[-1].send(b"host\r\n\r\n")
        assert held[-1].answer().status == 200


def test_refused_connections_are_told_so_however_many_come_and_whatever_they_still_send() -> None:
    limits = replace(PATIENT, connections=2)
    with serving([Started(3, 0), HANGING, DONE], limits) as (port, backend), ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(Raw(port)).send(request("POST", "/plain/ask", ASK))
        wait(lambda: len(backend.runs) == 2)
        refused = []
        for _ in range(10):  # more than are kept: who was told longest ago goes
            refused.append(stack.enter_context(Raw(port)))
            refused[-1].send(request("POST", "/plain/ask", bytes(300_000)))
            got = refused[-1].answer()
            assert (got.status, got.json["code"]) == (503, "too_many_connections")
        assert refused[-1].ended()
        assert not any(run.cancelled for run in backend.runs)


def test_a_request_in_hand_makes_no_room() -> None:
    limits = replace(QUICK, connections=2, tick_seconds=30)
    with serving([Started(3, 0), TextDelta("So"), DONE], limits) as (port, _), ExitStack() as stack:
        held = [stack.enter_context(Raw(port)) for _ in range(2)]
        for raw in held:
            raw.send(request("POST", "/plain/ask", ASK)[:-1])
        wait(lambda: asked(port, request("GET", "/health")).status == 503)
        for raw in held:
            raw.send(ASK[-1:])
            assert raw.answer().json == {"text": "So"}


def test_far_over_the_limit_the_connection_ends_that_has_waited_longest() -> None:
    with serving([], PATIENT) as (port, _), ExitStack() as stack:
        held = [stack.enter_context(Raw(port)) for _ in range(7)]
        assert held[0].ended()
        for raw in held[1:4]:
            raw.send(request("GET", "/plain/model"))
            assert raw.answer().status == 200


def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    frames: list[Event | float] = [TextDelta("x" * 50_000) for _ in range(2000)]
    with (
        serving([Started(3, 0), *frames, DONE], replace(QUICK, stall_seconds=0.3)) as (
            port,
            backend,
        ),
        Raw(port) as raw,
    ):
        raw.send(request("POST", "/plain/ask", STREAM))
        wait(lambda: backend.runs and backend.runs[0].cancelled)
        assert len(backend.runs[0].taken) < 1000


def test_output_waits_for_the_reader() -> None:
    frames: list[Event | float] = [TextDelta("x" * 50_000) for _ in range(400)]
    with serving([Started(3, 0), *frames, DONE]) as (port, backend), Raw(port) as raw:
        raw.send(request("POST", "/plain/ask", STREAM))
        wait(lambda: backend.runs and backend.runs[0].taken)
        assert raw.head().status == 200
        size = 0
        while length := int(raw.line(), 16):
            size += len(raw._file.read(length + 2)) - 2
        assert size == 400 * len('{"text": ""}\n') + 400 * 50_000 + len('{"done": "stop"}\n')
        assert not backend.runs[0].cancelled


def test_a_whole_answer_that_nobody_reads_is_cut_off() -> None:
    script = [Started(3, 0), TextDelta("x" * (30 << 20)), DONE]
    with (
        serving(script, replace(QUICK, stall_seconds=0.3, connections=1)) as (port, backend),
        Raw(port) as raw,
    ):
        raw.send(request("POST", "/plain/ask", ASK, "Connection: close"))
        wait(lambda: backend.runs and len(backend.runs[0].taken) == 3)
        wait(lambda: asked(port, request("GET", "/health")).status == 200)
        got = raw.answer()
        assert len(got.body) < int(got.headers["content-length"])


def flood(raw: Raw, data: bytes) -> None:
    """Send more than any buffer holds."""
    for _ in range(10_000):
        raw.send(data)


def test_requests_far_ahead_of_their_answers_end_the_connection() -> None:
    with serving([Started(3, 0), HANGING, DONE]) as (port, backend), Raw(port) as raw:
        raw.send(request("POST", "/plain/ask", ASK))
        wait(lambda: backend.runs)
        with pytest.raises(ConnectionError):
            flood(raw, request("GET", "/health", bytes(100_000)))
        wait(lambda: backend.runs[0].cancelled)


def test_what_is_sent_behind_a_refusal_is_bounded() -> None:
    limits = replace(QUICK, ending_bytes=1 << 20, ending_seconds=30, ending_pause=30)
    with serving([], limits) as (port, _), Raw(port) as raw:
        raw.send(request("GET", "/plain/ask", b"", "Content-Length: 99999999999"))
        assert raw.answer().status == 413
        with pytest.raises(ConnectionError):
            flood(raw, bytes(100_000))


LIMITS = Limits()


def test_what_is_thrown_away_behind_a_refusal_is_as_the_page_says() -> None:
    found = (LIMITS.ending_bytes, LIMITS.ending_seconds, LIMITS.ending_pause)
    assert found == (256 << 20, 10.0, 2.0)
    page = " ".join((DOCS / "http.md").read_text().split())
    assert "throws away what still comes, up to 256 MiB, 10 s, or 2 s of silence" in page


@pytest.mark.parametrize(
    ("clock", "now", "some", "late"),
    [
        (Clock("head"), 10.0, True, None),
        (Clock("head"), 10.1, True, "head"),
        (Clock("head"), 10.1, False, None),
        (Clock("head", crowded=True), 2.1, True, "head"),
        (Clock("body", length=14), 30.0, True, None),
        (Clock("body", length=14), 30.1, True, "body"),
        (Clock("body", length=32 << 20), 541.0, True, None),
        (Clock("body", length=32 << 20), 543.0, True, "body"),
        (Clock("answer"), 1e6, True, None),
        (Clock("answer", unsent=1, taken=5.0), 125.0, True, None),
        (Clock("answer", unsent=1, taken=5.0), 125.1, True, "reader"),
        (Clock("ending", moved=7.0), 9.0, True, None),
        (Clock("ending", moved=7.0), 9.1, True, "ending"),
        (Clock("ending", moved=10.0), 10.1, True, "ending"),
    ],
)
def test_what_is_overdue(clock: Clock, now: float, some: bool, late: str | None) -> None:
    assert overdue(clock, now, some=some, limits=LIMITS) == late
