"""Damped steps: what the definition chooses, in any slices, through a save, and without growing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from embed.frames import CONTEXT, PROMPT, Frame, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors
from headrace.engine.damped import Damped, DampedParams
from headrace.engine.engine import Engine

Get = Callable[[str], Artifact]


@pytest.fixture
def frame(tiny_artifact: Get) -> Iterator[Frame]:
    with opened(tiny_artifact("llama")) as made:
        yield made


def damped(
    frame: Frame, sequence: embed.Sequence, count: int, budget: int = 99, **changes: int
) -> list[int]:
    params = embed.decode_params(frame.model, "damped", budget, **changes)
    out: list[int] = []
    while len(out) < count:
        if isinstance(outcome := step(frame, sequence, params=params), embed.Token):
            out.append(outcome.id)
    return out


def defined(artifact: Artifact, params: DampedParams, count: int) -> list[int]:
    with Engine(artifact, threads=1, max_context=CONTEXT) as engine:
        sequence, due, out = engine.new_sequence(), PROMPT, list[int]()
        state = Damped(params, engine.config.vocab_size, engine.fraction_bits)
        while len(out) < count:
            token = state.pick(engine.read(sequence, due), None)
            state.note(token)
            out.append(token)
            due = [token]
        sequence.release()
        return out


@pytest.mark.parametrize("changes", [{}, {"alpha_q15": 2**20 - 1, "max_order": 4, "top_k": 30}])
def test_tokens_are_the_definitions(
    frame: Frame, tiny_artifact: Get, changes: dict[str, int]
) -> None:
    wanted = defined(tiny_artifact("llama"), DampedParams(**changes), 24)
    assert wanted != defined(tiny_artifact("llama"), DampedParams(alpha_q15=0), 24)
    for budget in (1, 99):
        with frame.new(PROMPT) as sequence:
            assert damped(frame, sequence, 24, budget, **changes) == wanted


def test_the_history_is_saved_and_greedy_tokens_are_in_it(frame: Frame) -> None:
    sequence = frame.new(PROMPT)
    for _ in range(6):
        step(frame, sequence)
    damped(frame, sequence, 6)
    with frame.new() as other:
        other.restore(sequence.save())
        assert np.array_equal(other.answer, sequence.answer)
        assert len(other.answer) == 12
        assert damped(frame, other, 20, 1) == damped(frame, sequence, 20)
        other.reset()
        assert len(other.answer) == 0


def test_without_damping_it_is_greedy(frame: Frame) -> None:
    with frame.new(PROMPT) as plain, frame.new(PROMPT) as other:
        wanted = [step(frame, plain).code for _ in range(10)]
        assert damped(frame, other, 10, alpha_q15=0) == wanted


def test_defaults(frame: Frame) -> None:
    assert embed.decode_params(frame.model, "greedy", 3) == embed.DecodeParams(3)
    assert embed.decode_params(frame.model, "damped", 3).damped == DampedParams(65536, 2, 6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha_q15": -1},
        {"alpha_q15": 2**20},
        {"max_order": 0},
        {"top_k": 0},
        {"top_k": 10**6},
        {"beta": 1},
    ],
)
def test_refusals(frame: Frame, wrong: dict[str, int]) -> None:
    with frame.new(PROMPT) as sequence:
        before = sequence.save()
        with pytest.raises(errors.InvalidArgumentError):
            damped(frame, sequence, 1, **wrong)
        assert sequence.save() == before


def test_greedy_steps_do_not_read_damped_parameters(frame: Frame) -> None:
    params = embed.DecodeParams(9, "greedy", DampedParams(top_k=10**6))
    with frame.new(PROMPT) as sequence, frame.new(PROMPT) as plain:
        assert step(frame, sequence, params=params) == step(frame, plain)
