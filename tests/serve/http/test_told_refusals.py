"""What a connection refuses by itself is told like any other request: one line of the log, one count."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.serve.app import create_app
from headrace.serve.events import Finished, Started, Usage
from headrace.serve.http.head import MAX_BODY, MAX_HEAD
from headrace.serve.http.protocol import Limits
from headrace.serve.process.attendant import Attendant
from headrace.serve.telemetry.status import Facts
from serve.http.plain import plain
from serve.http.wired import QUICK, Got, Raw, asked, request, wait, wired
from serve.scripted import ScriptedBackend

ASK = b'{"text": "Hi"}'
POST = "POST /plain/ask HTTP/1.1\r\nHost: localhost\r\n"
SLOW = replace(QUICK, head_seconds=0.2, body_seconds=0.2)


@contextmanager
def observed(limits: Limits = QUICK) -> Iterator[tuple[int, ScriptedBackend]]:
    """The port of a server with a log and metrics."""
    facts = Facts("1.2.3", 42, 11434, "painted:1m", 8192, 1_700_000_000)
    attendant = Attendant(facts, counts=lambda: (0, 0), cache_bytes={})
    backend = ScriptedBackend([Started(3, 0), 1000.0, Finished("stop", Usage(3, 0, 1))])
    with wired(create_app(backend, [plain()], observer=attendant), limits) as port:
        yield port, backend


def logged(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """All lines of requests, once there are so many."""

    def lines() -> list[dict[str, Any]]:
        return [dict(r.fields) for r in caplog.records if r.getMessage() == "request"]  # type: ignore[attr-defined]

    wait(lambda: len(lines()) >= count)
    return lines()


def counted(port: int) -> dict[tuple[str, str, str], float]:
    """Requests by dialect, endpoint and status, without those that look."""
    text = asked(port, request("GET", "/metrics", b"", "Connection: close")).body.decode()
    return {
        (labels["dialect"], labels["endpoint"], labels["status"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "headrace_requests_total" and (labels := sample.labels)
    }


def told(got: Got, code: str, **more: str) -> dict[str, Any]:
    """The line of an answer, without its seconds."""
    line = {"dialect": "server", "endpoint": "unknown", **more}
    return {"id": got.headers["x-request-id"], **line, "status": got.status, "error": code}


def without_seconds(line: dict[str, Any]) -> dict[str, Any]:
    assert line["seconds"] >= 0
    return {name: value for name, value in line.items() if name != "seconds"}


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_request"),
        (b"\x16\x03\x01", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\n", 408, "request_timeout"),
        (f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode(), 411, "length_required"),
        (f"{POST}Content-Length: {MAX_BODY + 1}\r\n\r\n".encode(), 413, "request_too_large"),
        (f"{POST}Expect: more\r\n\r\n".encode(), 417, "expectation_failed"),
        (b"GET /health HTTP/1.1\r\nX: " + b"x" * MAX_HEAD, 431, "headers_too_large"),
        (f"{POST}Transfer-Encoding: gzip\r\n\r\n".encode(), 501, "unsupported"),
        (b"GET /health HTTP/2.0\r\n\r\n", 505, "version_not_supported"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_what_is_refused_has_a_line_and_is_counted(
    caplog: pytest.LogCaptureFixture, data: bytes, status: int, code: str
) -> None:
    caplog.set_level(logging.INFO, "headrace")
    with observed(SLOW) as (port, _):
        got = asked(port, data)
        assert got.status == status
        assert [without_seconds(line) for line in logged(caplog, 1)] == [told(got, code)]
        assert counted(port) == {("server", "unknown", str(status)): 1}
    assert len(logged(caplog, 1)) == 1


def test_too_many_connections_have_lines_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace")
    with observed(replace(QUICK, connections=1)) as (port, backend), ExitStack() as stack:
        stack.enter_context(Raw(port)).send(request("POST", "/plain/ask", ASK))
        wait(lambda: backend.runs)
        got = [asked(port, request("GET", "/plain/model")) for _ in range(3)]
        lines = [without_seconds(line) for line in logged(caplog, 3)]
        assert lines == [told(each, "too_many_connections") for each in got]


@pytest.mark.parametrize(
    ("path", "fields", "endpoint"),
    [
        ("/plain/ask", (), {"dialect": "plain", "endpoint": "/plain/ask"}),
        ("/nowhere", (), {}),
        ("/plain/ask", ("Origin: http://a.example",), {}),
        ("/metrics", (), {"dialect": "server", "endpoint": "unknown"}),
    ],
)
def test_a_body_that_comes_too_slowly_has_one_line_with_the_id_of_its_answer(
    caplog: pytest.LogCaptureFixture, path: str, fields: tuple[str, ...], endpoint: dict[str, str]
) -> None:
    """Whatever the application was about to say."""
    caplog.set_level(logging.INFO, "headrace")
    with observed(SLOW) as (port, backend), Raw(port) as raw:
        raw.send(request("POST", path, ASK, *fields)[:-1])
        got = raw.answer()
        assert (got.status, raw.ended()) == (408, True)
        lines = [without_seconds(line) for line in logged(caplog, 1)]
        assert lines == [told(got, "request_timeout", **endpoint)]
        label = {"dialect": "server", "endpoint": "unknown", **endpoint}
        assert counted(port) == {(label["dialect"], label["endpoint"], "408"): 1}
        assert backend.requests == []
    assert len(logged(caplog, 1)) == 1


def test_a_408_to_head_has_no_body_and_one_that_looks_like_head_has_its_own() -> None:
    with observed(SLOW) as (port, _):
        for method, sent in (("HEAD", b"x"), ("POST", b"HEAD ")):
            with Raw(port) as raw:
                raw.send(request(method, "/plain/ask", bytes(10))[:-10] + sent)
                got = raw.answer(head=method == "HEAD")
                assert (got.status, raw.ended()) == (408, True)
                assert bool(got.body) == (method == "POST")
