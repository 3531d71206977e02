"""Any interleaving of calls leaves each sequence what its own calls alone, in whole steps, make of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

import loras
from embed.frames import Frame, generated, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Get = Callable[[str], Artifact]
Event = list[int] | embed.Adapter | str | None  # a prefill, a change of adapter, or a token


class Line:
    """A sequence, and what was done to it."""

    def __init__(self, frame: Frame) -> None:
        self.sequence = frame.new()
        self.events: list[Event] = []

    def replayed(self, frame: Frame) -> bytes:
        """What a new sequence is after the same."""
        with frame.new() as other:
            for event in self.events:
                if isinstance(event, list):
                    embed.prefill(other, event, frame.space)
                elif isinstance(event, str):
                    generated(frame, other, 1)
                else:
                    other.set_adapter(event)
            depth = self.sequence.depth
            if depth:
                assert step(frame, other, depth) == embed.MidToken(depth)
            return other.save()


def act(rng: random.Random, frame: Frame, lines: list[Line], adapters: list[embed.Adapter]) -> None:
    line = rng.choice(lines)
    sequence, what = line.sequence, rng.random()
    if what < 0.2:
        tokens = [rng.randrange(256) for _ in range(rng.randint(1, 20))]
        try:
            embed.prefill(sequence, tokens, frame.space)
            line.events.append(tokens)
        except errors.MidTokenError:
            assert sequence.depth
    elif what < 0.3 and adapters:
        adapter = rng.choice([None, *adapters])
        if not sequence.depth:
            sequence.set_adapter(adapter)
            line.events.append(adapter)
    elif what < 0.4:
        blob, adapter = sequence.save(), sequence.adapter
        if rng.random() < 0.5:
            sequence.release()
            line.sequence = frame.new()
        line.sequence.restore(blob, adapter=adapter)
    elif what < 0.43:
        sequence.reset()
        line.events = [sequence.adapter]
    else:
        going = rng.sample(lines, rng.randint(1, len(lines)))
        found = embed.decode_step([one.sequence for one in going], rng.randint(1, 4), frame.space)
        for one, outcome in zip(going, found, strict=True):
            if isinstance(outcome, embed.Token):
                one.events.append("token")
            elif isinstance(outcome, embed.Refused):
                assert isinstance(outcome.error, errors.NothingToDecodeError)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe"])
@pytest.mark.parametrize("seed", range(4))
def test_any_interleaving(
    tiny_artifact: Get, tmp_path_factory: pytest.TempPathFactory, family: str, seed: int
) -> None:
    artifact, rng = tiny_artifact(family), random.Random(seed)
    path = tmp_path_factory.mktemp("interleaved")
    slots = 14 if family == "qwen2_moe" else None
    with opened(artifact, expert_slots=slots, num_blocks=64, context=1024) as frame:
        adapters = [
            embed.Adapter(frame.model, loras.make(path / str(i), artifact, seed=i).path)
            for i in range(2 * (family == "qwen3"))
        ]
        lines = [Line(frame) for _ in range(3)]
        for _ in range(150):
            act(rng, frame, lines, adapters)
        for line in lines:
            assert line.replayed(frame) == line.sequence.save()
            line.sequence.release()
        assert frame.pool.blocks_used == 0
