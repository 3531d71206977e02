"""Whole processes: from nothing to the first token of a short prompt, and a conversion with its peak memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

from bench import machine, model
from bench.process import Timing, timed, worker_command
from bench.rows import Row, append
from bench.settings import Settings, command, own_python
from bench.systems import HEADRACE, System, llama_systems

FIRST_TOKEN = "start to first token"
CONVERSION = "conversion"
PROMPT = "Hi"


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "load". The page cache is warm: the first sample of each is dropped."""
    run = machine.new_run(command("load", settings))
    threads = max(settings.threads)
    contenders = {HEADRACE: lambda: _headrace(settings, threads)}
    for system in llama_systems(settings):
        contenders[system.name] = _starter(system, threads)
    samples = _rounds(contenders, settings.rounds)
    rows = [
        Row("load", FIRST_TOKEN, name, threads, "s", _seconds(times), run, _peak(times))
        for name, times in samples.items()
    ]
    converted = _rounds({HEADRACE: lambda: _convert(settings)}, min(3, settings.rounds))[HEADRACE]
    rows.append(
        Row("load", CONVERSION, HEADRACE, 0, "s", _seconds(converted), run, _peak(converted))
    )
    append(settings.results / "load.jsonl", rows)
    return rows


def _rounds(contenders: dict[str, Callable[[], Timing]], rounds: int) -> dict[str, list[Timing]]:
    samples: dict[str, list[Timing]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, start in contenders.items():
            timing = start()
            if number:
                samples[name].append(timing)
    return samples


def _headrace(settings: Settings, threads: int) -> Timing:
    artifact = str(model.kept_artifact(settings))
    options = ["--prompt", PROMPT, "--greedy", "--max-tokens", "1", "--threads", str(threads)]
    return timed([str(own_python()), "-m", "headrace", "run", artifact, *options], threads=threads)


def _starter(system: System, threads: int) -> Callable[[], Timing]:
    """The worker as a whole process: import, load, read a prompt as long as headrace's, pick."""
    request = json.dumps({"do": "decode", "context": 32, "steps": 1}) + "\n"
    line = worker_command(system.python, system.module, system.config, threads)
    return lambda: timed(line, threads=threads, stdin=request)


def _convert(settings: Settings) -> Timing:
    target = settings.work / "converted"
    shutil.rmtree(target, ignore_errors=True)
    source = str(model.gguf(settings))
    line = [str(own_python()), "-m", "headrace", "convert", source, str(target)]
    try:
        return timed(line, threads=1)
    finally:
        shutil.rmtree(target, ignore_errors=True)


def _seconds(times: list[Timing]) -> tuple[float, ...]:
    return tuple(t.seconds for t in times)


def _peak(times: list[Timing]) -> dict[str, int]:
    return {"peak_bytes": max(t.peak_bytes for t in times)}
