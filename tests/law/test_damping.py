"""The law for damped greedy decoding: a pick is a function of logits and history, so nothing else changes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.engine.damped import Damped, DampedParams
from headrace.engine.engine import Engine
from headrace.engine.speculate import Speculate
from headrace.errors import SettingError
from headrace.kernels.select import TIERS
from headrace.values import SamplingParams
from law.engines import opened

Get = Callable[[str], Artifact]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(55)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
# A random model repeats itself at once: damped so much, it still does now and then.
DAMPED = DampedParams(alpha_q15=2**18, max_order=3, top_k=5)


def run(
    engine: Engine,
    damped: DampedParams | None = DAMPED,
    speculate: Speculate = "off",
    params: SamplingParams = GREEDY,
) -> tuple[list[int], str, bytes]:
    sequence = engine.new_sequence()
    steps = engine.generate(PROMPT, params, sequence=sequence, damped=damped, speculate=speculate)
    tokens = [token.id for token in steps]
    assert engine.stats is not None
    kv = engine.kv_bytes(sequence)
    sequence.release()
    return tokens, engine.stats.fingerprint, kv


def test_it_is_what_its_picks_say(tiny_artifact: Get) -> None:
    """Token by token, over logits that plain reading gives."""
    with opened(tiny_artifact("llama"), threads=1) as engine:
        tokens, _, _ = run(engine)
        assert tokens != run(engine, None)[0]
        logits = engine.logits(PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
        damped = Damped(DAMPED, engine.config.vocab_size, engine.fraction_bits)
        for row, token in zip(logits, tokens, strict=True):
            assert damped.pick(row) == token
            damped.note(token)


def test_without_damping_it_is_greedy(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama"), threads=1) as engine:
        assert run(engine, DampedParams(alpha_q15=0)) == run(engine, None)


@pytest.mark.parametrize("kernels", TIERS)
def test_every_tier(tiny_artifact: Get, kernels: str) -> None:
    params = replace(GREEDY, max_tokens=10)
    with opened(tiny_artifact("qwen3"), threads=1) as engine:
        wanted = run(engine, params=params)
    with opened(tiny_artifact("qwen3"), kernels) as engine:
        assert run(engine, params=params) == wanted
        assert run(engine, speculate=3, params=params) == wanted


@pytest.mark.parametrize("family", ["llama", *tiny.MIXTURES])
def test_chunks_threads_and_drafts(tiny_artifact: Get, family: str) -> None:
    with opened(tiny_artifact(family), threads=1) as engine:
        wanted = run(engine)
        for depth in (1, 4, 8, "auto"):
            assert run(engine, speculate=depth) == wanted, depth
    for chunk, threads in ((1, 1), (7, 2)):
        with opened(tiny_artifact(family), chunk=chunk, threads=threads) as engine:
            assert run(engine) == wanted
            assert run(engine, speculate=4) == wanted


def test_penalties_come_first(tiny_artifact: Get) -> None:
    params = replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5)
    with opened(tiny_artifact("llama"), threads=1) as engine:
        wanted = run(engine, params=params)
        assert wanted != run(engine)
        assert run(engine, speculate=5, params=params) == wanted


def test_the_prompt_is_no_history(tiny_artifact: Get) -> None:
    """A generation that goes on from another's tokens begins with nothing to repeat."""
    with opened(tiny_artifact("llama"), threads=1) as engine:
        tokens, _, _ = run(engine)
        longer = PROMPT + tokens[:20]
        first = next(iter(engine.generate(longer, GREEDY, damped=DAMPED)))
        plain = next(iter(engine.generate(longer, GREEDY)))
        assert first == plain


def test_sampling_is_refused(tiny_artifact: Get) -> None:
    with (
        opened(tiny_artifact("llama"), threads=1) as engine,
        pytest.raises(SettingError, match="damped"),
    ):
        engine.generate(PROMPT, SamplingParams(temperature=0.5), damped=DAMPED)
    with (
        opened(tiny_artifact("llama"), threads=1) as engine,
        pytest.raises(SettingError, match="top_k is 999"),
    ):
        engine.generate(PROMPT, GREEDY, damped=DampedParams(top_k=999))
