"""Heads as bytes: what is refused, with which status, however it is cut into packets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.serve.app import create_app
from headrace.serve.events import Finished, Started, TextDelta, Usage
from headrace.serve.http.head import MAX_BODY, MAX_EMPTY, MAX_FIELDS, MAX_HEAD
from serve.http.plain import plain
from serve.http.wired import Raw, asked, request, wired
from serve.scripted import ScriptedBackend

SCRIPT = [Started(3, 0), TextDelta("Hello"), Finished("stop", Usage(3, 0, 1))]
ASK = b'{"text": "Hi"}'


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with wired(create_app(ScriptedBackend(SCRIPT), [plain()])) as port:
        yield port


def lines(*text: str, body: bytes = b"") -> bytes:
    return "\r\n".join([*text, "", ""]).encode("latin-1") + body


POST = ("POST /plain/ask HTTP/1.1", "Host: localhost")


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (lines(*POST, "Content-Length: 2", "Content-Length: 3", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: 2", "Content-Length: 2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: 2, 2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: +2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: -2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: 0x2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: 2.0", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length:", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: \xb2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: 1 2", body=b"{}"), 400, "one number"),
        (lines(*POST, "Content-Length: " + "9" * 18), 413, "larger than"),
        (lines(*POST, "Content-Length: " + "9" * 19), 413, "larger than"),
        (lines(*POST, "Content-Length: " + "9" * 10_000), 413, "larger than"),
        (lines(*POST, "Content-Length : 2", body=b"{}"), 400, "header line"),
        (lines(*POST, "Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\n\r\n"), 411, "chunked"),
        (lines(*POST, "Transfer-Encoding: Chunked", body=b"0\r\n\r\n"), 411, "chunked"),
        (lines(*POST, "Transfer-Encoding: gzip, chunked"), 501, "unknown Transfer-Encoding"),
        (lines(*POST, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 501, "unknown"),
        (lines(*POST, "Transfer-Encoding: chunked", "Content-Length: 2", body=b"{}"), 400, "beside"),
        (lines(*POST, "Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"), 400, "header line"),
        (lines("POST /plain/ask HTTP/1.0", "Transfer-Encoding: chunked"), 400, "HTTP/1.0"),
        (lines(*POST, "X: a\x00b"), 400, "header line"),
        (lines(*POST, "X: a\x01b"), 400, "header line"),
        (lines(*POST, "X: a\x7fb"), 400, "header line"),
        (lines(*POST, "X: a\rb"), 400, "header line"),
        (lines(*POST, "X\x00: a"), 400, "header line"),
        (lines(*POST, "X Y: a"), 400, "header line"),
        (lines(*POST, ": a"), 400, "header line"),
        (lines(*POST, "no colon"), 400, "header line"),
        (lines(*POST, "X: a", " folded"), 400, "header line"),
        (lines(*POST, "Expect: a-miracle"), 417, "expectation"),
        (lines(*POST, "Host: localhost"), 400, "one Host"),
        (lines("GET /plain/model HTTP/1.1"), 400, "one Host"),
        (lines("GET /plain/model HTTP/2.0", "Host: localhost"), 505, "HTTP/1.1"),
        (lines("GET /plain/model HTTP/1.2", "Host: localhost"), 505, "HTTP/1.1"),
        (lines("GET /plain/model", "Host: localhost"), 400, "request line"),
        (lines("GET  /plain/model HTTP/1.1", "Host: localhost"), 400, "request line"),
        (lines("GET /plain/\xe9 HTTP/1.1", "Host: localhost"), 400, "request line"),
        (lines("GET /plain/\x00 HTTP/1.1", "Host: localhost"), 400, "request line"),
        (lines("GET plain HTTP/1.1", "Host: localhost"), 400, "target"),
        (lines("CONNECT localhost:80 HTTP/1.1", "Host: localhost"), 400, "target"),
        (lines("GET http://me@localhost/ HTTP/1.1", "Host: localhost"), 400, "target"),
        (lines("PRI * HTTP/2.0"), 505, "HTTP/1.1"),
        (b"GET /plain/model HTTP/1.1\nHost: localhost\n\n", 400, "CR LF"),
        (b"GET /plain/model HTTP/1.1\r\nHost: localhost\n\r\n", 400, "CR LF"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "no HTTP/1"),
        (b"\r\n" * (MAX_EMPTY + 1) + b"GET / HTTP/1.1\r\n", 400, "no HTTP/1"),
        (b"\r\n\nGET / HTTP/1.1\r\n", 400, "no HTTP/1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("step", [0, 1])
def test_a_wrong_head_is_refused(port: int, data: bytes, status: int, said: str, step: int) -> None:
    with Raw(port) as raw:
        raw.send(data, step=step)
        got = raw.answer()
        assert got.status == status
        assert said in str(got.json)
        assert got.headers["connection"] == "close"
        assert got.headers["content-type"] == "application/json"
        assert raw.ended()


def padded(size: int) -> bytes:
    """A whole request whose head has `size` bytes."""
    bare = len(lines("GET /plain/model HTTP/1.1", "Host: localhost", "X: "))
    return lines("GET /plain/model HTTP/1.1", "Host: localhost", "X: " + "x" * (size - bare))


@pytest.mark.parametrize("step", [0, 1000, 4096, 32768, 65535, 65536])
def test_a_head_is_measured_as_a_whole(port: int, step: int) -> None:
    assert asked(port, padded(MAX_HEAD), step=step).status == 200
    got = asked(port, padded(MAX_HEAD + 1), step=step)
    assert (got.status, got.json["code"]) == (431, "headers_too_large")


def test_headers_are_counted(port: int) -> None:
    assert (
        asked(port, request("GET", "/plain/model", b"", *["a:"] * (MAX_FIELDS - 1))).status == 200
    )
    assert asked(port, request("GET", "/plain/model", b"", *["a:"] * MAX_FIELDS)).status == 431


def test_a_head_without_an_end_is_refused_at_the_limit(port: int) -> None:
    got = asked(port, b"GET /plain/x HTTP/1.1\r\nX: " + b"x" * MAX_HEAD)
    assert (got.status, got.json["code"]) == (431, "headers_too_large")
    assert asked(port, b"G" * (MAX_HEAD + 1)).status == 431


def test_a_request_may_come_a_byte_at_a_time(port: int) -> None:
    got = asked(port, request("POST", "/plain/ask", ASK), step=1)
    assert (got.status, got.json) == (200, {"text": "Hello"})


@pytest.mark.parametrize("step", [0, 1, 7])
def test_pipelined_requests_are_answered_in_order(port: int, step: int) -> None:
    data = request("GET", "/plain/model") + request("POST", "/plain/ask", ASK)
    data += request("GET", "/nowhere") + b"\r\n" + request("GET", "/plain/things/7")
    data += request("GET", "/health", b"", "Connection: close")
    with Raw(port) as raw:
        raw.send(data, step=step)
        got = [raw.answer() for _ in range(5)]
        assert [g.status for g in got] == [200, 200, 404, 404, 200]
        assert got[1].json == {"text": "Hello"}
        assert got[3].json == {"wrong": "no 7", "code": "not_found"}
        assert raw.ended()


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 2, MAX_EMPTY])
def test_empty_lines_in_front_of_a_request_are_ignored(port: int, step: int, count: int) -> None:
    empty = b"\r\n" * count
    data = empty + request("POST", "/plain/ask", ASK) + empty + request("GET", "/plain/model")
    with Raw(port) as raw:
        raw.send(data, step=step)
        assert [raw.answer().status for _ in range(2)] == [200, 200]
        raw.send(empty + request("GET", "/nowhere"), step=step)
        assert raw.answer().status == 404


def test_zeros_in_front_of_a_length_are_nothing(port: int) -> None:
    data = lines(*POST, "Content-Length: " + "0" * 5000 + str(len(ASK)), body=ASK)
    assert asked(port, data).json == {"text": "Hello"}


def test_a_wrong_request_behind_a_right_one_comes_second(port: int) -> None:
    with Raw(port) as raw:
        raw.send(request("POST", "/plain/ask", ASK) + b"nonsense\r\n\r\n")
        assert raw.answer().json == {"text": "Hello"}
        assert raw.answer().status == 400
        assert raw.ended()


def test_a_body_is_no_second_request(port: int) -> None:
    hidden = request("GET", "/health")
    with Raw(port) as raw:
        raw.send(request("GET", "/plain/model", hidden) + request("GET", "/nowhere"))
        assert [raw.answer().status for _ in range(2)] == [200, 404]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_absolute_target_names_path_and_host(port: int, host: str) -> None:
    data = lines(f"GET http://{host}:{port}/plain/model?a=b HTTP/1.1", "Host: elsewhere.example")
    assert asked(port, data).json == {"name": "painted:1m"}
    data = lines("GET http://elsewhere.example/plain/model HTTP/1.1", "Host: localhost")
    assert asked(port, data).status == 403
    assert asked(port, lines(f"GET http://{host} HTTP/1.1", "Host: localhost")).status == 404


def test_http_1_0_is_answered_and_closed(port: int) -> None:
    with Raw(port) as raw:
        raw.send(lines("GET /plain/model HTTP/1.0"))
        assert raw.answer().json == {"name": "painted:1m"}
        assert raw.ended()


@pytest.mark.parametrize("size", [MAX_BODY + 1, 40_000_001])
def test_a_413_can_be_read_by_who_sends_everything_first(port: int, size: int) -> None:
    with Raw(port) as raw:
        raw.send(lines(*POST, f"Content-Length: {size}"))
        for _ in range(size // 1_000_000):
            raw.send(bytes(1_000_000))
        raw.send(bytes(size % 1_000_000))
        got = raw.answer()
        assert (got.status, got.json["code"]) == (413, "request_too_large")
        assert raw.ended()


def test_a_413_comes_in_place_of_100_continue(port: int) -> None:
    with Raw(port) as raw:
        raw.send(lines(*POST, f"Content-Length: {MAX_BODY + 1}", "Expect: 100-continue"))
        assert raw.answer().status == 413
        assert raw.ended()


def test_100_continue_comes_before_a_body_that_is_wanted(port: int) -> None:
    with Raw(port) as raw:
        raw.send(lines(*POST, f"Content-Length: {len(ASK)}", "Expect: 100-continue"))
        assert raw.head().status == 100
        raw.send(ASK)
        assert raw.answer().json == {"text": "Hello"}


@pytest.mark.parametrize(
    ("path", "field", "status"),
    [
        ("/nowhere", "X: y", 404),
        ("/plain/ask", "Origin: http://a.example", 403),
        ("/plain/ask", "Content-Type: image/png", 415),
    ],
)
def test_no_100_continue_where_the_body_is_not_wanted(
    port: int, path: str, field: str, status: int
) -> None:
    with Raw(port) as raw:
        raw.send(
            lines(
                f"POST {path} HTTP/1.1",
                "Host: localhost",
                field,
                f"Content-Length: {len(ASK)}",
                "Expect: 100-continue",
            )
        )
        got = raw.answer()
        assert got.status == status
        assert got.headers["connection"] == "close"
        assert raw.ended()


def test_the_largest_body_is_read(port: int) -> None:
    text = b"x" * (MAX_BODY - len(b'{"text":""}'))
    got = asked(port, request("POST", "/plain/ask", b'{"text":"' + text + b'"}'))
    assert (got.status, got.json) == (200, {"text": "Hello"})
