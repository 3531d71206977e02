"""What following a grammar costs: compiling schemas of a public set, a token's mask, and the share of decoding.

The set is a folder of JSON files, each a schema, or one with instances, as MaskBench has them: "schema", and "tests"
that say what is "valid". Files are taken evenly from the sorted list.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine, model
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.systems import HEADRACE
from headrace.engine.constraint import Choices
from headrace.errors import ConstraintError, GrammarError
from headrace.llm import LLM
from headrace.text.grammar import Grammar, GrammarCompiler
from headrace.text.tokenizer import Tokenizer

COMPILE = "compile"
MASK = "mask of a token"
SHARE = "share of the decode time"
MAX_INSTANCE_TOKENS = 400
ASK = "Describe a person who lives in Lisbon, as JSON."
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "city": {"const": "Lisbon"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 3, "maxItems": 3},
        "biography": {"type": "string", "minLength": 100, "maxLength": 300},
    },
    "required": ["name", "age", "address", "hobbies", "biography"],
    "additionalProperties": False,
}  # fmt: skip


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "constrain"."""
    run = machine.new_run(command("constrain", settings))
    rows = []
    if settings.schemas is not None:
        rows += _public(settings, settings.schemas, run)
    rows += [row for threads in settings.threads for row in _shares(settings, threads, run)]
    append(settings.results / "constrain.jsonl", rows)
    return rows


def files(folder: Path, limit: int) -> list[Path]:
    """At most `limit` JSON files below a folder, evenly from their sorted list."""
    found = sorted(folder.rglob("*.json"))
    count = min(limit, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def percentiles(samples: list[float]) -> tuple[float, ...]:
    """0 to 100."""
    return tuple(float(p) for p in np.percentile(samples, range(101)))


def cause(error: GrammarError) -> str:
    """What many refusals have in common: the keyword, or the message without its values."""
    words = re.sub(r"'[^']*'|\"(?![$A-Za-z]+\")[^\"]*\"|[0-9.]+", "…", error.cause)
    return words[:80]


class _Set:
    """Schemas compiled one after the other, and the masks along their valid instances."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer)
        self._compiler.schema({})  # the vocabulary is prepared once
        self.compile: list[float] = []
        self.mask: list[float] = []
        self.refused: Counter[str] = Counter()
        self.instances = self.rejected = self.limited = 0

    def add(self, path: Path) -> None:
        found = json.loads(path.read_text("utf-8"))
        whole = isinstance(found, dict) and set(found) >= {"schema", "tests"}
        text = json.dumps(found["schema"] if whole else found, ensure_ascii=False)
        start = time.perf_counter()
        try:
            grammar = self._compiler.schema(text)
        except GrammarError as error:
            self.refused[cause(error)] += 1
            return
        self.compile.append(time.perf_counter() - start)
        for test in found["tests"] if whole else ():
            if test["valid"]:
                self._follow(grammar, test["data"])

    def _follow(self, grammar: Grammar, value: Any) -> None:
        """Every mask along an instance, whether forced or not: the cost of a pick."""
        tokens = self._tokenizer.encode(json.dumps(value, ensure_ascii=False))
        walk, self.instances = grammar.start(), self.instances + 1
        try:
            for token in tokens[:MAX_INSTANCE_TOKENS]:
                start = time.perf_counter()
                allowed = np.asarray(Choices(walk.mask(), self._tokenizer.vocab_size))
                self.mask.append(time.perf_counter() - start)
                if not allowed[token]:
                    self.rejected += (
                        1  # its keys are in another order, or it is cut otherwise than is forced
                    )
                    return
                walk.advance(token)
        except ConstraintError:
            self.limited += 1


def _public(settings: Settings, folder: Path, run: Run) -> Iterator[Row]:
    artifact = model.kept_artifact(settings)
    with LLM(artifact, threads=1) as llm:
        every = _Set(llm.tokenizer)
    chosen = files(folder, settings.schemas_limit)
    for path in chosen:
        every.add(path)
    facts: dict[str, Any] = {
        "set": settings.schemas_name,
        "schemas": len(chosen),
        "compiled": len(every.compile),
        "refused": dict(every.refused.most_common(12)),
    }
    yield Row("constrain", COMPILE, HEADRACE, 1, "s", percentiles(every.compile), run, facts)
    if every.mask:
        more = {
            "tokens": len(every.mask),
            "instances": every.instances,
            "in another order": every.rejected,
            "over a limit": every.limited,
        }
        yield Row("constrain", MASK, HEADRACE, 1, "s", percentiles(every.mask), run, facts | more)


def _shares(settings: Settings, threads: int, run: Run) -> Iterator[Row]:
    """Seconds that constraining takes, over those of decoding the same answer, greedy and sampled."""
    with LLM(model.kept_artifact(settings), threads=threads, max_context=1024) as llm:
        for temperature in (0.0, 1.0):
            options: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 200}
            llm.generate(ASK, schema=PERSON, **options)
            done = [
                llm.generate(ASK, schema=PERSON, **options).stats for _ in range(settings.rounds)
            ]
            free = [llm.generate(ASK, **options).stats for _ in range(settings.rounds)]
            first = done[0]
            facts = {
                "sampled": temperature > 0,
                "tokens": first.new_tokens,
                "forced": first.forced_tokens,
                "spans": first.forced_spans,
                "microseconds": min(s.constraint_seconds / s.new_tokens for s in done) * 1e6,
                "rate": max(s.decode_rate for s in done),
                "free_rate": max(s.decode_rate for s in free),
            }
            samples = tuple(s.constraint_seconds / s.decode_seconds for s in done)
            yield Row("constrain", SHARE, HEADRACE, threads, "share", samples, run, facts)
