"""A host's parallel-for: how a projection is cut into blocks of rows, and how a call of the host is checked."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from headrace.errors import InputError, ParallelForError
from headrace.kernels.program import MAX_TASKS, PackedWeight, ParallelFor

TASK_ROWS = 64  # whole tiles
TASK_BYTES = 256 * 1024


def check_hook(hook: ParallelFor | None, threads: int) -> None:
    """Raise InputError where a runner of so many threads cannot have this hook."""
    if hook is None:
        return
    if threads > 1:
        raise InputError(f"a hook needs a runner of one thread, not of {threads}")
    if not 0 <= hook.max_tasks <= MAX_TASKS:
        raise InputError(f"max_tasks is {hook.max_tasks}, not 0 to {MAX_TASKS}")
    if not callable(hook.run):
        raise InputError("the hook's run cannot be called")


def split_rows(weight: PackedWeight, max_tasks: int) -> list[tuple[int, int]]:
    """Blocks of rows [first, last) of a projection, a function of the weight and max_tasks alone.

    At most max_tasks of them, one for each 64 rows begun and one for each whole 256 KiB of the packed weight (all of
    `nbytes`), at least one; each of rows / blocks rows, rounded up to whole 64s, the last of what is left: rounding may
    leave nothing for some, which are not made.
    """
    most = min(max_tasks, -(-weight.n // TASK_ROWS), weight.nbytes // TASK_BYTES)
    count = max(1, most)
    rows = -(-weight.n // (count * TASK_ROWS)) * TASK_ROWS
    return [(first, min(first + rows, weight.n)) for first in range(0, weight.n, rows)]


def stale() -> ParallelForError:
    return ParallelForError("a task was called after the hook's run had returned")


class Round:
    """One call of a hook's `run`, as native kernels check it (src/native/parallel_for.h)."""

    def __init__(self, count: int, work: Callable[[int], None]) -> None:
        self._count, self._work = count, work
        self._lock = Lock()  # held while a task computes: the reference has one thread
        self._called: set[int] = set()
        self._open = True
        self._cause = ""

    def call(self, index: int) -> None:
        with self._lock:
            if not self._open:
                raise stale()
            if not hasattr(index, "__index__") or index not in range(self._count):
                self._cause = self._cause or f"there is no task {index!r} of {self._count}"
            elif index in self._called:
                self._cause = self._cause or f"task {index} was called twice"
            else:
                self._called.add(index)
                self._work(int(index))

    def abandon(self) -> None:
        with self._lock:
            self._open = False

    def close(self) -> None:
        """Raise ParallelForError unless every task was called once and nothing else."""
        with self._lock:
            self._open = False
            missing = sorted(set(range(self._count)) - self._called)
            if missing:
                self._cause = self._cause or f"task {missing[0]} of {self._count} was not called"
            if self._cause:
                raise ParallelForError(self._cause)


def run_tasks(hook: ParallelFor, count: int, work: Callable[[int], None]) -> None:
    """Have the hook call work(0) to work(count - 1)."""
    tasks = Round(count, work)
    try:
        hook.run(count, tasks.call)
    except BaseException:
        tasks.abandon()
        raise
    tasks.close()
