"""Hours of clients in little: a real server under every kind of load is afterwards what it was before, and was right all
the while."""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serve.soak.clients import World, play, warm
from serve.soak.line import Line, request
from serve.soak.process import Process, serving, wait
from serve.soak.questions import long

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="/proc is read")

FLAGS = ("--threads", "2", "--parallel", "2", "--max-context", "2048")
PASSING = (
    "Job", "Ticket", "Generation", "Reader", "Heard", "Attended", "Answer", "Sequence", "Bound",
)  # fmt: skip
ALLOWED_MIB = 8.0  # of growth, which caches of the allocator may take


@contextmanager
def sampled(process: Process, seconds: float) -> Iterator[list[float]]:
    """MiB of memory, every so often, while the block runs."""
    series, ended = [process.resident], threading.Event()

    def sample() -> None:
        while not ended.wait(seconds):
            series.append(process.resident)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield series
    finally:
        ended.set()
        thread.join()


async def _asked(port: int, data: bytes) -> bytes:
    line = await Line.to(port)
    await line.send(data)
    status, body = await line.answer()
    await line.leave()
    assert status == 200
    return body


def asked(port: int, data: bytes) -> bytes:
    """The answer to one request."""
    return asyncio.run(_asked(port, data))


def settled(process: Process, port: int) -> None:
    """Once nothing is in hand."""

    def idle() -> bool:
        status = json.loads(asked(port, request("GET", "/headrace/status")))
        gauges = asked(port, request("GET", "/metrics")).decode().splitlines()
        return status["active_requests"] == 0 and {
            "headrace_generations_running 0.0",
            "headrace_generations_waiting 0.0",
        } <= set(gauges)

    wait(idle, "an idle server")
    wait(
        lambda: not any(process.told()["objects"].get(kind) for kind in PASSING),
        "the last of what ran",
    )


def growth(series: list[float]) -> float:
    """MiB between a third of the way and the end: medians of some samples at each."""
    some = max(1, len(series) // 10)
    third = len(series) // 3
    return statistics.median(series[-some:]) - statistics.median(series[third : third + some])


def phases(lines: list[dict[str, Any]]) -> Counter[str]:
    """Where the clients that left were, by the log."""
    left = [line for line in lines if line.get("error") == "client_gone"]
    return Counter(
        "decode"
        if "decode" in line
        else "prefill"
        if "prefill" in line
        else "queue"
        if "queued" in line
        else "body"
        for line in left
    )


def standing(told: dict[str, Any]) -> list[str]:
    """Threads of Python; those that asyncio lends to large bodies come when they are needed, up to a bound."""
    return [name for name in told["threads"] if not name.startswith("asyncio_")]


def soak(folder: Path, model: Path, seed: int, *, clients: int, seconds: float, most: int) -> World:
    """Load of so long, and then everything that has to be so."""
    with serving(folder, model, *FLAGS) as process:
        port = process.ready()
        world = World(port, model.name, hours=seconds > 60)
        body = {"model": model.name, "messages": [{"role": "user", "content": long(0).text}]}
        told = asked(port, request("POST", "/v1/messages/count_tokens", body))
        assert json.loads(told)["input_tokens"] >= 1000
        asyncio.run(warm(world))
        settled(process, port)
        before, files, threads = process.told(), process.num_files, process.num_threads
        with sampled(process, seconds / 60) as series:
            asyncio.run(play(world, seed, clients=clients, seconds=seconds, most=most))
        settled(process, port)
        wait(lambda: process.num_files <= files, "the end of all connections")
        after = process.told()
        shown(world, process, series, before, after)
        assert standing(after) == standing(before)
        assert process.num_threads - len(after["threads"]) <= threads - len(before["threads"])
        assert (before["pages"]["lent"], after["pages"]["lent"]) == (0, 0)
        assert after["pages"]["used"] == after["pages"]["kept"]
        assert {kind: after["objects"].get(kind, 0) for kind in PASSING} == dict.fromkeys(
            PASSING, 0
        )
        assert growth(series) <= ALLOWED_MIB
        lines = process.lines
        assert [line for line in lines if line["level"] != "info"] == []
        assert [line for line in lines if line.get("status", 0) >= 500] == []
        began = time.monotonic()
        assert process.stopped() == 0
        print(f"stopped in {time.monotonic() - began:.1f} s")
        assert process.lines[-1]["message"] == "stopped by SIGTERM"
    return world


def shown(world: World, process: Process, series: list[float], before: Any, after: Any) -> None:
    """What was measured, for who runs it by hand."""
    lines = [line for line in process.lines if line["message"] == "request"]
    print()
    for name, count in sorted(world.done.items()):
        print(f"{count:6} {name}")
    print("requests in the log", len(lines), "left in", dict(phases(lines)))
    print("by status", dict(Counter(line.get("status") for line in lines)))
    print("errors", dict(Counter(line["error"] for line in lines if "error" in line)))
    print("tokens of complete answers", world.tokens)
    print(
        "tokens by the log",
        sum(line.get("new_tokens", 0) for line in lines),
        "prompt",
        sum(line.get("prompt_tokens", 0) for line in lines),
    )
    print("RSS MiB", " ".join(f"{mib:.0f}" for mib in series), f"growth {growth(series):.1f}")
    print("files", process.num_files, "threads", process.num_threads, after["threads"])
    print("pages", before["pages"], after["pages"])
    kinds = set(before["objects"]) | set(after["objects"])
    moved = {k: (before["objects"].get(k, 0), after["objects"].get(k, 0)) for k in sorted(kinds)}
    print("objects", {k: v for k, v in moved.items() if v[0] != v[1]})


def test_a_server_is_afterwards_what_it_was(default_model: Path, tmp_path: Path) -> None:
    world = soak(tmp_path, default_model, 1, clients=3, seconds=4, most=100)
    assert world.done["answer to sky"] > 0


@pytest.mark.slow
def test_a_server_stays_what_it_was_for_ten_minutes(default_model: Path, tmp_path: Path) -> None:
    world = soak(tmp_path, default_model, 2, clients=4, seconds=600, most=5000)
    assert all(
        world.done[name] for name in ("crowd", "stalled", "gone in prefill", "answer to long")
    )
