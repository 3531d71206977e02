"""Paths, methods, bodies and what they are answered, in the shape of the path's dialect."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from headrace.serve.app import KEEPALIVE_SECONDS, Served, create_app
from headrace.serve.dialect import Context, Exchange
from headrace.serve.events import (
    Event,
    Failed,
    Failure,
    Finished,
    Started,
    TextDelta,
    Usage,
)
from headrace.serve.http.body import INLINE, MAX_VALUES, Room
from headrace.serve.request import Json, Request
from serve.http.plain import Ask, PlainExchange, plain
from serve.http.wired import Raw, asked, request, wait, wired
from serve.pages import DOCS
from serve.scripted import CARD, ScriptedBackend, ScriptedRunning

SCRIPT: list[Event | float] = [Started(3, 0), TextDelta("Hello"), Finished("stop", Usage(3, 0, 1))]
ASK = b'{"text": "Hi"}'
STREAM = b'{"text": "Hi", "stream": true}'


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with wired(create_app(ScriptedBackend(SCRIPT), [plain()])) as port:
        yield port


def test_health(port: int) -> None:
    got = asked(port, request("GET", "/health"))
    assert (got.status, got.json) == (200, {"status": "ok"})


def test_every_answer_names_its_request(port: int) -> None:
    told = [
        asked(port, data).headers
        for data in (
            request("GET", "/health"),
            request("GET", "/nowhere"),
            request("GET", "/health", host="evil.example"),
            request("PUT", "/plain/ask"),
            request("OPTIONS", "/plain/ask"),
            request("POST", "/plain/ask", ASK),
            request("POST", "/plain/ask", b"["),
            request("POST", "/plain/ask", b"", "Transfer-Encoding: chunked"),
            b"\x16\x03\x01",
        )
    ]
    ids = [headers["x-request-id"] for headers in told]
    assert [len(bytes.fromhex(each)) for each in ids] == [16] * len(told)
    assert len(set(ids)) == len(told)
    assert [headers["request-id"] for headers in told] == [f"req_{each}" for each in ids]


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/plain/nothing", "wrong"),
        ("/plain", "wrong"),
        ("/plain/things/7/8", "wrong"),
        ("/nowhere", "error"),
        ("/", "error"),
        ("//plain/model", "error"),
        ("/plain/things/", "wrong"),
    ],
)
def test_an_unknown_path_is_told_in_the_nearest_shape(port: int, path: str, shape: str) -> None:
    got = asked(port, request("GET", path))
    assert (got.status, next(iter(got.json))) == (404, shape)


@pytest.mark.parametrize(
    "path",
    ["/plain/model?a=b", "/plain/model?", "/plain/model/", "/plain/%6dodel", "/plain/model?%00#"],
)
def test_what_does_not_change_the_path(port: int, path: str) -> None:
    assert asked(port, request("GET", path)).json == {"name": "painted:1m"}


def test_another_method_is_refused_with_those_that_there_are(port: int) -> None:
    for method in ("GET", "PUT", "PATCH", "TRACE", "BREW", "get"):
        got = asked(port, request(method, "/plain/ask"))
        assert (got.status, got.json["code"]) == (405, "method_not_allowed")
        assert got.headers["allow"] == "POST, HEAD, OPTIONS"
    got = asked(port, request("POST", "/plain/things/1"))
    assert (got.status, got.headers["allow"]) == (405, "GET, DELETE, HEAD, OPTIONS")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/plain/model", 200),
        ("/plain/ask", 200),
        ("/health", 200),
        ("/plain/things/1", 404),
        ("/nowhere", 404),
    ],
)
def test_head_has_the_status_of_the_path_and_no_body(port: int, path: str, status: int) -> None:
    with Raw(port) as raw:
        raw.send(request("HEAD", path) + request("GET", "/health"))
        assert raw.answer(head=True).status == status
        assert raw.answer().json == {"status": "ok"}


def test_options(port: int) -> None:
    got = asked(port, request("OPTIONS", "/plain/ask"))
    assert (got.status, got.headers["allow"]) == (204, "POST, HEAD, OPTIONS")
    assert asked(port, request("OPTIONS", "*")).status == 204
    assert asked(port, request("OPTIONS", "/nowhere")).status == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([], 200),
        (["Content-Type: application/json"], 200),
        (["Content-Type: application/json; charset=UTF-8"], 200),
        (["Content-Type: application/problem+json"], 200),
        (["Content-Type: application/x-www-form-urlencoded"], 200),  # of curl -d
        (["Content-Type: text/plain;charset=UTF-8"], 200),
        (["Content-Encoding: identity"], 200),
        (["Content-Type: application/json; charset=latin-1"], 415),
        (["Content-Type: multipart/form-data; boundary=x"], 415),
        (["Content-Type: application/xml"], 415),
        (["Content-Type: application/octet-stream"], 415),
        (["Content-Type: "], 415),
        (["Content-Encoding: gzip"], 415),
    ],
)
def test_content_types(port: int, fields: list[str], status: int) -> None:
    assert asked(port, request("POST", "/plain/ask", ASK, *fields)).status == status


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty"),
        (b" \r\n", "the body is empty"),
        (b"[" * 100_000, "nested deeper"),
        (b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"text": ' + b"1" * 5000 + b"}", "has 5,000 digits; at most 4,300 may be"),
        (b'{"text": "\x00"}', "not JSON"),
        (b'{"text": 1}', "text: input should be a valid string"),
        (b"null", "not a JSON object"),
        (b'{"text": ""} {}', "not JSON"),
    ],
)
def test_a_wrong_body_is_refused(port: int, body: bytes, said: str) -> None:
    got = asked(port, request("POST", "/plain/ask", body))
    assert got.status == 400
    assert said in got.json["wrong"]


def test_a_byte_order_mark_and_whole_pairs_are_taken(port: int) -> None:
    body = b'\xef\xbb\xbf{"text": "\\ud83d\\ude00"}'
    assert asked(port, request("POST", "/plain/ask", body)).json == {"text": "Hello"}


@pytest.mark.parametrize(
    "values",
    [b"1," * MAX_VALUES + b"1", b'"\\\\",' * MAX_VALUES + b'","', b'"","",' * MAX_VALUES + b"1"],
)
def test_more_values_than_can_be_read_at_once_are_refused(port: int, values: bytes) -> None:
    got = asked(port, request("POST", "/plain/ask", b'{"text": "", "x": [' + values + b"]}"))
    assert (got.status, got.json["code"]) == (413, "request_too_large")


def test_commas_in_text_are_no_values(port: int) -> None:
    body = b'{"text": "' + b',\\",\\\\,' * MAX_VALUES + b'"}'
    assert asked(port, request("POST", "/plain/ask", body)).json == {"text": "Hello"}


def test_an_early_answer_waits_for_the_body(port: int) -> None:
    """As a client that closes behind its answer sends everything first."""
    with Raw(port) as raw:
        raw.send(request("POST", "/nowhere", bytes(8 << 20), "Connection: close"))
        assert raw.answer().status == 404
        assert raw.ended()


def test_bodies_share_a_room_and_leave_it() -> None:
    room = Room(1 << 20)
    with (
        wired(create_app(ScriptedBackend(SCRIPT), [plain()], room=room)) as port,
        Raw(port) as half,
    ):
        half.send(request("POST", "/plain/ask", b'{"text": "' + b"x" * 600_000 + b'"}')[:-2])
        wait(lambda: room.free < 450_000)
        large = request(
            "POST", "/plain/ask", b'{"text": "' + b"x" * 600_000 + b'"}', "Connection: close"
        )
        for _ in range(3):
            got = asked(port, large)
            assert (got.status, got.json["code"]) == (503, "too_many_bodies")
        assert asked(port, request("POST", "/plain/ask", ASK)).status == 200
        half.send(b'"}')
        assert half.answer().status == 200
        for _ in range(3):
            assert asked(port, large).status == 200
        wait(lambda: room.free == 1 << 20)


def test_images_are_refused_where_the_model_has_no_eyes() -> None:
    body = b'{"text": "", "image": true}'
    backend = ScriptedBackend(SCRIPT)
    with wired(create_app(backend, [plain()])) as port:
        for path in ("/plain/ask", "/plain/count"):
            got = asked(port, request("POST", path, body))
            assert (got.status, got.json["code"]) == (400, "unsupported_image")
    assert backend.requests == []
    with wired(create_app(ScriptedBackend(SCRIPT, replace(CARD, vision=True)), [plain()])) as port:
        assert asked(port, request("POST", "/plain/ask", body)).status == 200


def test_ignored_fields_are_named_and_logged_once(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"text": "", "zeal": 1, "bad\r\nx: y": 2, "é": 3, "a" * 2000: 4}).encode()
    with caplog.at_level(logging.INFO, "headrace.serve.app"):
        first, second = (asked(port, request("POST", "/plain/ask", body)) for _ in range(2))
    named = "zeal, bad%0D%0Ax%3A%20y, %C3%A9, " + "a" * 100
    assert (
        first.headers["x-headrace-ignored-fields"]
        == second.headers["x-headrace-ignored-fields"]
        == named
    )
    assert "x" not in first.headers
    assert sum("the field zeal has no effect" in m for m in caplog.messages) == 1
    many = json.dumps({"text": "", **{f"field{i}": 1 for i in range(500)}}).encode()
    header = asked(port, request("POST", "/plain/ask", many)).headers["x-headrace-ignored-fields"]
    assert len(header) <= 1100
    assert header.endswith(", ...")


def test_a_large_body_is_opened_apart_and_others_are_answered() -> None:
    entered, told = threading.Event(), threading.Event()

    def opening(ask: Ask, context: Context) -> Exchange | Json:
        entered.set()
        return {"told": told.wait(20)}

    with (
        wired(create_app(ScriptedBackend(SCRIPT), [plain(opening)])) as port,
        ThreadPoolExecutor() as pool,
    ):
        body = json.dumps({"text": "x" * INLINE}).encode()
        slow = pool.submit(asked, port, request("POST", "/plain/ask", body))
        assert entered.wait(20)
        assert asked(port, request("GET", "/health")).status == 200
        told.set()
        assert slow.result().json == {"told": True}


def streamed(port: int) -> tuple[int, bytes, bool]:
    """Status and body of a streamed answer, and whether it was ended as HTTP ends one."""
    with Raw(port) as raw:
        raw.send(request("POST", "/plain/ask", STREAM))
        got, out = raw.head(), b""
        if "content-length" in got.headers:
            return got.status, raw._file.read(int(got.headers["content-length"])), True
        while size := int(raw.line() or b"0", 16):
            out += raw._file.read(size)
            assert raw._file.read(2) == b"\r\n"
        return got.status, out, raw._file.peek(2)[:2] == b"\r\n"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_event_is_a_status(stream: bool) -> None:
    backend = ScriptedBackend([Failed(Failure(503, "insufficient_memory", "no room"))])
    with wired(create_app(backend, [plain()])) as port:
        got = asked(port, request("POST", "/plain/ask", STREAM if stream else ASK))
        assert (got.status, got.json) == (503, {"wrong": "no room", "code": "insufficient_memory"})
        assert got.headers["retry-after"] == "1"


def test_a_failure_in_mid_stream_is_the_dialects_last_frame() -> None:
    backend = ScriptedBackend(
        [Started(3, 0), TextDelta("So"), Failed(Failure(500, "inference_error", "x"))]
    )
    with wired(create_app(backend, [plain()])) as port:
        assert streamed(port) == (200, b'{"text": "So"}\n{"failed": "inference_error"}\n', True)
        assert asked(port, request("POST", "/plain/ask", ASK)).status == 500


class Breaks(ScriptedRunning):
    """Raises, or gives up, where the script would end."""

    gives_up = False

    async def next(self) -> Event | None:
        if len(self.script) > 1:
            return await super().next()
        if self.gives_up:
            return None
        raise RuntimeError("broken")


class GivesUp(Breaks):
    gives_up = True


class BrokenBackend(ScriptedBackend):
    def __init__(self, script: list[Event | float], kind: type[Breaks]) -> None:
        super().__init__(script)
        self._kind = kind

    def submit(self, request: Request, *, request_id: str, arrived: float) -> ScriptedRunning:
        self.runs.append(self._kind(list(SCRIPT[: len(self.script)])))  # type: ignore[arg-type]
        return self.runs[-1]


@pytest.mark.parametrize(
    ("kind", "status", "code"), [(Breaks, 500, "inference_error"), (GivesUp, 503, "cancelled")]
)
def test_a_backend_that_does_not_end_has_failed(kind: type[Breaks], status: int, code: str) -> None:
    last = f'{{"failed": "{code}"}}\n'.encode()
    with wired(create_app(BrokenBackend(list(SCRIPT), kind), [plain()])) as port:
        assert streamed(port) == (200, b'{"text": "Hello"}\n' + last, True)
        got = asked(port, request("POST", "/plain/ask", ASK))
        assert (got.status, got.json["code"]) == (status, code)
    with wired(create_app(BrokenBackend(SCRIPT[:1], kind), [plain()])) as port:
        assert streamed(port)[0] == status


def test_a_dialect_that_breaks_never_looks_like_an_end() -> None:
    class Broken(PlainExchange):
        def push(self, event: Event) -> Iterator[bytes]:
            if isinstance(event, Finished):
                raise RuntimeError("broken")
            return super().push(event)

    def opening(ask: Ask, context: Context) -> Exchange | Json:
        if ask.text == "Hi":
            return Broken(ask)
        raise RuntimeError("secret")

    with wired(create_app(ScriptedBackend(SCRIPT), [plain(opening)])) as port:
        assert streamed(port) == (200, b'{"text": "Hello"}\n', False)
        got = asked(port, request("POST", "/plain/ask", b'{"text": ""}'))
        assert (got.status, got.json) == (
            500,
            {"wrong": "internal error: RuntimeError", "code": "inference_error"},
        )
        assert asked(port, request("GET", "/health")).status == 200


def test_http_1_0_gets_a_stream_that_ends_with_the_connection(port: int) -> None:
    with Raw(port) as raw:
        raw.send(b"POST /plain/ask HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(STREAM) + STREAM)
        assert "transfer-encoding" not in raw.head().headers
        assert raw._file.read() == b'{"text": "Hello"}\n{"done": "stop"}\n'


def test_events_of_which_nothing_is_told_are_silence() -> None:
    started: list[Event | float] = [Started(3, 0), 0.01] * 60
    with wired(
        create_app(ScriptedBackend([*started, SCRIPT[-1]]), [plain()], keepalive=0.1)
    ) as port:
        assert streamed(port)[1].startswith(b"\n\n")


def test_silence_is_filled() -> None:
    script = [Started(3, 0), 0.2, TextDelta("So"), Finished("stop", Usage())]
    with wired(create_app(ScriptedBackend(script), [plain()], keepalive=0.02)) as port:
        status, body, ended = streamed(port)
    assert (status, ended, body.strip(b"\n")) == (200, True, b'{"text": "So"}\n{"done": "stop"}')
    assert body.startswith(b"\n")


def test_silence_lasts_ten_seconds_as_the_page_says() -> None:
    app = create_app(ScriptedBackend(SCRIPT), [plain()])
    assert isinstance(app.router.default, Served)
    assert app.router.default._keepalive == KEEPALIVE_SECONDS == 10.0
    assert "After ten seconds without a word the server sends" in (DOCS / "api.md").read_text()
    assert "kept alive with a comment every ten seconds" in (DOCS / "clients.md").read_text()
