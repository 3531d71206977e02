"""Sequences on one prefix cost it once, and are what they would be alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from embed.frames import PROMPT, generated, make_pool, opened
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Get = Callable[[str], Artifact]


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_shared_is_recomputed(tiny_artifact: Get, length: int) -> None:
    with opened(tiny_artifact("qwen3")) as frame, embed.Prefix(frame.pool) as prefix:
        prefix.prefill(PROMPT[:length], frame.space)
        prefix.freeze()
        with frame.new(PROMPT[:length]) as alone:
            wanted = generated(frame, alone, 3), alone.stats()
        sequences = [frame.new() for _ in range(4)]
        for sequence in sequences:
            sequence.adopt_prefix(prefix)
        used = frame.pool.blocks_used
        assert used == -(-length // 64)
        for sequence in sequences:
            assert (generated(frame, sequence, 3), sequence.stats()) == wanted
        own = (
            -(-(length + 2) // 64) - length // 64
        )  # what is new, and a partly filled block that is copied
        assert frame.pool.blocks_used == used + 4 * own
        prefix.release()
        generated(frame, sequences[0], 1)
        for sequence in sequences:
            sequence.release()
        assert frame.pool.blocks_used == 0


def test_another_prompt_behind_a_prefix(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, embed.Prefix(frame.pool) as prefix:
        prefix.prefill(PROMPT[:30], frame.space)
        prefix.freeze()
        for rest in ([1, 2], [3], [1, 2]):
            with frame.new() as sequence, frame.new([*PROMPT[:30], *rest]) as alone:
                sequence.adopt_prefix(prefix)
                embed.prefill(sequence, rest, frame.space)
                assert generated(frame, sequence, 4) == generated(frame, alone, 4)
                assert sequence.save() == alone.save()


def test_an_empty_prefix_is_a_no_op_that_ends_binding(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, embed.Prefix(frame.pool) as prefix:
        prefix.freeze()
        with frame.new() as sequence:
            sequence.adopt_prefix(prefix)
            assert sequence.stats().tokens == 0
            with pytest.raises(errors.SchemaBindError):
                sequence.set_schema(None)


def test_refusals(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, embed.Prefix(frame.pool) as prefix:
        prefix.prefill([1, 2], frame.space)
        with frame.new() as sequence, frame.new([5]) as other:
            with pytest.raises(errors.PrefixNotFrozenError):
                sequence.adopt_prefix(prefix)
            prefix.freeze()
            with pytest.raises(errors.SequenceNotEmptyError):
                other.adopt_prefix(prefix)
            for change in (
                lambda: prefix.prefill([3], frame.space),
                lambda: embed.prefill(prefix, [3], frame.space),
                lambda: prefix.set_schema(None),
                lambda: prefix.set_adapter(None),
            ):
                with pytest.raises(errors.PrefixFrozenError):
                    change()
            foreign = embed.Sequence(make_pool(frame.model))
            with pytest.raises(errors.InvalidArgumentError):
                foreign.adopt_prefix(prefix)
            sequence.adopt_prefix(prefix)
            assert sequence.tokens == (1, 2)
