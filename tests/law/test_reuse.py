"""The law for a kept sequence: going on with it gives the tokens and logits of reading all anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence
from headrace.errors import ContextError, InputError
from headrace.kernels.select import TIERS
from headrace.values import SamplingParams
from law.engines import opened

FIRST = [(7 * i * i + 3 * i) % 256 for i in range(150)]
# Around tiles of 16 and pages of 64.
SHARED = (0, 1, 15, 16, 17, 31, 63, 64, 65, 100, 128, 129, 149)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=10)

Outcome = tuple[tuple[int, ...], str]  # tokens and fingerprint
Get = Callable[[str], Artifact]


def run(engine: Engine, prompt: list[int], sequence: Sequence | None = None) -> Outcome:
    tokens = tuple(t.id for t in engine.generate(prompt, SAMPLED, sequence=sequence, reuse=False))
    assert engine.stats is not None
    return tokens, engine.stats.fingerprint


def reused(engine: Engine) -> int:
    assert engine.stats is not None
    return engine.stats.reused_tokens


def after(shared: int, length: int = 40) -> list[int]:
    """A prompt that leaves FIRST after `shared` tokens."""
    rest = [(FIRST[shared] + 1 + 11 * i) % 256 for i in range(length)]
    return FIRST[:shared] + rest


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_reuse_of_any_length_equals_a_new_sequence(tiny_artifact: Get, family: str) -> None:
    with opened(tiny_artifact(family)) as engine:
        kept = engine.new_sequence()
        for shared in SHARED:
            run(engine, FIRST, kept)
            assert run(engine, after(shared), kept) == run(engine, after(shared))
            run(engine, after(shared), kept)
            assert reused(engine) == shared + 39  # all but the last, whose logits are wanted


@pytest.mark.parametrize("kernels", TIERS)
def test_every_tier(tiny_artifact: Get, kernels: str) -> None:
    with opened(tiny_artifact("qwen3"), kernels, chunk=50) as engine:
        wanted = [run(engine, after(shared)) for shared in (17, 70)]
        kept = engine.new_sequence()
        run(engine, FIRST, kept)
        assert [run(engine, after(70), kept), reused(engine)] == [wanted[1], 70]
        assert [run(engine, after(17), kept), reused(engine)] == [wanted[0], 17]


def test_an_answer_is_reused_up_to_its_last_token(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        kept = engine.new_sequence()
        answer = run(engine, FIRST, kept)[0]
        longer = [*FIRST, *answer, 5, 6, 7]
        assert run(engine, longer, kept) == run(engine, longer)
        run(engine, longer, kept)
        assert reused(engine) == len(longer) - 1
        assert run(engine, FIRST, kept) == run(engine, FIRST)  # back again


@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("steps", range(5))
def test_after_a_cancelled_generation(tiny_artifact: Get, steps: int, chunk: int) -> None:
    """Cancelled between tokens, between chunks of the prompt, or before anything."""
    with opened(tiny_artifact("llama"), chunk=chunk) as engine:
        kept, asked = engine.new_sequence(), 0

        def cancel() -> bool:
            nonlocal asked
            asked += 1
            return asked > steps

        list(engine.generate(FIRST, SAMPLED, cancel=cancel, sequence=kept))
        assert engine.stats is not None
        assert engine.stats.finish_reason == "cancelled"
        held = kept.tokens
        assert held[: len(FIRST)] == tuple(FIRST)[: len(held)]
        assert run(engine, [*FIRST, 9], kept) == run(engine, [*FIRST, 9])
        run(engine, FIRST, kept)
        assert run(engine, after(33), kept) == run(engine, after(33))


def test_after_a_generation_that_was_closed(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        kept = engine.new_sequence()
        steps = engine.generate(FIRST, SAMPLED, sequence=kept)
        next(steps), next(steps)
        steps.close()
        assert run(engine, [*FIRST, 9], kept) == run(engine, [*FIRST, 9])


def test_statistics_count_what_was_reused(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        kept = engine.new_sequence()
        found = []
        for prompt in (FIRST, after(64), after(64), FIRST[:1]):
            run(engine, prompt, kept)
            stats = engine.stats
            assert stats is not None
            found.append((stats.prompt_tokens, stats.reused_tokens, stats.read_tokens))
        assert found == [(150, 0, 150), (104, 64, 40), (104, 103, 1), (1, 0, 1)]
        run(engine, FIRST)
        assert reused(engine) == 0


def test_a_refused_prompt_leaves_the_sequence_alone(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        kept = engine.new_sequence()
        run(engine, FIRST, kept)
        held = kept.tokens
        with pytest.raises(ContextError):
            engine.generate(FIRST * 2, SAMPLED, sequence=kept)
        with pytest.raises(InputError, match="no tokens"):
            engine.generate([], SAMPLED, sequence=kept)
        with pytest.raises(InputError, match="not in the vocabulary"):
            engine.generate([*FIRST, 10**6], SAMPLED, sequence=kept)
        assert kept.tokens == held
        assert run(engine, after(20), kept) == run(engine, after(20))
