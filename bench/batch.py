"""Tokens a second of all sequences together, by how many there are at a time; llama.cpp's parallel slots beside."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import machine, model
from bench.process import Worker
from bench.rows import Row, Run, append
from bench.settings import Settings, command, own_python
from bench.systems import HEADRACE, System, llama_systems
from headrace.artifact.container import open_artifact
from headrace.artifact.convert import convert

SIZES = (1, 2, 4, 8, 16)
CONTEXT = 128  # tokens of each prompt
PREFILL, DECODE = "prefill", "decode"
MIXTURE = f"{HEADRACE}, small mixture"


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "batch"."""
    run = machine.new_run(command("batch", settings))
    rows = [row for threads in settings.threads for row in _rows(settings, threads, run)]
    append(settings.results / "batch.jsonl", rows)
    return rows


def systems(settings: Settings) -> Iterator[System]:
    sizes = {"sequences": max(SIZES), "context": CONTEXT + settings.steps + 64}

    def headrace(name: str, artifact: Path) -> System:
        return System(name, "headrace_batch", own_python(), {"model": str(artifact), **sizes})

    yield headrace(HEADRACE, model.kept_artifact(settings))
    if settings.small_mixture is not None:
        yield headrace(MIXTURE, _small_mixture(settings, settings.small_mixture))
    for system in llama_systems(settings):
        yield replace(system, module="llama_cpp_batch", config={**system.config, **sizes})


def _small_mixture(settings: Settings, source: Path) -> Path:
    """Its artifact: the one given, or one that is converted from what was given."""
    if (source / "manifest.json").exists():
        return open_artifact(source).path
    target = settings.work / "small-mixture"
    return target if target.exists() else convert(source, target).path


def _rows(settings: Settings, threads: int, run: Run) -> Iterator[Row]:
    samples: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        workers = {s.name: stack.enter_context(s.start(threads)) for s in systems(settings)}
        for number in range(settings.rounds + 1):
            for size in SIZES:
                for name, worker in workers.items():
                    for what, rate in _sample(settings, worker, size):
                        if number:  # the first round warms up
                            samples[name, what, size].append(rate)
            print(f"threads {threads}, round {number} of {settings.rounds}", flush=True)
        for (name, what, size), rates in samples.items():
            facts = workers[name].facts
            known = {**facts["settings"], "sequences": size, "context": CONTEXT}
            head = ("batch", what, name, threads, "tok/s", tuple(rates))
            yield Row(*head, run, known, facts["versions"])


def _sample(settings: Settings, worker: Worker, size: int) -> Iterator[tuple[str, float]]:
    asked: dict[str, Any] = {"sequences": size}
    time.sleep(settings.pause)
    yield PREFILL, size * CONTEXT / worker.ask("prefill", **asked, tokens=CONTEXT)["seconds"]
    time.sleep(settings.pause)
    asked |= {"context": CONTEXT, "steps": settings.steps}
    yield DECODE, size * settings.steps / worker.ask("decode", **asked)["seconds"]
