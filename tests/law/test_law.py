"""The one law: tokens and logits are a function of (artifact, token ids, sampling, seed) and nothing else.

One parametrised test over the knobs; each capability adds its own. Equality, never a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.sequence import Work
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import TIERS, unavailable
from headrace.values import SamplingParams

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=0, max_tokens=12)


@dataclass(frozen=True)
class Knobs:
    """One way to run the same thing."""

    kernels: str | None = None
    threads: int = 1
    chunk: int = 512
    mates: int = 0  # sequences that run beside it in every pass
    experts: StreamOptions | None = None  # of a mixture; None holds all of them
    resized: bool = False  # the pool shrinks and grows after every token
    lies: bool = False  # every guess of the lookahead is wrong
    pairs: int | None = None  # (row, expert) pairs that kernels hold at once

    def __str__(self) -> str:
        text = f"{self.kernels or 'auto'}-{self.threads}t-chunk{self.chunk}-{self.mates}mates"
        if self.experts is not None:
            e = self.experts
            text += f"-{e.slots}slots-{e.reserve}ahead-{e.num_lanes}lanes"
        text += "" if self.pairs is None else f"-{self.pairs}pairs"
        return text + "-resized" * self.resized + "-lies" * self.lies


@dataclass(frozen=True)
class Outcome:
    """Everything that must not change."""

    logits: bytes
    kv: bytes
    tokens: tuple[int, ...]
    fingerprint: str


KNOBS = [
    *(Knobs(kernels=tier) for tier in TIERS if tier != "reference"),
    *(Knobs(threads=t) for t in (2, 3)),
    *(Knobs(chunk=c) for c in (1, 7, 64)),
    *(Knobs(mates=m) for m in (1, 3)),
    Knobs(threads=3, chunk=7, mates=2),
    Knobs(kernels="portable", threads=2, chunk=5, mates=1),
]
MIXTURE_KNOBS = [
    *KNOBS,
    *(Knobs(experts=StreamOptions(slots, 32)) for slots in (4, 5, 9, 16)),
    *(Knobs(experts=StreamOptions(9, 32, reserve=3, num_lanes=n), threads=2) for n in (1, 3)),
    Knobs(experts=StreamOptions(5, 32, reserve=2, sweep_slots=4), chunk=40, mates=2),
    Knobs(experts=StreamOptions(8, 32, reserve=3), resized=True),
    Knobs(experts=StreamOptions(8, 32, reserve=3), lies=True),
    *(Knobs(threads=t, pairs=n) for t, n in ((1, 1), (2, 24), (3, 100))),
    *(Knobs(threads=t, pairs=7, experts=StreamOptions(9, 32, reserve=2)) for t in (1, 2, 3)),
    Knobs(threads=2, pairs=50, chunk=64, experts=StreamOptions(5, 32, sweep_slots=4), mates=2),
    Knobs(kernels="portable", pairs=20, experts=StreamOptions(8, 32, reserve=3), resized=True),
    Knobs(kernels="reference", experts=StreamOptions(6, 32, reserve=2), threads=1),
    Knobs(kernels="portable", experts=StreamOptions(6, 32, reserve=2), threads=3),
]


def outcome(artifact: Artifact, knobs: Knobs) -> Outcome:
    reason = unavailable().get(knobs.kernels or "", "")
    if reason:
        pytest.skip(f"tier {knobs.kernels}: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        if knobs.pairs is not None:
            patch.setattr("headrace.kernels.native.MAX_PAIRS", knobs.pairs)
        engine = _engine(artifact, knobs)
    with engine:
        if knobs.lies:
            _make_guesses_wrong(engine)
        logits, kv = _read(engine, knobs)
        tokens = tuple(_generate(engine, knobs))
        assert engine.stats is not None
        assert set(engine.stats.saturations.values()) == {0}
        return Outcome(logits, kv, tokens, engine.stats.fingerprint)


def _engine(artifact: Artifact, knobs: Knobs) -> Engine:
    return Engine(
        artifact,
        kernels=knobs.kernels,
        threads=knobs.threads,
        chunk=max(knobs.chunk, knobs.mates + 1),
        logit_rows=max(knobs.chunk, knobs.mates + 1),
        max_context=256,
        num_sequences=knobs.mates + 2,
        experts=knobs.experts,
    )


def _generate(engine: Engine, knobs: Knobs) -> Iterator[int]:
    for number, token in enumerate(engine.generate(PROMPT, SAMPLED)):
        yield token.id
        if knobs.resized:
            assert engine.experts is not None
            engine.experts.resize((4, 20, 7, 12)[number % 4])


def _make_guesses_wrong(engine: Engine) -> None:
    stream = engine.experts
    assert stream is not None
    prefetch, count = stream.prefetch, stream.slots.table.shape[1]
    stream.prefetch = lambda layer, experts: prefetch(  # type: ignore[method-assign]
        layer, [e for e in range(count) if e not in experts]
    )


def _read(engine: Engine, knobs: Knobs) -> tuple[bytes, bytes]:
    """Read the prompt in chunks beside the mates: logits of every position, and the KV bytes."""
    own = engine.new_sequence()
    mates = [engine.new_sequence() for _ in range(knobs.mates)]
    room = (knobs.chunk if not mates else max(knobs.chunk, len(mates) + 1)) - len(mates)
    parts = []
    for at in range(0, len(PROMPT), room):
        work = [Work(m, [(31 * at + 5 * i) % 256]) for i, m in enumerate(mates)]
        work.insert(len(mates) // 2, Work(own, PROMPT[at : at + room], all_logits=True))
        first = len(mates) // 2
        got = engine.forward(work)
        parts.append(got[first : first + len(work[first].tokens)].copy())
    logits, kv = np.concatenate(parts), engine.kv_bytes(own)
    assert logits.shape == (len(PROMPT), engine.config.vocab_size)
    for sequence in (own, *mates):
        sequence.release()
    return logits.tobytes(), kv


@pytest.fixture(scope="module")
def baseline(tiny_artifact: Callable[[str], Artifact]) -> Callable[[str], Outcome]:
    found: dict[str, Outcome] = {}

    def get(name: str) -> Outcome:
        if name not in found:
            found[name] = outcome(tiny_artifact(name), Knobs(kernels="reference"))
        return found[name]

    return get


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_nothing_else_changes_the_outcome(
    tiny_artifact: Callable[[str], Artifact],
    baseline: Callable[[str], Outcome],
    family: str,
    knobs: Knobs,
) -> None:
    got, wanted = outcome(tiny_artifact(family), knobs), baseline(family)
    assert got.tokens == wanted.tokens
    assert got.fingerprint == wanted.fingerprint
    assert got.logits == wanted.logits
    assert got.kv == wanted.kv


@pytest.mark.parametrize("family", tiny.MIXTURES)
@pytest.mark.parametrize("knobs", MIXTURE_KNOBS, ids=str)
def test_nothing_changes_the_outcome_of_a_mixture(
    tiny_artifact: Callable[[str], Artifact],
    baseline: Callable[[str], Outcome],
    family: str,
    knobs: Knobs,
) -> None:
    assert outcome(tiny_artifact(family), knobs) == baseline(family)


def test_a_seed_of_zero_is_a_seed_and_none_is_drawn(
    tiny_artifact: Callable[[str], Artifact],
) -> None:
    with Engine(tiny_artifact("llama"), max_context=256) as engine:

        def run(seed: int | None) -> tuple[tuple[int, ...], int]:
            params = SamplingParams(temperature=2.0, seed=seed, max_tokens=24)
            tokens = tuple(t.id for t in engine.generate(PROMPT[:5], params))
            assert engine.stats is not None
            return tokens, engine.stats.seed

        assert run(0) == run(0)
        assert run(0)[1] == 0
        assert run(0)[0] != run(1)[0]
        seeds = {run(None)[1] for _ in range(4)}
        assert len(seeds) == 4
        drawn = run(None)
        assert run(drawn[1]) == drawn
