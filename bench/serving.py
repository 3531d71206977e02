"""Servers under load: requests, tokens and time to the first text by the number of clients; what a server itself costs.

llama.cpp's own server has as many slots, the same model and the same requests. The cost is the time that headrace's
server takes longer than its scheduler alone for the same eight answers, by token.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench import http_load, machine, model
from bench.process import Worker
from bench.rows import Row, Run, append
from bench.settings import Settings, command, own_python
from bench.systems import HEADRACE, System

CLIENTS = (1, 2, 4, 8, 16)
SLOTS = 8
CONTEXT = 512  # positions of a slot
MAX_TOKENS = 64
EACH = 3  # requests of a client in a run
REQUESTS, TOKENS, FIRST, COST = "requests", "tokens", "first text", "cost of a token"
UNITS = {REQUESTS: "1/s", TOKENS: "tok/s", FIRST: "ms", COST: "ms"}
DIRECT = "headrace without a server"


@dataclass
class _Samples:
    """Samples by system, measure and clients."""

    found: dict[tuple[str, str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, system: str, measure: str, clients: int, value: float) -> None:
        self.found[system, measure, clients].append(value)


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "serve"."""
    run = machine.new_run(command("serve", settings))
    rows = [row for threads in settings.threads for row in _rows(settings, threads, run)]
    append(settings.results / "serve.jsonl", rows)
    return rows


def systems(settings: Settings) -> Iterator[System]:
    sizes = {"slots": SLOTS, "context": CONTEXT}
    artifact = str(model.kept_artifact(settings))
    yield System(HEADRACE, "headrace_server", own_python(), {"model": artifact, **sizes})
    if settings.llama_server is not None:
        program = str(settings.llama_server)
        formats = {"Q4_1": model.gguf(settings)}
        if settings.q4_0 is not None:
            formats["Q4_0"] = settings.q4_0
        for name, path in formats.items():
            config = {"program": program, "model": str(path), **sizes}
            yield System(f"llama.cpp server {name}", "llama_server", own_python(), config)


def _rows(settings: Settings, threads: int, run: Run) -> Iterator[Row]:
    samples = _Samples()
    with ExitStack() as stack:
        workers = {}
        for system in systems(settings):
            workers[system.name] = stack.enter_context(system.start(threads))
            stack.callback(workers[system.name].ask, "close")
        direct = stack.enter_context(_direct(settings).start(threads))
        for number in range(settings.rounds + 1):  # the first warms up
            kept = samples if number else _Samples()
            for clients in CLIENTS:
                for name, worker in workers.items():
                    _load(settings, name, worker, clients, number, kept)
            _cost(settings, workers[HEADRACE], direct, number, kept)
            print(f"threads {threads}, round {number} of {settings.rounds}", flush=True)
        for (name, what, clients), values in samples.found.items():
            facts = (direct if name == DIRECT else workers[name]).facts
            known = {"clients": clients, "slots": SLOTS, "max_tokens": MAX_TOKENS}
            head = ("serve", what, name, threads, UNITS[what], tuple(values))
            yield Row(*head, run, known, facts["versions"])


def _direct(settings: Settings) -> System:
    config: dict[str, Any] = {"slots": SLOTS, "context": CONTEXT}
    config["model"] = str(model.kept_artifact(settings))
    return System(DIRECT, "headrace_direct", own_python(), config)


def prompts(count: int, run: int) -> list[str]:
    """Questions that differ from their first words on, in every run."""
    return [
        f"{1000 * run + i} is a number. Write a long story about a lighthouse keeper who counts to it. "
        "Say what the weather is like, whom she meets, what she eats, and how the story ends. Begin at once."
        for i in range(count)
    ]


def _load(
    settings: Settings, name: str, worker: Worker, clients: int, number: int, samples: _Samples
) -> None:
    time.sleep(settings.pause)
    facts = worker.facts["settings"]
    asked = prompts(EACH * clients, 100 * number + clients)
    load = http_load.run(facts["url"], facts["model"], asked, clients, MAX_TOKENS)
    samples.add(name, REQUESTS, clients, len(load.answers) / load.seconds)
    samples.add(name, TOKENS, clients, load.tokens / load.seconds)
    samples.add(name, FIRST, clients, 1000 * statistics.median(a.first for a in load.answers))


def _cost(
    settings: Settings, server: Worker, direct: Worker, number: int, samples: _Samples
) -> None:
    """The same eight answers with and without a server."""
    facts, asked = server.facts["settings"], prompts(SLOTS, 100 * number + 99)
    time.sleep(settings.pause)
    alone = direct.ask("answer", prompts=asked, max_tokens=MAX_TOKENS)
    time.sleep(settings.pause)
    load = http_load.run(facts["url"], facts["model"], asked, SLOTS, MAX_TOKENS)
    longer = load.seconds / load.tokens - alone["seconds"] / alone["tokens"]
    samples.add(HEADRACE, COST, SLOTS, 1000 * longer)
    samples.add(DIRECT, TOKENS, SLOTS, alone["tokens"] / alone["seconds"])
