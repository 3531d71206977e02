"""While a server stops only its status answers; in the shape of the path's own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from headrace.serve.app import create_app
from headrace.serve.backend import Progress
from headrace.serve.dialect import Memory
from headrace.serve.events import Event, Failed, Finished, Started, TextDelta, Usage
from headrace.serve.process.attendant import STOPPING, Attendant
from headrace.serve.request import Request
from headrace.serve.telemetry.status import Facts
from serve.http.plain import plain
from serve.scripted import ScriptedBackend
from serve.served import served

FACTS = Facts("1.2.3", 42, 11434, "painted:1m", 8192, 1_700_000_000, 0.5)
QUICK: list[Event | float] = [
    Started(10, 4),
    TextDelta("answer"),
    Finished("stop", Usage(10, 4, 1)),
]
REQUEST = Request("painted:1m")
REFUSED = {"wrong": "the server is stopping", "code": "server_stopping"}


@dataclass
class Site:
    """A served application, its attendant, and its clock."""

    now: list[float] = field(default_factory=lambda: [100.0])
    memory: Memory = Memory("--memory-gb", 12.0)

    def __post_init__(self) -> None:
        self.attendant = Attendant(
            FACTS,
            counts=lambda: (0, 0),
            cache_bytes={},
            memory=lambda: self.memory,
            clock=lambda: self.now[0],
        )
        self.backend = ScriptedBackend(QUICK)
        self.app = create_app(self.backend, [plain()], observer=self.attendant)


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def ask(site: Site) -> Iterator[Callable[..., httpx.Response]]:
    with served(site.app) as url, httpx.Client(base_url=url) as client:
        yield client.request


def test_only_the_status_answers(site: Site, ask: Callable[..., httpx.Response]) -> None:
    assert ask("POST", "/plain/ask", json={"text": "x"}).json() == {"text": "answer"}
    site.attendant.stop()
    for method, path in [
        ("POST", "/plain/ask"),
        ("GET", "/plain/model"),
        ("DELETE", "/plain/things/1"),
    ]:
        told = ask(method, path, json={"text": "x"} if method == "POST" else None)
        assert (told.status_code, told.json(), told.headers["retry-after"]) == (503, REFUSED, "1")
    for method, path in [
        ("GET", "/metrics"),
        ("GET", "/health"),
        ("POST", "/headrace/clients"),
        ("GET", "/nowhere"),
    ]:
        told = ask(method, path)
        assert (told.status_code, told.json()["error"]["message"]) == (
            503,
            "the server is stopping",
        )
    for path in ("/headrace/status", "/headrace/status/", "/headrace/status?x=1"):
        assert ask("GET", path).json()["stopping"] is True
    assert len(site.backend.requests) == 1


def test_the_status_in_whole_numbers(site: Site, ask: Callable[..., httpx.Response]) -> None:
    site.now[0] = 112.75
    assert ask("GET", "/headrace/status").text == (
        '{"server":"headrace","version":"1.2.3","pid":42,"port":11434,"model":"painted:1m","context_window":8192,'
        '"started_at":1700000000,"idle_exit_minutes":0.5,"active_requests":0,"clients":0,"idle_seconds":12,'
        '"stopping":false,"memory_source":"--memory-gb","memory_target_gb":12,"memory_limit_gb":null}'
    )
    site.memory = Memory("auto", 9.5, 12.0)  # others needed some
    told = ask("GET", "/headrace/status").json()
    assert (told["memory_source"], told["memory_target_gb"]) == ("auto", 9.5)
    assert told["memory_limit_gb"] == 12


def test_looking_is_no_use(site: Site, ask: Callable[..., httpx.Response]) -> None:
    site.now[0] = 129.0
    for path in ("/headrace/status", "/metrics", "/health"):
        assert ask("GET", path).status_code == 200
    assert not site.attendant.due()
    site.now[0] = 130.0
    assert site.attendant.due()


@pytest.mark.parametrize(("method", "path"), [("POST", "/plain/ask"), ("GET", "/plain/model"), ("GET", "/nowhere"), ("POST", "/headrace/clients")])  # fmt: skip
def test_any_other_request_is(
    site: Site, ask: Callable[..., httpx.Response], method: str, path: str
) -> None:
    site.now[0] = 129.0
    ask(method, path, json={} if method == "POST" else None)
    while ask("GET", "/headrace/status").json()["active_requests"]:
        pass  # it ends a moment after its answer
    site.now[0] = 158.0
    assert not site.attendant.due()
    site.now[0] = 159.0
    assert site.attendant.due()


def test_a_foreign_host_learns_nothing(
    site: Site, ask: Callable[..., httpx.Response], caplog: pytest.LogCaptureFixture
) -> None:
    """And is logged, also where looking is not."""
    caplog.set_level("INFO", "headrace.serve.process")
    paths = ("/headrace/status", "/metrics", "/headrace/clients", "/health")
    ids = []
    for path in paths:
        told = ask("GET", path, headers={"host": "evil.example"})
        assert told.status_code == 403
        ids.append(told.headers["x-request-id"])
        assert ask("GET", "/health").status_code == 200
    while len(caplog.records) < len(paths):
        pass  # a line comes a moment after its answer
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(line["id"], line["status"]) for line in lines] == [(one, 403) for one in ids]


def test_a_generation_that_begins_as_the_server_stops_fails(site: Site) -> None:
    """It was admitted, and its body came later."""
    with site.attendant.request("/plain/ask", "ab") as watch:
        watch.admit()
        site.attendant.stop()
        running = watch.heard(site.backend.submit(REQUEST, request_id="a", arrived=0.0), REQUEST)
        assert asyncio.run(running.next()) == Failed(STOPPING)


def test_what_takes_long_is_told_while_it_lasts(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing for ten seconds; then where it is, every ten, and how long its prompt will take at the rate of late."""

    def beaten(now: float) -> list[dict[str, object]]:
        site.now[0] = now
        caplog.clear()
        site.attendant.beat()
        return [record.fields for record in caplog.records]  # type: ignore[attr-defined]

    caplog.set_level("INFO", "headrace")
    with site.attendant.request("/plain/ask", "ab") as watch:
        running = site.backend.submit(REQUEST, request_id="a", arrived=0.0)
        running.script = [Started(10_000, 2_000, 500), TextDelta("x"), 1.0]
        heard = watch.heard(running, REQUEST)
        assert beaten(109.9) == []
        assert beaten(110.0) == [{"id": "ab", "seconds": 10.0, "phase": "queued"}]
        asyncio.run(heard.next())
        assert beaten(119.9) == []
        running.progress = Progress(4_000)
        prefill = {"id": "ab", "phase": "prefill", "prompt_tokens": 10_000}
        assert beaten(120.0) == [{**prefill, "seconds": 20.0, "read_tokens": 4_000, "left": 30.0}]
        running.progress = Progress(5_000)  # it has become slower
        assert beaten(130.0) == [{**prefill, "seconds": 30.0, "read_tokens": 5_000, "left": 50.0}]
        assert beaten(140.0) == [{**prefill, "seconds": 40.0, "read_tokens": 5_000}]
        asyncio.run(heard.next())
        running.progress = Progress(10_000, 7)
        decode = {"id": "ab", "phase": "decode", "prompt_tokens": 10_000, "new_tokens": 7}
        assert beaten(150.0) == [{**decode, "seconds": 50.0}]
        site.now[0] = 151.0
        caplog.clear()
    (line,) = caplog.records  # its one line, with what there was of it
    told = line.fields  # type: ignore[attr-defined]
    assert (told["new_tokens"], told["cached_tokens"], told["disk_tokens"]) == (7, 2_000, 500)
    assert told["error"] == "client_gone"
    assert 'headrace_generated_tokens_total{dialect="server"} 7.0' in site.attendant._metrics.text()
    assert beaten(200.0) == []


def test_a_request_that_runs_keeps_the_server(site: Site) -> None:
    with site.attendant.request("/plain/ask", "ab"):
        site.now[0] = 10_000.0
        assert not site.attendant.due()
    assert not site.attendant.due()
    site.now[0] = 10_030.0
    assert site.attendant.due()
