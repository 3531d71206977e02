"""What goes wrong ends its own request, with its code, before and after the headers; and the next request works."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.artifact.container import Artifact
from headrace.errors import ExpertReadError
from headrace.llm import LLM
from headrace.memory.inputs import PlanOptions
from headrace.serve.events import Event, Failed, Failure, Finished
from headrace.serve.model import backend as model_module
from headrace.serve.model.backend import ModelBackend
from headrace.serve.request import Request, Sampling, Text, ToolCall, Turn
from serve.model.asking import (
    ASKS,
    GATEWAY,
    NAME,
    Asked,
    Json,
    Server,
    gateway_headers,
    serving,
    user,
)
from serve.model.test_beside import body, idle, open_request, until

EVERY = pytest.mark.parametrize("dialect", ASKS)
STREAM = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def post(server: Server, text: str = "x", **more: Any) -> tuple[int, str]:
    answer = server.http.post("/v1/chat/completions", json=body(text, max_tokens=8, **more))
    return answer.status_code, answer.text


class Breaking:
    """Passes over some work fail with an error."""

    def __init__(self, llm: LLM, error: BaseException) -> None:
        self._forward = llm.engine.forward
        self._error = error
        self._llm = llm
        self.when: Callable[[Any], bool] = lambda work: True

    def __enter__(self) -> Breaking:
        def forward(works: Any, *arguments: Any, **options: Any) -> Any:
            if any(self.when(work) for work in works):
                raise self._error
            return self._forward(works, *arguments, **options)

        self._llm.engine.forward = forward  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._llm.engine.forward  # type: ignore[attr-defined]


FAULTS = {
    "expert": (ExpertReadError(3, 7, "short read"), 500, "expert_read_failed", "layer 3, expert 7: short read"),
    "foreign": (RuntimeError("a secret"), 500, "inference_error", "internal error: RuntimeError"),
    "memory": (MemoryError("a secret"), 503, "insufficient_memory", "there is not enough memory for this request"),
}  # fmt: skip


@EVERY
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_before_the_headers(
    wild: LLM, wild_server: Server, dialect: str, fault: str
) -> None:
    error, status, code, said = FAULTS[fault]
    with Breaking(wild, error), pytest.raises(Exception, match="(?s).*") as found:
        ASKS[dialect](wild_server, Asked(user("x"), 8), stream=False)
    assert found.value.status_code == status  # type: ignore[attr-defined]
    assert said in str(found.value)
    assert "secret" not in str(found.value)
    if dialect in ("chat", "responses", "gateway"):
        assert code in str(getattr(found.value, "body", ""))
    idle(wild_server)
    assert ASKS[dialect](wild_server, Asked(user("x"), 8), stream=False).new == 8


PROMPT = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
PATHS: dict[str, tuple[str, Json, str]] = {
    "chat": ("/v1/chat/completions", {"messages": user("x"), "max_tokens": 90}, "[DONE]"),
    "responses": ("/v1/responses", {"input": "x", "max_output_tokens": 90}, "response.completed"),
    "messages": ("/v1/messages", {"messages": user("x"), "max_tokens": 90}, "message_stop"),
    "ollama": ("/api/chat", {"messages": user("x")}, '"done":true'),
    "gateway": (GATEWAY, {"prompt": PROMPT, "maxOutputTokens": 90}, '"type":"finish"'),
}


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_after_the_headers(
    wild: LLM, wild_server: Server, dialect: str, fault: str
) -> None:
    """The last frame is the error; no sign of success follows."""
    path, value, success = PATHS[dialect]
    error, _, _, said = FAULTS[fault]
    with Breaking(wild, error) as breaking:
        breaking.when = lambda work: len(work.sequence) > 60
        if dialect == "gateway":
            headers = gateway_headers(NAME, stream=True)
        else:
            headers, value = {}, {"model": NAME, "stream": True, **value}
        answer = wild_server.http.post(path, json=value, headers=headers)
    assert answer.status_code == 200
    assert said in answer.text.strip().splitlines()[-1]
    assert success not in answer.text
    assert "secret" not in answer.text
    idle(wild_server)
    assert post(wild_server)[0] == 200


def test_a_fault_of_one_leaves_those_who_wait_alone(wild: LLM, wild_server: Server) -> None:
    """What the house knows of is whose it is, though others share the pass."""
    asked = Asked(user("fine"), 60, 1.0, 5)
    alone = ASKS["chat"](wild_server, asked, stream=True).text
    with Breaking(wild, ExpertReadError(0, 0)) as breaking:
        (z,) = wild.tokenize("z")
        breaking.when = lambda work: work.tokens.count(z) > 8
        found: list[Any] = []
        bad = threading.Thread(target=lambda: found.append(post(wild_server, "z" * 90)))
        bad.start()
        assert ASKS["chat"](wild_server, asked, stream=True).text == alone
        bad.join()
    assert found[0][0] == 500
    assert "expert_read_failed" in found[0][1]


def test_a_foreign_fault_of_one_is_its_own(wild: LLM, wild_server: Server) -> None:
    """Where it shows in one generation's own work, the others of the pass go on."""
    asked = Asked(user("fine"), 200, 1.0, 5)
    alone = ASKS["chat"](wild_server, asked, stream=True).text
    with open_request(wild_server, body("other", stream=True)) as other:
        until(lambda: wild_server.backend.counts == (1, 0), "nothing runs")
        (job,) = wild_server.backend._worker._jobs
        found: list[str] = []
        fine = threading.Thread(
            target=lambda: found.append(ASKS["chat"](wild_server, asked, stream=True).text)
        )
        fine.start()
        until(lambda: wild_server.backend.counts == (2, 0), "the other does not run")

        def breaks(*_: Any) -> int:
            raise RuntimeError("a secret")

        assert job.ticket is not None
        job.ticket.generation._sampler.pick = breaks  # type: ignore[method-assign]
        got = b""
        while data := other.recv(1 << 16):
            got += data
            if b"internal error: RuntimeError" in got:
                break
        assert b"internal error: RuntimeError" in got
        fine.join()
    assert found == [alone]


class Dead:
    """A grammar of three tokens, after which nothing can follow."""

    ended = can_end = False

    def __init__(self) -> None:
        self._left = 3

    def mask(self) -> np.ndarray:
        return np.full(9, 0xFFFFFFFF if self._left else 0, np.uint32)

    def forced(self) -> list[int]:
        return []

    def advance(self, token: int) -> None:
        self._left -= 1


class DeadGrammar:
    def start(self) -> Dead:
        return Dead()


@STREAM
def test_a_dead_end_of_a_grammar(
    wild_server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(model_module, "answer_grammar", lambda *_, **__: DeadGrammar())
    status, text = post(wild_server, stream=stream)
    assert status == (200 if stream else 422)
    assert "constraint_failed" in text
    assert "[DONE]" not in text
    monkeypatch.undo()
    assert post(wild_server, stream=stream)[0] == 200


def test_an_expert_that_cannot_be_read(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path
) -> None:
    """With a real file that lost its end: the request fails, and once it is whole again the next one does not."""
    artifact = shutil.copytree(tiny_artifact("mixtral").path, tmp_path / "mixtral")
    few = PlanOptions(experts_per_layer=2, max_context=256)
    with LLM(artifact, threads=1, memory=few) as llm, serving(llm) as server:
        stream = llm.engine.experts
        assert stream is not None
        with emptied(stream.store._files, tmp_path / "empty"):
            status, text = post(server)
        assert status == 500
        assert "expert_read_failed" in text
        assert post(server)[0] == 200


@contextmanager
def emptied(files: Any, empty: Path) -> Iterator[None]:
    """Every file of experts leads to one without bytes."""
    empty.touch()
    kept = [(file.fd, os.dup(file.fd)) for file in files.values()]
    other = os.open(empty, os.O_RDONLY)
    for fd, _ in kept:
        os.dup2(other, fd)
    try:
        yield
    finally:
        for fd, copy in kept:
            os.dup2(copy, fd)
            os.close(copy)
        os.close(other)


# The thread that moves everything on.


@contextmanager
def backend(llm: LLM, **options: Any) -> Iterator[ModelBackend]:
    made = ModelBackend(llm, NAME, version="0.0.1", **options)
    try:
        yield made
    finally:
        made.close()


def request(text: str = "x", limit: int = 8) -> Request:
    turn = Turn("user", (Text(text),))
    return Request(NAME, (turn,), sampling=Sampling(temperature=0.0), limit=limit)


async def heard(backend: ModelBackend, asked: Request) -> list[Event]:
    job = backend.submit(asked, request_id="a" * 32, arrived=time.monotonic())
    out: list[Event] = []
    while (event := await job.next()) is not None:
        out.append(event)
    return out


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), MemoryError()], ids=repr)
@pytest.mark.parametrize("where", ["_take", "_advance", "_step"])
def test_a_bug_ends_who_was_there_and_the_thread_lives(
    wild: LLM, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    with backend(wild) as made:

        def breaks(*_: object) -> None:
            raise error

        monkeypatch.setattr(made._worker, where, breaks)
        (failed,) = asyncio.run(heard(made, request()))
        assert isinstance(failed, Failed)
        told = (failed.failure.status, failed.failure.code)
        if isinstance(error, MemoryError):
            assert told == (503, "insufficient_memory")
        else:
            assert told == (500, "inference_error")
            assert failed.failure.message == f"internal error: {type(error).__name__}"
        monkeypatch.undo()
        assert made.counts == (0, 0)
        assert isinstance(asyncio.run(heard(made, request()))[-1], Finished)


def test_a_fault_before_anything_runs_is_no_endless_loop(
    wild: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has begun, so it is everybody's."""
    with backend(wild) as made:

        def breaks() -> None:
            raise RuntimeError

        monkeypatch.setattr(wild.turns._scheduler, "_admit", breaks)
        (failed,) = asyncio.run(heard(made, request()))
        assert isinstance(failed, Failed)
        monkeypatch.undo()
        assert isinstance(asyncio.run(heard(made, request()))[-1], Finished)


def test_a_fault_while_a_request_is_prepared(
    wild: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client hears the name of it, the log has the rest."""
    with backend(wild) as made:

        def breaks(*_: object, **__: object) -> None:
            raise RuntimeError("a secret")

        monkeypatch.setattr(wild, "chat_ids", breaks)
        (failed,) = asyncio.run(heard(made, request()))
        assert failed == Failed(Failure(500, "inference_error", "internal error: RuntimeError"))
        monkeypatch.undo()
        assert "a secret" in caplog.text
        assert isinstance(asyncio.run(heard(made, request()))[-1], Finished)


def test_a_loop_that_is_gone_is_nobody(endless_artifact: Artifact) -> None:
    """Its generation ends, and nothing is raised in the worker."""
    with LLM(endless_artifact.path, threads=1, max_context=4096) as llm, backend(llm) as made:

        async def leave() -> None:
            made.submit(request(limit=4000), request_id="a" * 32, arrived=time.monotonic())
            while made.counts != (1, 0):
                await asyncio.sleep(0.001)

        asyncio.run(leave())
        until(lambda: made.counts == (0, 0), "it runs on")
        assert isinstance(asyncio.run(heard(made, request()))[-1], Finished)


# The end.


def test_close_ends_everything_and_says_so(endless_artifact: Artifact) -> None:
    """What runs, what waits, what is prepared, and what comes after it."""
    with LLM(endless_artifact.path, threads=1, max_context=60_000, parallel=1) as llm:
        made = ModelBackend(llm, NAME, version="0.0.1")

        async def all_of_them() -> list[list[Event]]:
            asked = [heard(made, request(str(i), 50_000)) for i in range(12)]
            tasks = [asyncio.ensure_future(one) for one in asked]
            while made.counts[0] < 1:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(made.close)
            tasks.append(asyncio.ensure_future(heard(made, request())))
            return await asyncio.wait_for(asyncio.gather(*tasks), 60)

        for events in asyncio.run(all_of_them()):
            assert events[-1] == Failed(Failure(503, "server_stopping", "the server is stopping"))
        assert made.counts == (0, 0)
        with pytest.raises(Exception, match="the server is stopping"):
            asyncio.run(made.count(request()))
        made.close()
        assert not made._worker._thread.is_alive()
        assert llm.generate("x", max_tokens=3).stats.new_tokens == 3  # the model is still open


def test_close_while_a_grammar_compiles(wild: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for, and what it was for is told the end."""
    made = ModelBackend(wild, NAME, version="0.0.1")
    begun, go_on = threading.Event(), threading.Event()

    def waits(*_: object, **__: object) -> None:
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(model_module, "answer_grammar", waits)

    async def close() -> list[list[Event]]:
        tasks = [asyncio.ensure_future(heard(made, request(str(i)))) for i in range(5)]
        await asyncio.to_thread(begun.wait)
        assert made.counts == (0, 5)
        closing = asyncio.ensure_future(asyncio.to_thread(made.close))
        while not made._closed:
            await asyncio.sleep(0.001)
        go_on.set()
        await closing
        return await asyncio.gather(*tasks)

    for events in asyncio.run(close()):
        assert events == [Failed(Failure(503, "server_stopping", "the server is stopping"))]


def test_who_left_before_it_was_prepared_is_not_prepared(
    wild: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with backend(wild) as made:
        seen: list[str] = []
        whole = wild.chat_ids

        def slow(turns: Any, **options: Any) -> list[int]:
            seen.append(turns[0]["content"])
            time.sleep(0.1)
            return whole(turns, **options)

        monkeypatch.setattr(wild, "chat_ids", slow)

        async def ask() -> None:
            jobs = [
                made.submit(request(str(i)), request_id="a" * 32, arrived=time.monotonic())
                for i in range(10)
            ]
            for job in jobs:
                job.cancel()
                job.cancel()
                assert await job.next() is None
            assert made.counts == (0, 0)

        asyncio.run(ask())
        until(lambda: not made._preparing, "they are still there")
        assert len(seen) <= model_module.PREPARERS


def test_the_model_is_closed_under_it(endless_artifact: Artifact) -> None:
    """Against what is said, but nobody waits for ever."""
    llm = LLM(endless_artifact.path, threads=1, max_context=60_000, parallel=1)
    with backend(llm) as made:

        async def ask() -> list[Event]:
            task = asyncio.ensure_future(heard(made, request(limit=50_000)))
            while made.counts[0] < 1:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(llm.close)
            return await asyncio.wait_for(task, 60)

        assert isinstance(asyncio.run(ask())[-1], Failed)


# Requests that cannot be.


def test_arguments_that_are_no_object_are_refused(wild: LLM) -> None:
    call = ToolCall("c1", "f", "[1]")
    turns = (
        Turn("user", (Text("x"),)),
        Turn("assistant", calls=(call,)),
        Turn("tool", (Text("y"),), call_id="c1"),
    )
    with backend(wild) as made:
        (failed,) = asyncio.run(heard(made, Request(NAME, turns)))
    assert isinstance(failed, Failed)
    assert (failed.failure.status, failed.failure.code) == (400, "invalid_request")
    assert "'c1'" in failed.failure.message


def test_names_that_are_not_served(wild: LLM) -> None:
    with backend(wild) as made:
        for name in ("other", f"{NAME}+other", f"{NAME}+", ""):
            (failed,) = asyncio.run(heard(made, Request(name, request().turns)))
            assert isinstance(failed, Failed)
            assert (failed.failure.status, failed.failure.code) == (400, "model_not_found")
