"""A model four times the memory it may use: every engine inside the same limit, and headrace with parts changed.

Each sample is a process of its own in a memory group, started after the page cache was dropped. Tokens are given, not
picked: a random model soon repeats itself, and with its tokens its experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import disk, machine, mixture
from bench.cgroup import GroupError, MemoryGroup, Usage, drop_page_cache
from bench.process import WorkerError
from bench.rows import Row, Run, append
from bench.settings import Settings, command, own_python
from bench.systems import HEADRACE, LLAMA_MODULE, System
from headrace.artifact.container import open_artifact

DISK, LLAMA, NEUROSTREAM, AIRLLM = "disk", "llama.cpp", "neurostream", "AirLLM"
PREFILL, RAW = "prefill 512", "raw reads"
CONTEXT, PROMPT = 2048, 16
LANES = (1, 2, 4, 8, 16)
MIB = 1 << 20
PATIENCE = (
    900.0  # seconds of a sample of headrace, which comes to its end; those of peers are cut off
)
# neurostream's own budgets, of the limit: the rest is Python, torch and activations.
ARENA_BYTES, UNBUDGETED_BYTES = 64 * MIB, 600 * MIB


@dataclass(frozen=True)
class Workload:
    """What is asked of a worker, and which of the two timed parts of its answer counts."""

    name: str
    context: int
    steps: int

    @property
    def part(self) -> str:
        return "steps" if self.steps else "prompt"


@dataclass
class Sample:
    """One process: its answer where it gave one, and what its group says of it."""

    usage: Usage
    answer: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    resident_bytes: int = 0
    error: str = ""

    def rate(self, workload: Workload) -> float:
        if self.error:
            return 0.0
        part = self.answer[workload.part]
        return float(part["tokens"] / part["seconds"])


def decode_name(steps: int) -> str:
    return f"decode {steps:,} tokens"


def workloads(settings: Settings) -> list[Workload]:
    decode = [Workload(decode_name(n), PROMPT, n) for n in settings.stream_steps]
    return [Workload(PREFILL, 512, 0), *decode]


def limit_bytes(settings: Settings) -> int:
    """The limit that was asked for, or a quarter of the model."""
    if settings.limit_gb is not None:
        return round(settings.limit_gb * 1e9)
    return mixture.gguf(settings).stat().st_size // 4


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "stream": inside the limit, then with the whole model in memory."""
    if not possible():
        return []
    run = machine.new_run(command("stream", settings))
    rows = [*_Limited(settings, run).rows(), *_resident(settings, run)]
    append(settings.results / "stream.jsonl", rows)
    return rows


def possible() -> bool:
    """Whether there can be a memory group here; says why not."""
    try:
        with MemoryGroup(1 << 30):
            drop_page_cache()
    except GroupError as error:
        print(f"stream: skipped, it takes root: {error}")
        return False
    return True


def systems(settings: Settings, limit: int) -> list[System]:
    """Every engine that was given, told to stay within the limit where it can be told."""
    found = [headrace(settings, memory_gb=limit / 1e9)]
    if settings.llama_python:
        # With repacked buffers it would copy the model into memory that it has not.
        found.append(_llama(settings, repack=False))
    if settings.neurostream_python is not None:
        budgets = {"arena": ARENA_BYTES, "cache": max(0, limit - ARENA_BYTES - UNBUDGETED_BYTES)}
        config = {"model": str(mixture.gguf(settings, "q4_0")), **budgets}
        python = settings.neurostream_python
        found.append(System(NEUROSTREAM, "neurostream_engine", python, config, max_rounds=1))
    if settings.airllm_python is not None:
        found.append(_airllm(settings, settings.airllm_python))
    return found


def headrace(settings: Settings, **config: Any) -> System:
    own = {"model": str(mixture.artifact(settings)), "max_context": CONTEXT, **config}
    return System(HEADRACE, "headrace_stream", own_python(), own)


def _llama(settings: Settings, *, repack: bool) -> System:
    config = {"model": str(mixture.gguf(settings)), "repack": repack}
    return System(LLAMA, LLAMA_MODULE, settings.llama_python[0], config, max_rounds=1)


def _airllm(settings: Settings, python: Path) -> System:
    """It copies a checkpoint by layers when it first opens it: that is done here, outside the limit."""
    shards = settings.work / "airllm"
    config = {"model": str(mixture.checkpoint(settings)), "shards": str(shards)}
    system = System(AIRLLM, "airllm_engine", python, config, max_rounds=1)
    if not shards.exists():
        try:
            with system.start(max(settings.threads)):
                pass
        except WorkerError as error:
            print(f"{AIRLLM}: {error}", flush=True)
    return system


def sample(system: System, workload: Workload, settings: Settings, limit: int) -> Sample:
    """One process in a group of its own."""
    drop_page_cache()
    request = {"context": workload.context, "steps": workload.steps}
    threads = max(settings.threads)
    with MemoryGroup(limit) as group:
        try:
            with system.start(threads, group.prefix) as worker:
                seconds = settings.stream_seconds if system.max_rounds else PATIENCE
                answer = worker.ask("follow", **request, seconds=seconds)
                resident = worker.ask("peak")["bytes"]
                facts = worker.facts
        except WorkerError as error:
            return Sample(group.usage(), error=str(error).strip().splitlines()[-1])
        return Sample(group.usage(), answer, facts, resident)


class _Limited:
    """Rounds of all engines inside the limit, with the disk measured before each workload."""

    def __init__(self, settings: Settings, run: Run) -> None:
        self._settings = settings
        self._run = run
        self._limit = limit_bytes(settings)
        self._systems = systems(settings, self._limit)

    def rows(self) -> Iterator[Row]:
        found: dict[tuple[System, Workload], list[Sample]] = {}
        raw: dict[int, list[float]] = {}
        for number in range(self._settings.stream_rounds):
            for workload in workloads(self._settings):
                for lanes, rate in raw_reads(self._settings):
                    raw.setdefault(lanes, []).append(rate)
                for system in self._taking_part(workload, number):
                    one = sample(system, workload, self._settings, self._limit)
                    found.setdefault((system, workload), []).append(one)
                    self._tell(system, workload, one)
        for lanes, rates in raw.items():
            yield Row("stream", RAW, DISK, lanes, "MB/s", tuple(rates), self._run)
        size = mixture.gguf(self._settings).stat().st_size
        about = {"limit_bytes": self._limit, "model_bytes": size}
        for (system, workload), samples in found.items():
            yield row("stream", system.name, workload, samples, self._run, self._settings, about)

    def _taking_part(self, workload: Workload, number: int) -> list[System]:
        """Engines that answer in minutes are asked to decode only."""
        slow = (NEUROSTREAM, AIRLLM) if workload.name == PREFILL else ()
        rounds = self._settings.stream_rounds
        return [
            s for s in self._systems if s.name not in slow and number < (s.max_rounds or rounds)
        ]

    def _tell(self, system: System, workload: Workload, one: Sample) -> None:
        said = one.error or f"{one.rate(workload):.3g} tok/s"
        peak = one.usage.peak_bytes / 1e6
        print(f"{system.name}, {workload.name}: {said}; peak {peak:,.0f} MB", flush=True)


def row(
    kind: str,
    name: str,
    workload: Workload,
    samples: Sequence[Sample],
    run: Run,
    settings: Settings,
    about: Mapping[str, Any],
) -> Row:
    """Samples of one system and workload as a row; its settings say what a figure needs besides the rate."""
    facts = next((s.facts for s in samples if s.facts), {})
    known = {
        **facts.get("settings", {}),
        **about,
        "peak_bytes": max(s.usage.peak_bytes for s in samples),
        "resident_peak_bytes": max(s.resident_bytes for s in samples),
        "limit_hits": max(s.usage.hits for s in samples),
        "killed": sum(s.usage.killed for s in samples),
        "error": next((s.error for s in samples if s.error), ""),
        "asked_tokens": workload.steps or workload.context,
        **_sums(workload, samples),
    }
    rates = tuple(s.rate(workload) for s in samples)
    head = (kind, workload.name, name, max(settings.threads), "tok/s", rates, run)
    return Row(*head, known, facts.get("versions", {}))


def _sums(workload: Workload, samples: Sequence[Sample]) -> dict[str, Any]:
    """Tokens, seconds and counters over all samples that answered."""
    parts = [s.answer[workload.part] for s in samples if s.answer]
    names = {name for part in parts for name in part["counters"]}
    return {
        "tokens": sum(p["tokens"] for p in parts),
        "seconds": sum(p["seconds"] for p in parts),
        "counters": {n: sum(p["counters"][n] for p in parts) for n in sorted(names)},
    }


def experts_per_layer(settings: Settings) -> int:
    return open_artifact(mixture.artifact(settings)).records[0].num_experts


def raw_reads(settings: Settings) -> Iterator[tuple[int, float]]:
    """MB/s of the model's own records in random order with O_DIRECT, by lane count."""
    first = open_artifact(mixture.artifact(settings)).records[0]
    records = disk.records_of(first.path, first.layout.nbytes)
    for lanes in LANES:
        rate, _ = disk.rate(records, lanes, disk.MIB, 0, settings.disk_seconds)
        yield lanes, rate


def _resident(settings: Settings, run: Run) -> Iterator[Row]:
    """headrace and llama.cpp, each with the whole model in memory, in turns; the first round only warms up."""
    found = [headrace(settings)]
    if settings.llama_python:
        found.append(_llama(settings, repack=True))
    threads, steps = max(settings.threads), settings.steps
    asked = [
        Workload(f"resident {PREFILL}", 512, 0),
        Workload("resident decode", PROMPT, steps),
    ]
    samples: dict[tuple[System, Workload], list[float]] = {}
    with ExitStack() as stack:
        workers = {s: stack.enter_context(s.start(threads)) for s in found}
        for number in range(settings.stream_rounds + 1):
            for workload in asked:
                for system, worker in workers.items():
                    request = {"context": workload.context, "steps": workload.steps}
                    answer = worker.ask("follow", **request, seconds=settings.stream_seconds)
                    rate = Sample(Usage(0, 0, 0), answer).rate(workload)
                    if number:
                        samples.setdefault((system, workload), []).append(rate)
        for (system, workload), rates in samples.items():
            facts = workers[system].facts
            head = ("stream", workload.name, system.name, threads, "tok/s", tuple(rates), run)
            yield Row(*head, facts["settings"], facts["versions"])
