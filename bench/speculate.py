"""What drafts are worth: the same answers decoded with and without, in turns, on prompts of several kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import machine, model
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.systems import HEADRACE
from headrace.artifact.convert import convert
from headrace.completion import Completion
from headrace.drafting import Draft
from headrace.engine.speculate import Speculate
from headrace.llm import LLM

MODES: tuple[Speculate, ...] = ("off", "auto", 2, 4, 8)
DRAFTERS: tuple[Draft, ...] = ("lookup", "mtp", "model", "auto")
DRAFTER_MODES: tuple[Speculate, ...] = ("off", "auto", 1, 2, 4)
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


CASES = tuple((task, temperature) for task in TASKS for temperature in (0.0, 0.7))


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "speculate", and of kind "drafters" where there is a checkpoint with a head."""
    run = machine.new_run(command("speculate", settings))
    rows = [row for threads in settings.threads for row in _rows(settings, threads, run)]
    if settings.headed is not None:
        made = convert(settings.headed, settings.work / "headed").path
        small = model.kept_artifact(settings)
        for threads in settings.threads:
            rows += _drafters(made, small, settings.rounds, threads, run)
    append(settings.results / "speculate.jsonl", rows)
    return rows


def _rows(settings: Settings, threads: int, run: Run) -> Iterator[Row]:
    with LLM(model.kept_artifact(settings), threads=threads, max_context=2048) as llm:
        for case in CASES:
            yield from _case("speculate", {"lookup": llm}, MODES, case, settings.rounds, run)


def _drafters(made: Path, small: Path, rounds: int, threads: int, run: Run) -> Iterator[Row]:
    """Each drafter on the same model: a model is loaded for each, and all are asked in turns."""
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for draft in DRAFTERS:
            second = small if draft == "model" else None
            llms[draft] = stack.enter_context(
                LLM(made, threads=threads, max_context=2048, draft=draft, draft_model=second)
            )
        for case in CASES:
            yield from _case("drafters", llms, DRAFTER_MODES, case, rounds, run)


def _case(
    kind: str,
    llms: Mapping[str, LLM],
    modes: Tokens[Speculate],
    case: tuple[str, float],
    rounds: int,
    run: Run,
) -> Iterator[Row]:
    """One task at one temperature: every drafter in every mode, in turns; plain decoding once a round."""
    task, temperature = case
    options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": MAX_TOKENS}
    ways = [(draft, mode) for draft in llms for mode in modes]
    ways = [w for i, w in enumerate(ways) if w[1] != "off" or i == 0]
    done: dict[tuple[str, Speculate], list[Completion]] = {way: [] for way in ways}
    for llm in llms.values():
        llm.generate(TASKS[task], **options)
    for _ in range(rounds):
        for way in ways:
            llm = llms[way[0]]
            llm.forget()  # a head that drafts reads the prompt with the model
            done[way].append(llm.generate(TASKS[task], speculate=way[1], **options))
    if len({c.stats.fingerprint for each in done.values() for c in each}) != 1:
        raise AssertionError(f"{task}: drafts changed the answer")
    for (draft, mode), each in done.items():
        last = each[-1].stats
        facts = {
            "draft": draft,
            "speculate": mode,
            "sampled": temperature > 0,
            "tokens": last.new_tokens,
            "drafted": last.drafted_tokens,
            "accepted": last.accepted_tokens,
        }
        threads = getattr(llms[draft].engine.backend, "threads", 1)
        rates = tuple(c.stats.decode_rate for c in each)
        yield Row(kind, task, HEADRACE, threads, "tok/s", rates, run, facts)
