"""The law for company: whoever shares passes, each generation ends as it does alone, in tokens, logits, keys and values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.scheduler import AHEAD, Scheduler, Ticket
from headrace.errors import ConstraintError
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import TIERS
from headrace.values import SamplingParams
from law import engines

Get = Callable[[str], Artifact]

CONTEXT = 256
TIERED = [(tier, 1) for tier in TIERS if tier != "reference"] + [(None, 2)]


@dataclass(frozen=True)
class Asked:
    """One generation. kept: it has a sequence of its own, whose keys and values are compared. taken: tokens after which
    its reader leaves; None: it reads all."""

    prompt: tuple[int, ...]
    params: SamplingParams
    kept: bool = False
    taken: int | None = None
    reuse: bool = True
    options: dict[str, Any] = field(default_factory=dict, compare=False)
    constraint: Callable[[], Any] = lambda: None


class Spans:
    """A grammar of a choice of two tokens and five that follow from it, three times over."""

    can_end = ended = False

    def __init__(self) -> None:
        self._taken: list[int] = []

    def _next(self) -> list[int]:
        at = len(self._taken)
        first = self._taken[at - at % 6] if at % 6 else 0
        return [first + at % 6] if at % 6 else [20, 120]

    def mask(self) -> np.ndarray:
        words = np.zeros(9, np.uint32)
        for token in self._next():
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def forced(self) -> list[int]:
        first = len(self._taken) % 6
        return [] if not first else [self._taken[-first] + i for i in range(first, 6)]

    def advance(self, token: int) -> None:
        if token not in self._next():
            raise ConstraintError(f"token {token} may not follow")
        self._taken.append(token)

    def fork(self) -> Spans:
        other = Spans()
        other._taken = list(self._taken)
        return other


@dataclass(frozen=True)
class Outcome:
    tokens: tuple[int, ...]
    fingerprint: str
    reason: str
    kv: bytes | None


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Prompts of one number share their beginnings."""
    return tuple((7 * i * i + 3 * i * (number + 1) + number) % 256 for i in range(length))


def alone(engine: Engine, asked: Asked) -> Outcome:
    sequence = engine.new_sequence() if asked.kept else None
    steps = engine.generate(
        asked.prompt,
        asked.params,
        sequence=sequence,
        reuse=False,
        constraint=asked.constraint(),
        **asked.options,
    )
    tokens = []
    for token in steps:
        tokens.append(token.id)
        if len(tokens) == asked.taken:
            break
    steps.close()
    assert engine.stats is not None
    kv = None
    if sequence is not None:
        kv = engine.kv_bytes(sequence)
        sequence.release()
    return Outcome(tuple(tokens), engine.stats.fingerprint, engine.stats.finish_reason, kv)


class Party:
    """Generations that a schedule of a random generator runs: who comes when, and whose tokens are taken when."""

    def __init__(self, engine: Engine, asked: list[Asked], seed: int, hold: bool = True) -> None:
        self.engine = engine
        self.scheduler = Scheduler(engine)
        self.found: dict[int, Outcome] = {}
        self._coming = list(enumerate(asked))
        self._here: list[tuple[int, Asked, Ticket, Any, list[int]]] = []
        self._random = random.Random(seed)
        self._hold = hold  # whether tokens may lie there untaken

    def run(self) -> dict[int, Outcome]:
        while self._coming or self._here:
            while self._coming and self._random.random() < 0.5:
                self._join(*self._coming.pop(0))
            self.scheduler.step()
            for entry in list(self._here):
                if not self._hold or self._random.random() < 0.8:
                    self._take(entry)
        return self.found

    def _join(self, number: int, asked: Asked) -> None:
        sequence = self.engine.new_sequence() if asked.kept else None
        generation = self.engine.generation(
            asked.prompt,
            asked.params,
            sequence=sequence,
            reuse=asked.reuse,
            constraint=asked.constraint(),
            **asked.options,
        )
        ticket = Ticket(generation)
        self.scheduler.submit(ticket)
        self._here.append((number, asked, ticket, sequence, []))

    def _take(self, entry: tuple[int, Asked, Ticket, Any, list[int]]) -> None:
        number, asked, ticket, sequence, tokens = entry
        while (asked.taken is None or len(tokens) < asked.taken) and (token := ticket.pop()):
            tokens.append(token.id)
        if len(tokens) == asked.taken:
            ticket.cancelled = True
            self.scheduler.reap()
        if not ticket.over:
            return
        assert ticket.error is None
        ticket.close()
        self._here.remove(entry)
        stats = ticket.stats
        assert stats is not None
        assert stats.new_tokens == len(tokens)
        kv = None
        if sequence is not None:
            kv = self.engine.kv_bytes(sequence) if asked.taken is None else None
            sequence.release()
        self.found[number] = Outcome(tuple(tokens), stats.fingerprint, stats.finish_reason, kv)


def sampled(seed: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=seed, max_tokens=max_tokens
    )


def mixed(seed: int, count: int = 8) -> list[Asked]:
    """Greedy and sampled, with drafts and without, with and without reuse, of all lengths."""
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        size = rng.choice((1, 2, 15, 16, 17, 63, 64, 65, 100, 150))
        limit = rng.choice((1, 2, 7, 20, 40))
        greedy = SamplingParams(temperature=0.0, max_tokens=limit)
        asked.append(
            Asked(
                prompt(rng.randrange(3), size),
                rng.choice((greedy, sampled(number, limit))),
                kept=rng.random() < 0.4,
                taken=rng.choice((None, None, None, 1, 3)) if limit > 3 else None,
                reuse=rng.random() < 0.7,
                options={"speculate": rng.choice(("off", "off", "auto", 3))},
                constraint=rng.choice((lambda: None, lambda: None, Spans)),
            )
        )
    return asked


def check(engine: Engine, asked: list[Asked], seed: int, **options: Any) -> None:
    wanted = [alone(engine, a) for a in asked]
    engine.prefixes.clear()
    found = Party(engine, asked, seed, **options).run()
    for number, want in enumerate(wanted):
        got = found[number]
        assert got == (want if asked[number].taken is None else replace(want, kv=None)), number
    assert engine.pages.num_used == engine.prefixes.num_pages


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(tiny_artifact: Get, family: str) -> None:
    with engines.opened(tiny_artifact(family), threads=1, num_sequences=6, chunk=64) as engine:
        check(engine, mixed(1), 1)


@pytest.mark.parametrize(("kernels", "threads"), TIERED)
@pytest.mark.parametrize("seed", range(3))
def test_every_tier(tiny_artifact: Get, kernels: str | None, threads: int, seed: int) -> None:
    with engines.opened(
        tiny_artifact("qwen3"), kernels, threads, num_sequences=5, chunk=50
    ) as engine:
        check(engine, mixed(seed), seed)


def test_the_definition(tiny_artifact: Get) -> None:
    asked = [replace(a, prompt=a.prompt[:20]) for a in mixed(5, 3)]
    with engines.opened(tiny_artifact("llama"), "reference", num_sequences=3, chunk=8) as engine:
        check(engine, asked, 0)


@pytest.mark.parametrize("chunk", [1, 2, 5, 17, 512])
def test_any_rows_of_a_pass(tiny_artifact: Get, chunk: int) -> None:
    with engines.opened(tiny_artifact("llama"), threads=1, num_sequences=4, chunk=chunk) as engine:
        check(engine, mixed(chunk), chunk)


@pytest.mark.parametrize("seed", range(4))
def test_room_for_one_is_enough(tiny_artifact: Get, seed: int) -> None:
    """They wait for each other, and those whose tokens nobody takes give way."""
    asked = [replace(a, kept=False) for a in mixed(seed)]
    with engines.opened(tiny_artifact("llama"), threads=1, num_sequences=1) as engine:
        check(engine, asked, seed)


@pytest.mark.parametrize("family", tiny.MIXTURES)
@pytest.mark.parametrize(
    "experts",
    [None, StreamOptions(9, 32, reserve=3), StreamOptions(5, 32, reserve=2, sweep_slots=4)],
    ids=["all", "streamed", "swept"],
)
def test_mixtures(tiny_artifact: Get, family: str, experts: StreamOptions | None) -> None:
    with engines.opened(
        tiny_artifact(family), threads=1, num_sequences=5, chunk=60, experts=experts
    ) as engine:
        check(engine, mixed(2), 2)


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule(tiny_artifact: Get, seed: int) -> None:
    rng = random.Random(1000 + seed)
    with engines.opened(
        tiny_artifact(rng.choice(("llama", "qwen2"))),
        threads=1,
        num_sequences=rng.choice((2, 3, 6)),
        chunk=rng.choice((16, 40, 200)),
    ) as engine:
        # Those who hold their pages could wait for each other for ever.
        asked = [replace(a, kept=a.kept and seed % 2 == 0) for a in mixed(seed, 10)]
        check(engine, asked, seed, hold=seed % 2 == 1)


def test_one_whose_tokens_nobody_takes_stands_still(tiny_artifact: Get) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    with engines.opened(tiny_artifact("llama"), threads=1, num_sequences=2) as engine:
        engine.end_tokens = frozenset()
        scheduler = Scheduler(engine)
        idle, busy = (Ticket(engine.generation(prompt(i, 9), params)) for i in range(2))
        for each in (idle, busy):
            scheduler.submit(each)
        count = 0
        while not busy.ended:
            scheduler.step()
            while busy.pop():
                count += 1
        assert count == 100
        assert len(idle.tokens) == AHEAD
