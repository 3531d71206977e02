"""The first token in time, or a clear error: by estimate, in line, in prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.artifact.container import Artifact
from headrace.llm import LLM
from headrace.serve.events import Event, Failed
from headrace.serve.failure import RequestError
from headrace.serve.model.admission import Room, check_wait, room, too_late
from headrace.serve.model.backend import ModelBackend
from headrace.serve.model.pace import Pace
from headrace.serve.request import Request, Text, Turn
from serve.model.asking import NAME, Asked, Server, messages, serving, user
from serve.model.test_beside import body, idle, open_request, until

LONG = "".join(f"{i} " for i in range(8_000))  # a prompt that takes many passes


@contextmanager
def limited(artifact: Artifact, seconds: float) -> Iterator[tuple[Server, LLM]]:
    with (
        LLM(artifact.path, threads=1, max_context=60_000, parallel=1) as model,
        serving(model, max_prefill_wait=seconds) as server,
    ):
        yield server, model


def error_of(server: Server, text: str, **more: Any) -> tuple[int, str]:
    answer = server.http.post("/v1/chat/completions", json=body(text, **more))
    return answer.status_code, answer.json()["error"]["code"]


def test_the_time_runs_out_in_prefill(endless_artifact: Artifact) -> None:
    with limited(endless_artifact, 0.2) as (server, model):
        assert error_of(server, LONG) == (503, "prefill_deadline_exceeded")
        idle(server)
        assert model.engine.stats.new_tokens == 0
        told = messages(server, Asked(user("hello"), 5), stream=True)  # and the next one works
        assert told.new == 5


def test_the_time_runs_out_in_prefill_of_a_stream(endless_artifact: Artifact) -> None:
    """Its headers went out with the prefill: the failure is a frame, and nothing follows."""
    with limited(endless_artifact, 0.2) as (server, _):
        answer = server.http.post("/v1/chat/completions", json=body(LONG, stream=True))
        assert answer.status_code == 200
        last = answer.text.strip().split("\n\n")[-1]
        assert '"code":"prefill_deadline_exceeded"' in last
        assert "[DONE]" not in answer.text
        idle(server)


def test_keepalives_buy_no_time(
    endless_artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is counted from the arrival, however often a stream was kept alive since."""
    monkeypatch.setattr("headrace.serve.app.KEEPALIVE_SECONDS", 0.02)
    with limited(endless_artifact, 0.5) as (server, model):
        answer = server.http.post("/v1/chat/completions", json=body(LONG, stream=True))
        *before, last = answer.text.strip().split("\n\n")
        assert before.count(": keepalive") >= 2
        assert '"code":"prefill_deadline_exceeded"' in last
        idle(server)
        assert model.engine.stats.new_tokens == 0


def test_the_time_runs_out_in_line(endless_artifact: Artifact) -> None:
    with (
        limited(endless_artifact, 0.3) as (server, _),
        open_request(server, body("a", stream=True)) as first,
    ):
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: server.backend.counts == (1, 0), "nothing runs")
        for stream in (True, False):  # nothing was sent yet, so both have the status
            told = error_of(server, "b", stream=stream)
            assert told == (503, "prefill_deadline_exceeded")
        assert server.backend.counts == (1, 0)  # who has its first token goes on


def test_by_estimate(endless_artifact: Artifact) -> None:
    """Once it is known how fast prompts are read, what surely takes too long is refused at once."""
    with limited(endless_artifact, 30.0) as (server, model):
        assert messages(server, Asked(user("x" * 300), 2), stream=False).new == 2
        worker = server.backend._worker
        assert worker.pace.seconds(0, 1) is not None
        worker.pace = Pace(1 / 100)  # a slower machine
        for stream in (True, False):
            assert error_of(server, LONG, stream=stream) == (400, "prefill_wait_exceeded")
        idle(server)
        assert model.engine.stats.unread_tokens > 20_000
        assert messages(server, Asked(user("hello"), 2), stream=False).new == 2


def test_an_estimate_counts_what_is_missing(endless_artifact: Artifact) -> None:
    with limited(endless_artifact, 30.0) as (server, _):
        text = LONG[:6000]
        assert messages(server, Asked(user(text), 2), stream=False).new == 2
        server.backend._worker.pace = Pace(1 / 100)
        again = messages(server, Asked(user(text), 2), stream=False)
        assert again.cached > 5_000


def test_without_a_limit_nothing_is_too_late(wild_server: Server) -> None:
    wild_server.backend._worker.pace = Pace(1000.0)
    assert messages(wild_server, Asked(user("x" * 300), 2), stream=False).new == 2
    wild_server.backend._worker.pace = Pace()


def test_the_card_says_the_limit(wild: LLM) -> None:
    backend = ModelBackend(wild, NAME, version="0.0.1", max_prefill_wait=7.5)
    try:
        assert backend.card.context_policy["max_prefill_wait_seconds"] == 7.5
    finally:
        backend.close()


def test_the_time_runs_out_while_a_request_is_prepared(wild: LLM) -> None:
    """Nobody could prepare it in time: what its client is told is the same."""
    backend = ModelBackend(wild, NAME, version="0.0.1", max_prefill_wait=0.0)

    async def ask() -> list[Event]:
        job = backend.submit(
            Request(NAME, (Turn("user", (Text("x"),)),)), request_id="a" * 32, arrived=0.0
        )
        return [event async for event in heard(job)]

    try:
        last = asyncio.run(ask())[-1]
    finally:
        backend.close()
    assert isinstance(last, Failed)
    assert (last.failure.status, last.failure.code) == (503, "prefill_deadline_exceeded")


async def heard(job: Any) -> Any:
    while (event := await job.next()) is not None:
        yield event


@pytest.mark.parametrize(
    ("reading", "waited", "longest", "code"),
    [
        (10.0, 0.0, 10.0, None),
        (10.01, 0.0, 10.0, "prefill_wait_exceeded"),
        (10.01, 50.0, 10.0, "prefill_wait_exceeded"),  # it would not help to come again
        (9.0, 1.1, 10.0, "prefill_deadline_exceeded"),
        (9.0, 0.9, 10.0, None),
        (None, 0.0, 10.0, None),
        (1e7, 0.0, None, None),
    ],
)
def test_what_an_estimate_decides(
    reading: float | None, waited: float, longest: float | None, code: str | None
) -> None:
    if code is None:
        check_wait(1000, reading, waited, longest)
        return
    with pytest.raises(RequestError) as found:
        check_wait(1000, reading, waited, longest)
    assert found.value.cause == code
    assert found.value.status == (400 if code == "prefill_wait_exceeded" else 503)
    assert found.value.hint is not None
    assert "--max-prefill-wait" in found.value.hint


@pytest.mark.parametrize(
    ("prompt", "window", "limit", "default", "found"),
    [
        (10, 100, 20, 25, Room(20, False)),
        (10, 100, 90, 25, Room(90, False)),
        (10, 100, 91, 25, Room(90, True)),
        (10, 100, None, 25, Room(25, False)),
        (90, 100, None, 25, Room(10, True)),
        (99, 100, 1, 25, Room(1, False)),
    ],
)
def test_room(prompt: int, window: int, limit: int | None, default: int, found: Room) -> None:
    assert room(prompt, window, limit, default) == found


def test_a_pace_that_nobody_saw_is_unknown() -> None:
    pace = Pace()
    pace.learn(0, 63, 1.0)  # too few to say anything
    pace.learn(0, 100, 0.0)
    assert pace.seconds(0, 1000) is None


def test_missing_tokens_cost_by_where_they_are() -> None:
    """Attention reads all that is before a position: the same number of tokens takes longer behind more."""
    pace = Pace()

    def true(
        begin: int, end: int
    ) -> float:  # a millisecond a token, and one more every 4,000 positions
        return (end - begin) / 1000 + (end * end - begin * begin) / 2 / 4_000_000

    for _ in range(20):
        for begin, end in ((0, 500), (0, 8_000), (8_000, 9_000), (20_000, 24_000)):
            pace.learn(begin, end, true(begin, end))
    for begin, end in ((0, 1_000), (0, 16_000), (30_000, 31_000)):
        told = pace.seconds(begin, end)
        assert told is not None
        assert 0.95 < told / true(begin, end) < 1.05
    near, far = pace.seconds(0, 1_000), pace.seconds(30_000, 31_000)
    assert near is not None
    assert far is not None
    assert far > 5 * near


def test_noise_of_short_prompts_says_nothing_about_depth() -> None:
    """Two prompts of nearly one length, one of them on a busy machine, price a long one by their mean."""
    pace = Pace()
    pace.learn(0, 80, 0.08)
    pace.learn(0, 120, 0.24)
    told = pace.seconds(0, 8_000)
    assert told is not None
    assert 8.0 < told < 16.0
    cheap = Pace()
    cheap.learn(0, 80, 0.16)
    cheap.learn(0, 8_000, 8.0)  # nothing costs less where more is before it
    told = cheap.seconds(0, 100_000)
    assert told is not None
    assert 100.0 <= told <= 200.0


def test_short_times_are_told_as_such() -> None:
    assert "within 0.2 s" in str(too_late(0.2))
    assert "within 12 s" in str(too_late(12.3))
    with pytest.raises(RequestError, match=r"takes about 4\.0 s; at most 0\.5 s may pass"):
        check_wait(400, 4.0, 0.0, 0.5)
