"""Where a pass of headrace goes: Python's share of a decode step, and seconds by operation of decode and prefill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench import machine
from bench.process import Worker
from bench.rows import Row, append
from bench.settings import Settings, command
from bench.systems import HEADRACE, headrace

SHARE = "Python's share"
OPERATION = "operation "
CONTEXTS = (16, 1000)
PREFILL_ROWS = 512
PREFILL_PASSES = 5


@dataclass(frozen=True)
class Part:
    """What a row of this kind has of its own."""

    measure: str
    unit: str
    samples: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "profile"."""
    run = machine.new_run(command("profile", settings))
    system = headrace(settings)
    rows = []
    for threads in settings.threads:
        with system.start(threads) as worker:
            facts = worker.facts
            for p in _parts(worker, settings):
                known = {**facts["settings"], **p.settings}
                head = ("profile", p.measure, HEADRACE, threads, p.unit, p.samples)
                rows.append(Row(*head, run, known, facts["versions"]))
    append(settings.results / "profile.jsonl", rows)
    return rows


def _parts(worker: Worker, settings: Settings) -> Iterator[Part]:
    for context in CONTEXTS:
        for sampled in (False, True):
            yield _share(worker, settings, context, sampled)
        yield from _operations(worker, context, settings.steps, 1)
    yield from _operations(worker, 0, PREFILL_PASSES, PREFILL_ROWS)


def _share(worker: Worker, settings: Settings, context: int, sampled: bool) -> Part:
    request = {"context": context, "steps": settings.steps, "sampled": sampled}
    worker.ask("share", **request)
    runs = [worker.ask("share", **request) for _ in range(settings.rounds)]
    samples = tuple(1 - r["native"] / r["seconds"] for r in runs)
    facts = {"context": context, "sampled": sampled, "step_seconds": _step_seconds(runs)}
    return Part(SHARE, "share", samples, facts)


def _step_seconds(runs: list[dict[str, Any]]) -> float:
    return min(float(r["seconds"] / r["steps"]) for r in runs)


def _operations(worker: Worker, context: int, passes: int, rows: int) -> Iterator[Part]:
    found = worker.ask("operations", context=context, steps=passes, rows=rows)
    for name, samples in found["seconds"].items():
        facts = {"context": context, "rows": rows, "bytes": found["bytes"][name]}
        yield Part(OPERATION + name, "s", tuple(samples), facts)
