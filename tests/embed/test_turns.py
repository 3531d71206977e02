"""A mixture's experts: waited for from threads, refused where waiting could be for oneself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tiny
from embed.frames import PROMPT, Frame, generated, make_workspace, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Task = Callable[[int], None]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder: Path = tmp_path_factory.mktemp("mixture") / "model"
    sizes = {"hidden_size": 512, "vocab_size": 4096, "intermediate_size": 512}
    return tiny.make(folder, "mixtral", **sizes)


@pytest.fixture
def frame(mixture: Artifact) -> Iterator[Frame]:
    with opened(mixture) as made:
        yield made


@pytest.mark.parametrize("other_call", ["step", "prefill"])
def test_a_call_inside_of_a_hook_is_refused(frame: Frame, other_call: str) -> None:
    space, found = make_workspace(frame.model), list[errors.EmbedError]()
    with frame.new(PROMPT[:9]) as sequence, frame.new(PROMPT[:9]) as other:
        wanted, before = generated(frame, frame.new(PROMPT[:9]), 2), other.save()
        calls = {
            "step": lambda: embed.decode_step([other], 9, space),
            "prefill": lambda: embed.prefill(other, [5], space),
        }

        def run(count: int, task: Task) -> None:
            with pytest.raises(errors.BusyError) as caught:
                calls[other_call]()
            found.append(caught.value)
            for index in range(count):
                task(index)

        frame.space.set_parallel_for(embed.ParallelFor(run, 4, matvec=True))
        assert generated(frame, sequence, 2) == wanted
        assert found
        assert {error.consumed for error in found} == {0}
        assert other.tokens == tuple(PROMPT[:9])
        if other_call == "step":
            assert other.save() == before
        assert generated(Frame(frame.model, frame.pool, space), other, 2) == wanted


def test_steps_on_the_threads_of_a_hook(frame: Frame) -> None:
    """One thread does both: frames' own jobs and the hook's tasks. Nobody waits for ever, and no token is another."""
    jobs = Frame(frame.model, frame.pool, make_workspace(frame.model))
    with frame.new(PROMPT[:9]) as sequence, frame.new(PROMPT[:9]) as other:
        wanted = generated(frame, frame.new(PROMPT[:9]), 6)
        with ThreadPoolExecutor(1) as threads:

            def run(count: int, task: Task) -> None:
                list(threads.map(task, range(count)))

            def job() -> list[int]:
                try:
                    return [step(jobs, other, 99).code]
                except errors.BusyError:
                    return []

            frame.space.set_parallel_for(embed.ParallelFor(run, 2, matvec=True))
            found, others = list[int](), list[int]()
            while len(found) < 6:
                running = threads.submit(job)
                found += [step(frame, sequence, 99).code]
                others += running.result()
        assert found == wanted
        others += generated(jobs, other, 6)
        assert others[:6] == wanted


def test_threads_without_hooks_wait(frame: Frame) -> None:
    wanted = generated(frame, frame.new(PROMPT[:9]), 6)

    def life(_: int) -> list[int]:
        own = Frame(frame.model, frame.pool, make_workspace(frame.model))
        with own.new(PROMPT[:9]) as sequence:
            return generated(own, sequence, 6, 1)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(life, range(3))) == [wanted] * 3


def test_a_dense_model_has_no_turns(wide: Artifact) -> None:
    with opened(wide) as frame, frame.new(PROMPT[:9]) as sequence, frame.new(PROMPT[:9]) as other:
        space, found = make_workspace(frame.model), list[embed.Outcome]()
        wanted = generated(frame, frame.new(PROMPT[:9]), 1)

        def run(count: int, task: Task) -> None:
            found.extend(embed.decode_step([other], 9, space))
            for index in range(count):
                task(index)

        frame.space.set_parallel_for(embed.ParallelFor(run, 4))
        assert generated(frame, sequence, 1) == wanted
        assert found == [embed.Token(wanted[0])]
