"""A host's parallel-for: same tokens and blobs; a broken one makes no token and can be repeated with a good one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from embed.frames import PROMPT, Frame, generated, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors
from headrace.kernels.select import TIERS

Get = Callable[[str], Artifact]
Task = Callable[[int], None]


def on_threads(count: int, task: Task) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(task, reversed(range(count))))


class Hook:
    """Good, until it is told how to be wrong, from its `after`-th call on."""

    def __init__(self, fault: str = "", after: int = 0) -> None:
        self.calls = 0
        self.fault = fault
        self.after = after

    def __call__(self, count: int, task: Task) -> None:
        self.calls += 1
        wrong = self.fault if self.calls > self.after else ""
        indices = list(range(count))
        if wrong == "omit":
            indices.pop()
        elif wrong == "repeat":
            indices.append(0)
        elif wrong == "invent":
            indices.append(count)
        elif wrong == "float":
            task(0.0)  # type: ignore[arg-type]
            del indices[0]
        elif wrong == "none":
            task(None)  # type: ignore[arg-type]
        for index in indices:
            task(index)


@pytest.mark.parametrize("kernels", [t for t in TIERS if t != "reference"])
@pytest.mark.parametrize("matvec", [False, True])
@pytest.mark.parametrize("max_tasks", [0, 1, 2, 7, 256])
def test_tokens_are_the_same(wide: Artifact, kernels: str, matvec: bool, max_tasks: int) -> None:
    with (
        opened(wide, kernels) as frame,
        frame.new(PROMPT[:9]) as plain,
        frame.new(PROMPT[:9]) as split,
    ):
        wanted = generated(frame, plain, 3)
        hook = Hook()

        def run(count: int, task: Task) -> None:
            hook(count, lambda index: None)
            on_threads(count, task)

        frame.space.set_parallel_for(embed.ParallelFor(run, max_tasks, matvec))
        assert generated(frame, split, 3, 1) == wanted
        assert split.save() == plain.save()
        assert bool(hook.calls) == (max_tasks > 1)
        frame.space.set_parallel_for(None)
        before = hook.calls
        generated(frame, split, 1)
        assert hook.calls == before


@pytest.mark.parametrize(
    ("fault", "kernels"),
    [(fault, None) for fault in ("omit", "repeat", "invent", "float", "none")]
    + [(fault, "reference") for fault in ("omit", "float", "none")],
)
def test_a_broken_finish_is_repeated(wide: Artifact, fault: str, kernels: str | None) -> None:
    with opened(wide, kernels) as frame, frame.new(PROMPT[:5]) as sequence:
        before = sequence.save()
        frame.space.set_parallel_for(embed.ParallelFor(Hook(fault), 4))
        for _ in range(2):
            with pytest.raises(errors.ParallelForIncompleteError):
                step(frame, sequence)
            assert sequence.save() == before
        frame.space.set_parallel_for(embed.ParallelFor(Hook(), 4))
        with frame.new(PROMPT[:5]) as plain:
            assert generated(frame, sequence, 2) == generated(frame, plain, 2)


@pytest.mark.parametrize("after", range(8))
def test_a_break_within_a_layer_leaves_the_layers_before_it(wide: Artifact, after: int) -> None:
    with opened(wide) as frame, frame.new(PROMPT[:5]) as sequence, frame.new(PROMPT[:5]) as plain:
        generated(frame, sequence, 1)
        hook = Hook("omit", after)
        frame.space.set_parallel_for(embed.ParallelFor(hook, 4, matvec=True))
        with pytest.raises(errors.ParallelForIncompleteError):
            generated(frame, sequence, 99)
        depth = sequence.depth
        frame.space.set_parallel_for(None)
        while len(plain.tokens) < len(sequence.tokens):
            step(frame, plain)
        if depth:
            assert step(frame, plain, depth) == embed.MidToken(depth)
        elif sequence.ready:  # all layers were done
            plain.restore(sequence.save())
        assert sequence.save() == plain.save()
        assert generated(frame, sequence, 2) == generated(frame, plain, 2)


def test_a_prefill_of_one_token(wide: Artifact) -> None:
    """With the flag its projections are split; one that fails has read nothing."""
    with opened(wide) as frame, frame.new(PROMPT[:5]) as sequence:
        before = sequence.stats()
        frame.space.set_parallel_for(embed.ParallelFor(Hook("repeat"), 4, matvec=True))
        with pytest.raises(errors.ParallelForIncompleteError) as caught:
            embed.prefill(sequence, [7], frame.space)
        assert caught.value.consumed == 0
        assert sequence.stats() == before
        embed.prefill(sequence, [7, 8], frame.space)  # two rows: the hook is not asked
        with frame.new([*PROMPT[:5], 7, 8]) as plain:
            assert plain.save() == sequence.save()


def test_a_break_makes_no_token_for_anybody(wide: Artifact) -> None:
    with opened(wide) as frame:
        lines = [frame.new(PROMPT[:n]) for n in (4, 6, 9)]
        generated(frame, lines[1], 1)
        before = [line.save() for line in (lines[0], lines[2])]
        frame.space.set_parallel_for(embed.ParallelFor(Hook("omit"), 4))
        with pytest.raises(errors.ParallelForIncompleteError):
            embed.decode_step(lines, 99, frame.space)
        assert [line.save() for line in (lines[0], lines[2])] == before
        assert lines[1].ready
        frame.space.set_parallel_for(None)
        found = embed.decode_step(lines, 99, frame.space)
        alone = [
            generated(frame, frame.new(PROMPT[:n]), c)[-1] for n, c in ((4, 1), (6, 2), (9, 1))
        ]
        assert found == [embed.Token(t) for t in alone]


def test_hooks_that_cannot_be_installed(tiny_artifact: Get) -> None:
    def run(count: int, task: Task) -> None: ...

    with (
        opened(tiny_artifact("llama"), threads=2) as frame,
        pytest.raises(errors.ParallelForInvalidError),
    ):
        frame.space.set_parallel_for(embed.ParallelFor(run, 2))
    with opened(tiny_artifact("llama")) as frame:
        refused(frame, embed.ParallelFor(run, -1))
        refused(frame, embed.ParallelFor(run, 257))
        refused(frame, embed.ParallelFor(None, 2))  # type: ignore[arg-type]
        refused(frame, run)


def refused(frame: Frame, hook: object) -> None:
    with pytest.raises(errors.ParallelForInvalidError):
        frame.space.set_parallel_for(hook)  # type: ignore[arg-type]
