"""What is computed lies in the caller's memory, nowhere beside it, and a step takes nothing that grows."""

from __future__ import annotations

import gc
import mmap
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from embed.frames import PROMPT, generated, opened
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Get = Callable[[str], Artifact]


@pytest.mark.parametrize("kernels", [None, "portable", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_buffers_are_used_and_not_overrun(
    tiny_artifact: Get, family: str, kernels: str | None
) -> None:
    """Whatever lies in them before; and a guard behind each is as it was."""
    with opened(tiny_artifact(family), kernels) as frame:
        with frame.new(PROMPT[:20]) as plain:
            wanted = generated(frame, plain, 3), plain.save()
        model, guard = frame.model, 4096
        size = embed.workspace_size(model, max_batch=2, max_chunk=16)
        pool_size = 2 * embed.kv_block_size(model) + embed.kv_pool_overhead(model, 2)
        for poison in (0x00, 0xA5, 0xFF):
            room, pool_room = embed.aligned(size + guard), embed.aligned(pool_size + guard)
            room[:], pool_room[:] = poison, poison
            space = embed.Workspace(model, room, max_batch=2, max_chunk=16)
            pool = embed.KVPool(model, pool_room, num_blocks=2, max_sequences=2)
            sequence = embed.Sequence(pool)
            embed.prefill(sequence, PROMPT[:20], space)
            out = []
            while len(out) < 3:
                outcome = embed.decode_step([sequence], 1, space)[0]
                out += [outcome.id] if isinstance(outcome, embed.Token) else []
            assert (out, sequence.save()) == wanted
            assert (room[size:] == poison).all()
            assert (pool_room[pool_size:] == poison).all()
            assert (room[:size] != poison).any()
            if kernels != "reference":  # it answers with copies
                assert within(space.runner.residual(1), room)
                assert within(space.runner.logits(1), room)
            assert within(pool.cache, pool_room)
            assert within(sequence.memory.residual, pool_room)
            sequence.release()
            pool.destroy()
            space.destroy()


def test_buffers_are_let_go_of(tiny_artifact: Get) -> None:
    """Though the objects are still there."""
    with opened(tiny_artifact("llama")) as frame:
        model = frame.model
        room = mmap.mmap(-1, embed.workspace_size(model))
        size = 2 * embed.kv_block_size(model) + embed.kv_pool_overhead(model, 2)
        pool_room = mmap.mmap(-1, size)
        space = embed.Workspace(model, room)
        pool = embed.KVPool(model, pool_room, num_blocks=2, max_sequences=2)
        sequence = embed.Sequence(pool)
        embed.prefill(sequence, PROMPT[:9], space)
        embed.decode_step([sequence], 1, space)
        for end in (sequence.release, pool.destroy, space.destroy):
            end()
        room.close()
        pool_room.close()
        assert embed.decode_step([sequence], 1, frame.space) == [embed.Gone()]
        with pytest.raises(errors.ReleasedError):
            _ = sequence.tokens


def within(part: np.ndarray, whole: np.ndarray) -> bool:
    return np.shares_memory(part, whole)


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
@pytest.mark.parametrize("mode", ["greedy", "damped"])
def test_steps_take_nothing_that_grows(tiny_artifact: Get, family: str, mode: str) -> None:
    with opened(tiny_artifact(family), context=1024, num_blocks=20) as frame:
        params = embed.decode_params(frame.model, mode, 1)  # type: ignore[arg-type]
        with frame.new(PROMPT) as sequence:

            def steps(count: int) -> None:
                for _ in range(count):
                    embed.decode_step_v2([sequence], params, frame.space)

            steps(100)
            tracemalloc.start()
            try:
                gc.collect()
                steps(50)
                gc.collect()
                first, _ = tracemalloc.get_traced_memory()
                steps(400)
                gc.collect()
                last, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert last - first < 2048
            assert peak - first < 200_000


def test_sizes_grow_with_what_they_are_for(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame:
        model = frame.model
        sizes = [
            embed.workspace_size(model, max_batch=b, max_chunk=c)
            for b, c in ((1, 1), (1, 64), (8, 64))
        ]
        assert sizes == sorted(set(sizes))
        one, two = (embed.kv_pool_overhead(model, n) for n in (1, 2))
        assert two == 2 * one
        for size in (*sizes, one, embed.kv_block_size(model)):
            assert size % embed.ALIGNMENT == 0
