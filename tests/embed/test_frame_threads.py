"""Calls on different sequences with different workspaces run side by side; what is shared between two is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embed.frames import PROMPT, Frame, make_workspace, opened
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Get = Callable[[str], Artifact]


def life(frame: Frame, space: embed.Workspace, seed: int, prefix: embed.Prefix) -> list[bytes]:
    """Some sequences, one after the other."""
    out = []
    for n in range(4):
        with frame.new() as sequence:
            sequence.adopt_prefix(prefix)
            embed.prefill(sequence, PROMPT[seed : seed + 5 + n], space)
            tokens = 0
            while tokens < 4:
                found = embed.decode_step([sequence], 1, space)
                tokens += isinstance(found[0], embed.Token)
            out.append(sequence.save())
    return out


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_side_by_side_is_one_after_the_other(tiny_artifact: Get, family: str) -> None:
    slots = 20 if family == "qwen3_moe" else None
    with opened(tiny_artifact(family), expert_slots=slots, max_sequences=8) as frame:
        with embed.Prefix(frame.pool) as prefix:
            prefix.prefill(PROMPT[:40], frame.space)
            prefix.freeze()
            wanted = [life(frame, frame.space, seed, prefix) for seed in range(4)]
            spaces = [make_workspace(frame.model) for _ in range(4)]
            with ThreadPoolExecutor(4) as pool:
                found = pool.map(lambda i: life(frame, spaces[i], i, prefix), range(4))
                assert list(found) == wanted
        assert frame.pool.blocks_used == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads cannot be counted here")
def test_no_thread_is_started(tiny_artifact: Get) -> None:
    before = set(os.listdir("/proc/self/task"))
    with opened(tiny_artifact("llama")) as frame, frame.new(PROMPT) as sequence:
        embed.decode_step([sequence], 9, frame.space)
        embed.decode_step([sequence], 9, frame.space)
        assert set(os.listdir("/proc/self/task")) <= before


def paused(
    frame: Frame, sequence: embed.Sequence, during: Callable[[], None]
) -> list[embed.Outcome]:
    """A step of the sequence on another thread, with `during` called in the middle of its finish."""
    inside, leave = threading.Event(), threading.Event()

    def run(count: int, task: Callable[[int], None]) -> None:
        inside.set()
        leave.wait(30)
        for index in range(count):
            task(index)

    frame.space.set_parallel_for(embed.ParallelFor(run, 2))
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(embed.decode_step, [sequence], 9, frame.space)
            assert inside.wait(30)
            try:
                during()
            finally:
                leave.set()
            return running.result()
    finally:
        frame.space.set_parallel_for(None)


def test_a_sequence_that_is_released_during_its_step_is_gone(wide: Artifact) -> None:
    with opened(wide) as frame:
        sequence = frame.new(PROMPT)
        used = frame.pool.blocks_used

        def during() -> None:
            sequence.release()
            assert frame.pool.blocks_used == used  # until the step has ended

        assert paused(frame, sequence, during) == [embed.Gone()]
        assert frame.pool.blocks_used == 0
        assert frame.pool.num_sequences == 0


def test_what_a_running_call_uses_is_busy(wide: Artifact) -> None:
    with opened(wide) as frame, frame.new(PROMPT) as sequence:
        other, second = frame.new(), make_workspace(frame.model)

        def during() -> None:
            for call in (
                sequence.save,
                sequence.reset,
                lambda: embed.prefill(sequence, [1], second),
                lambda: embed.prefill(other, [1], frame.space),
                frame.space.destroy,
                lambda: frame.space.set_parallel_for(None),
            ):
                with pytest.raises(errors.BusyError):
                    call()
            found = embed.decode_step([sequence], 1, second)
            assert isinstance(found[0], embed.Refused)
            assert isinstance(found[0].error, errors.BusyError)

        found = paused(frame, sequence, during)
        assert isinstance(found[0], embed.Token)
