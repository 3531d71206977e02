"""A host's parallel-for computes blocks of projections: same bits, and whatever it does wrong fails the run alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import InputError, ParallelForError
from headrace.kernels import program as p
from headrace.kernels.parallel_for import split_rows
from headrace.kernels.select import select
from kernels import cases
from kernels.models import DENSE, VARIANTS, Model
from kernels.passes import HERE, batch, compiled, new_cache

Task = Callable[[int], None]
Run = Callable[[int, Task], None]
WIDE = {"vocab_size": 5000, "hidden_size": 512, "ffn_size": 1000, "num_heads": 16, "num_layers": 2}


@pytest.fixture(scope="module")
def model() -> Model:
    """Wide enough for blocks: 6 of the head, 2 of gate and up; clips."""
    return Model(replace(DENSE, **WIDE), gain=1 << 13)  # type: ignore[arg-type]


def serial(count: int, task: Task) -> None:
    for index in range(count):
        task(index)


def backwards(count: int, task: Task) -> None:
    for index in reversed(range(count)):
        task(index)


def pooled(count: int, task: Task) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(task, range(count)))


class Steps:
    """A prompt of five tokens and two steps of one; every output."""

    def __init__(self, model: Model, tier: str, hook: p.ParallelFor | None) -> None:
        self.model, self.cache = model, new_cache(model)
        self.runner = compiled(model, tier)
        self.runner.set_parallel_for(hook)

    def outputs(self) -> list[bytes]:
        out = []
        for rows in ([(0, i) for i in range(5)], [(0, 5)], [(0, 6)]):
            given, size = batch(rows, [0, len(rows) - 1][-len(rows) :]), len(self.model.program.ops)
            assert self.runner.run(0, size, given, self.cache) == size
            out.append(self.runner.logits(len(given.logit_rows)).tobytes())
            out.append(self.runner.row_saturations().tobytes())
        return [*out, self.cache.tobytes(), str(self.runner.saturations()).encode()]


@pytest.fixture(scope="module")
def expected(model: Model) -> list[bytes]:
    return Steps(model, "reference", None).outputs()


def blocks_of(model: Model, max_tasks: int, matvec: bool) -> list[int]:
    """How many tasks each call of `run` gets in one step of one row."""
    projections = [op for op in model.program.ops if isinstance(op, p.Project)]
    chosen = [op for op in projections if matvec or op.target == p.Buffer.LOGITS]
    counts = [len(split_rows(op.weight, max_tasks)) for op in chosen]
    return [count for count in counts if count > 1]


@pytest.mark.parametrize("max_tasks", [0, 1, 2, 3, 4, 256])
@pytest.mark.parametrize("matvec", [False, True])
@pytest.mark.parametrize("tier", HERE)
def test_results_are_those_without_a_hook(
    model: Model, expected: list[bytes], tier: str, matvec: bool, max_tasks: int
) -> None:
    counts = []

    def recorded(count: int, task: Task) -> None:
        counts.append(count)
        (serial, backwards, pooled)[len(counts) % 3](count, task)

    assert Steps(model, tier, p.ParallelFor(recorded, max_tasks, matvec)).outputs() == expected
    steps = blocks_of(model, max_tasks, matvec)
    assert counts == blocks_of(model, max_tasks, False) + 2 * steps
    if max_tasks == 256:
        assert steps[-1] == 6
        assert len(steps) == (3 if matvec else 1)


def test_blocks_are_whole_tiles_and_depend_on_the_weight_alone() -> None:
    shapes = [(64, 8192), (200, 8192), (1000, 4096), (4160, 512), (65, 64), (63, 16384)]
    for n, k in shapes:
        weight = cases.weight(n, k, 8, 32, True, "zero")
        for max_tasks in (0, 1, 2, 3, 4, 256):
            blocks = split_rows(weight, max_tasks)
            most = min(max_tasks, -(-n // 64), weight.nbytes // 2**18)
            assert 1 <= len(blocks) <= max(1, most)
            assert [first for first, _ in blocks] == [0, *(last for _, last in blocks[:-1])]
            assert blocks[-1][1] == n
            sizes = {last - first for first, last in blocks[:-1]}
            assert len(sizes) <= 1
            assert all(size % 64 == 0 and size >= blocks[-1][1] - blocks[-1][0] for size in sizes)


def omit(count: int, task: Task) -> None:
    serial(count - 1, task)


def repeat(count: int, task: Task) -> None:
    serial(count, task)
    task(0)


def repeat_at_once(count: int, task: Task) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(task, [*range(count)] * 2))


def invent(count: int, task: Task) -> None:
    serial(count, task)
    task(count)


def negative(count: int, task: Task) -> None:
    serial(count, task)
    task(-1)


def enormous(count: int, task: Task) -> None:
    serial(count, task)
    task(2**80)


def nothing(count: int, task: Task) -> None:
    pass


def raising(count: int, task: Task) -> None:
    task(0)
    raise LookupError("no thread is free")


def ending(count: int, task: Task) -> None:
    raise KeyboardInterrupt


WRONG = {
    omit: (ParallelForError, "was not called"),
    repeat: (ParallelForError, "task 0 was called twice"),
    repeat_at_once: (ParallelForError, "was called twice"),
    invent: (ParallelForError, "there is no task"),
    negative: (ParallelForError, "there is no task -1"),
    enormous: (ParallelForError, f"there is no task {2**80}"),
    nothing: (ParallelForError, "task 0 of . was not called"),
    raising: (LookupError, "no thread is free"),
    ending: (KeyboardInterrupt, "^$"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tier", HERE)
def test_a_wrong_hook_fails_the_run_which_can_be_repeated(
    model: Model, expected: list[bytes], tier: str, wrong: Run
) -> None:
    """In each call of one step's, in turn; from the start, and from a mark."""
    size, mark = len(model.program.ops), model.program.marks[1]
    calls = len(blocks_of(model, 4, True))
    steps = Steps(model, tier, None)
    steps.outputs()
    last = batch([(0, 6)], [0])
    for bad in range(calls):
        left = bad

        def run(count: int, task: Task) -> None:
            nonlocal left
            (wrong if left == 0 else serial)(count, task)
            left -= 1

        runner, cache = steps.runner, steps.cache
        before, begin, saved = runner.saturations(), 0, None
        if bad > 0:
            begin = mark
            runner.run(0, mark, last, cache)
            saved = runner.residual(1).copy()
            counts, before = runner.row_saturations(), runner.saturations()
            left -= 1  # the first layer's call was without the hook
        runner.set_parallel_for(p.ParallelFor(run, 4, matvec=True))
        error, text = WRONG[wrong]
        with pytest.raises(error, match=text):
            runner.run(begin, size, last, cache)
        assert runner.saturations() == before
        with pytest.raises(ValueError, match="ended where its hook failed"):
            runner.run(mark, size, last, cache)
        runner.set_parallel_for(p.ParallelFor(pooled, 4, matvec=True))
        if saved is not None:
            assert (runner.row_saturations() == counts).all()
            runner.put(saved)
        assert runner.run(begin, size, last, cache) == size
        after = runner.row_saturations() + (counts if bad > 0 else 0)
        assert [runner.logits(1).tobytes(), after.tobytes()] == expected[4:6]
        assert cache.tobytes() == expected[6]
        runner.set_parallel_for(None)


@pytest.mark.parametrize("tier", HERE)
def test_a_task_that_is_kept_does_nothing(model: Model, tier: str) -> None:
    kept: list[Task] = []

    def keeping(count: int, task: Task) -> None:
        serial(count, task)
        kept.append(task)

    steps = Steps(model, tier, p.ParallelFor(keeping, 4))
    outputs = steps.outputs()
    steps.runner.close()
    del steps
    with ThreadPoolExecutor(2) as pool:
        for task in kept:
            with pytest.raises(ParallelForError, match="after the hook's run had returned"):
                pool.submit(task, 0).result()
    assert outputs


@pytest.mark.parametrize("tier", HERE)
def test_tasks_that_outlast_the_run_are_waited_for(model: Model, tier: str) -> None:
    """A hook that returns at once: either every task was begun by then, or the run fails; nothing else."""
    with ThreadPoolExecutor(4) as pool:
        steps = Steps(model, tier, p.ParallelFor(lambda n, task: list(map(lambda i: pool.submit(task, i), range(n))) and None, 4))  # fmt: skip
        plain = Steps(model, tier, None)
        for _ in range(3 if tier == "reference" else 20):
            given, size = batch([(0, 0)], [0]), len(model.program.ops)
            plain.runner.run(0, size, given, plain.cache)
            try:
                steps.runner.run(0, size, given, steps.cache)
            except ParallelForError:
                continue
            assert steps.runner.logits(1).tobytes() == plain.runner.logits(1).tobytes()


@pytest.mark.parametrize("tier", HERE)
def test_a_hook_may_not_use_its_runner(model: Model, tier: str) -> None:
    given, size = batch([(0, 0)], [0]), len(model.program.ops)
    row = np.zeros((1, model.program.shape.hidden), np.int32)
    for use in (
        lambda s: s.runner.run(0, size, given, s.cache),
        lambda s: s.runner.put(row),
        lambda s: s.runner.set_parallel_for(None),
    ):
        steps = Steps(model, tier, None)
        steps.runner.set_parallel_for(p.ParallelFor(lambda n, task, u=use, s=steps: u(s), 4))  # type: ignore[misc]
        with pytest.raises(ValueError, match="the runner is at work"):
            steps.runner.run(0, size, given, steps.cache)
        steps.runner.set_parallel_for(None)
        assert steps.runner.run(0, size, given, steps.cache) == size


def test_a_mixture_takes_a_hook() -> None:
    model = Model(
        replace(VARIANTS["shared"], **{k: WIDE[k] for k in ("vocab_size", "hidden_size")})
    )  # type: ignore[arg-type]
    for tier in HERE:
        plain = Steps(model, tier, None).outputs()
        assert Steps(model, tier, p.ParallelFor(pooled, 256, matvec=True)).outputs() == plain


@pytest.mark.parametrize("tier", HERE)
def test_hooks_out_of_bounds_are_refused(model: Model, tier: str) -> None:
    runner = compiled(model, tier)
    for wrong in (p.ParallelFor(serial, -1), p.ParallelFor(serial, 257), p.ParallelFor(None, 2)):  # type: ignore[arg-type]
        with pytest.raises(InputError):
            runner.set_parallel_for(wrong)
    if tier != "reference":
        many = select(tier, threads=2).compile(model.program, capacity=4, logit_capacity=4)
        many.set_parallel_for(None)
        with pytest.raises(InputError, match="a runner of one thread"):
            many.set_parallel_for(p.ParallelFor(serial, 2))
