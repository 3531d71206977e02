"""What drafts are worth: the same answers decoded with and without, in turns, on prompts of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench import machine, model
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.systems import HEADRACE
from headrace.completion import Completion
from headrace.engine.speculate import Speculate
from headrace.llm import LLM

MODES: tuple[Speculate, ...] = ("off", "auto", 2, 4, 8)
MAX_TOKENS = 200

CODE = """def average(values):
    total = 0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return 0
    return total / count


def largest(values):
    best = values[0]
    for value in values:
        if value > best:
            best = value
    return best


def smallest(values):
    best = values[0]
    for value in values:
        if value < best:
            best = value
    return best
"""
ARTICLE = """The lighthouse at the end of the harbour was built in 1874, after a winter in which eleven
fishing boats were lost on the rocks. Its lamp burned whale oil for the first nine years and
paraffin after that, and a keeper with two assistants lived in the tower all year round. In 1931
the lamp was connected to the town's electric supply, and the assistants left. The last keeper,
Anna Lindqvist, stayed until 1968, when a clock took over the switching of the light. She wrote
down the weather every morning for thirty-four years, and her notebooks are now read by people
who study how storms on this coast have changed. The town bought the tower in 1990 for one
crown, repaired the stairs, and opened a museum in the keeper's rooms. About twenty thousand
people climb the tower every summer, and the fishing boats still steer by its light when they
come home at night."""
TASKS = {
    "code editing": f"Rename the function average to mean and print the whole file again.\n\n```python\n{CODE}```",
    "summarising": f"Summarise this text in a few sentences.\n\n{ARTICLE}",
    "chat": "What should I think about before I adopt a dog? Give me some advice.",
}


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "speculate"."""
    run = machine.new_run(command("speculate", settings))
    rows = [row for threads in settings.threads for row in _rows(settings, threads, run)]
    append(settings.results / "speculate.jsonl", rows)
    return rows


def _rows(settings: Settings, threads: int, run: Run) -> Iterator[Row]:
    with LLM(model.kept_artifact(settings), threads=threads, max_context=2048) as llm:
        for task, prompt in TASKS.items():
            for temperature in (0.0, 0.7):
                yield from _modes(llm, task, prompt, temperature, settings.rounds, threads, run)


def _modes(
    llm: LLM, task: str, prompt: str, temperature: float, rounds: int, threads: int, run: Run
) -> Iterator[Row]:
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": MAX_TOKENS}
    llm.generate(prompt, **options)
    done: dict[Speculate, list[Completion]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            done[mode].append(llm.generate(prompt, speculate=mode, **options))
    if len({c.stats.fingerprint for each in done.values() for c in each}) != 1:
        raise AssertionError(f"{task}: drafts changed the answer")
    for mode, each in done.items():
        last = each[-1].stats
        facts = {
            "speculate": mode,
            "sampled": temperature > 0,
            "tokens": last.new_tokens,
            "drafted": last.drafted_tokens,
            "accepted": last.accepted_tokens,
        }
        rates = tuple(c.stats.decode_rate for c in each)
        yield Row("speculate", task, HEADRACE, threads, "tok/s", rates, run, facts)
