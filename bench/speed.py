"""Prefill and decode of every system, and the machine's read bandwidth, in turns within one run.

One round asks every system for one sample of a workload before the next workload begins, so that what the
machine does meanwhile falls on all of them alike. The first round warms up and is dropped.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench import machine
from bench.process import Worker
from bench.rows import Row, Run, append
from bench.settings import Settings, command, own_python
from bench.systems import HEADRACE, System, headrace, llama_systems, transformers_systems

LARGE_BYTES = 1 << 30  # or more, so that it is larger than any cache
MEMORY = System("memory", "memory_reader", own_python())


@dataclass(frozen=True)
class Workload:
    """A request to every system, and how many tokens one sample counts."""

    name: str
    request: dict[str, Any]
    tokens: int


def workloads(steps: int) -> list[Workload]:
    decode = [
        Workload(f"decode at {at:,}", {"do": "decode", "context": at, "steps": steps}, steps)
        for at in (16, 1000)
    ]
    return [Workload("prefill 512", {"do": "prefill", "tokens": 512}, 512), *decode]


def measure(settings: Settings) -> list[Row]:
    """Record rows of kinds "speed" and "bandwidth"."""
    run = machine.new_run(command("speed", settings))
    systems = [headrace(settings), *llama_systems(settings), *transformers_systems(settings)]
    recorded: list[Row] = []
    for threads in settings.threads:
        with ExitStack() as stack:
            workers = {s: stack.enter_context(s.start(threads)) for s in [*systems, MEMORY]}
            rows = _Rounds(settings, threads, workers, run).rows()
        append(settings.results / "speed.jsonl", rows)
        recorded += rows
    return recorded


class _Rounds:
    """All samples for one number of threads."""

    def __init__(
        self, settings: Settings, threads: int, workers: dict[System, Worker], run: Run
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._workers = {s: w for s, w in workers.items() if s is not MEMORY}
        self._memory = workers[MEMORY]
        self._run = run
        self._samples: dict[tuple[str, str], list[float]] = defaultdict(list)

    def rows(self) -> list[Row]:
        for number in range(self._settings.rounds + 1):
            self._round(number)
            if number == 0:
                self._samples.clear()
            print(f"threads {self._threads}, round {number} of {self._settings.rounds}", flush=True)
        return [*self._speed_rows(), *self._bandwidth_rows()]

    def _round(self, number: int) -> None:
        taking_part = [
            (s, w) for s, w in self._workers.items() if number <= (s.max_rounds or number)
        ]
        prefill, *decode = workloads(self._settings.steps)
        # From the longest context down, so that no worker reads a context twice in a round.
        for workload in (prefill, *reversed(decode)):
            for system, worker in taking_part:
                seconds = self._ask(worker, **workload.request)
                self._samples[system.name, workload.name].append(workload.tokens / seconds)
        for name, nbytes in self._buffers().items():
            gigabytes = nbytes / 1e9
            self._samples[MEMORY.name, name].append(
                gigabytes / self._ask(self._memory, do="read", nbytes=nbytes)
            )

    def _ask(self, worker: Worker, **request: Any) -> float:
        time.sleep(self._settings.pause)
        return float(worker.ask(**request)["seconds"])

    def _buffers(self) -> dict[str, int]:
        """One of the size of the weights that a token touches, one larger than any cache."""
        facts = next(w.facts for s, w in self._workers.items() if s.name == HEADRACE)
        large = max(LARGE_BYTES, 4 * machine.l3_bytes())
        return {"weights": facts["settings"]["weight_bytes"], "memory": large}

    def _speed_rows(self) -> Iterator[Row]:
        for system, worker in self._workers.items():
            for workload in workloads(self._settings.steps):
                yield Row(
                    kind="speed",
                    measure=workload.name,
                    system=system.name,
                    threads=self._threads,
                    unit="tok/s",
                    samples=tuple(self._samples[system.name, workload.name]),
                    run=self._run,
                    settings=worker.facts["settings"],
                    versions=worker.facts["versions"],
                )

    def _bandwidth_rows(self) -> Iterator[Row]:
        for name, nbytes in self._buffers().items():
            yield Row(
                kind="bandwidth",
                measure=f"read {name}",
                system=MEMORY.name,
                threads=self._threads,
                unit="GB/s",
                samples=tuple(self._samples[MEMORY.name, name]),
                run=self._run,
                settings={"buffer_bytes": nbytes},
                versions=self._memory.facts["versions"],
            )
