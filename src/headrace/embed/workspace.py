"""A workspace: the buffers of passes, in the caller's memory, and who computes in them.

One call at a time uses a workspace; calls with different ones run side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headrace.embed.adapter import Adapter
from headrace.embed.calls import Call, User
from headrace.embed.errors import (
    AllocationError,
    BusyError,
    InvalidArgumentError,
    LifecycleRefused,
    ParallelForIncompleteError,
    ParallelForInvalidError,
    ReleasedError,
)
from headrace.embed.memory import Buffer, memory_of, typed, whole
from headrace.embed.model import Model
from headrace.embed.pool import KVPool
from headrace.embed.timeline import Timeline
from headrace.engine.mixture import Mixture
from headrace.errors import ParallelForError
from headrace.kernels.program import Batch, ParallelFor, Runner

DEFAULT_BATCH = 8
DEFAULT_CHUNK = 64
MAX_ROWS = 4096
MAX_TASKS = 256  # of a hook


def workspace_size(
    model: Model, *, max_batch: int = DEFAULT_BATCH, max_chunk: int = DEFAULT_CHUNK
) -> int:
    """Bytes of a workspace for steps of at most max_batch sequences and chunks of at most max_chunk tokens."""
    typed(model, Model, "the model")
    batch, rows = _rows(max_batch, max_chunk)
    return model.backend.workspace_bytes(
        model.program.shape, max_positions=_positions(model), capacity=rows, logit_capacity=batch
    )


def _rows(max_batch: int, max_chunk: int) -> tuple[int, int]:
    batch = whole("max_batch", max_batch, 1, MAX_ROWS)
    return batch, max(batch, whole("max_chunk", max_chunk, 1, MAX_ROWS))


def _positions(model: Model) -> int:
    """Positions that the rotary tables of the model's program have."""
    return len(model.program.rope_low) * len(model.program.rope_high)


class Workspace:
    """Where passes are computed. Its buffer is the caller's and must stay until `destroy`."""

    def __init__(
        self,
        model: Model,
        buffer: Buffer,
        *,
        max_batch: int = DEFAULT_BATCH,
        max_chunk: int = DEFAULT_CHUNK,
    ) -> None:
        """buffer: of `workspace_size` bytes at least; its content does not matter. max_batch, max_chunk: as there.

        Raises InvalidArgumentError, MisalignedBufferError, BufferTooSmallError, ReleasedError.
        """
        needed = workspace_size(model, max_batch=max_batch, max_chunk=max_chunk)
        memory = memory_of(buffer, "a workspace", needed)
        self.max_batch, rows = _rows(max_batch, max_chunk)
        self.max_chunk = max_chunk
        self.model = model
        model.hold("workspaces")
        try:
            self.runner: Runner = model.backend.compile(
                model.program, capacity=rows, logit_capacity=self.max_batch, memory=memory
            )
            stream = model.experts
            self._mixture = None if stream is None else Mixture(model.program, self.runner, stream)
        except BaseException as error:
            model.drop("workspaces")
            if isinstance(error, MemoryError):
                raise AllocationError("the process has no memory for a workspace") from error
            raise
        self._lock = threading.Lock()
        self._user = User()
        self._open = True
        self._hook: ParallelFor | None = None
        self._cache: NDArray[np.uint8] | None = None
        self._adapters: dict[Adapter, int] = {}  # loaded, with the runner's numbers

    def __enter__(self) -> Self:
        if not self._open:
            raise ReleasedError("the workspace was destroyed")
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with suppress(LifecycleRefused) if kind is not None else nullcontext():
            self.destroy()

    def destroy(self) -> None:
        """Give the buffer back. Raises BusyError while a call uses it."""
        with self._lock:
            if self._user.call is not None:
                raise BusyError("a call uses the workspace")
            if not self._open:
                return
            self._open = False
            self.runner.close()
            self._cache = None
            del self.runner, self._mixture  # with them the last views of the buffer
        self.model.drop("workspaces")

    @contextmanager
    def in_use(self, model: Model) -> Iterator[Call]:
        """One call uses it. Raises BusyError, ReleasedError, InvalidArgumentError for another model's objects."""
        if model is not self.model:
            raise InvalidArgumentError("sequence and workspace are of different models")
        call = Call(hooked=self._hook is not None)
        try:
            self._begin(call)
            yield call
        except MemoryError as error:
            consumed = getattr(error, "consumed", 0)
            cause = f"the process has no memory for this call: {error}"
            raise AllocationError(cause, consumed=consumed) from error
        finally:
            call.over = True

    def _begin(self, call: Call) -> None:
        with self._lock:
            if self._user.call is not None:
                raise BusyError("another call uses the workspace; each running call needs its own")
            if not self._open:
                raise ReleasedError("the workspace was destroyed")
            self._user.become(call)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The experts of a mixture are the running call's inside; nested, nothing. Raises BusyError."""
        lock, call = self.model.pass_lock, self._user.call
        if lock is None or call is None or not lock.begin(call):
            yield
            return
        try:
            yield
        finally:
            lock.end(call)

    def set_parallel_for(self, hook: ParallelFor | None) -> None:
        """Hand row blocks to the caller's threads; None: compute all on the calling one.

        Raises ParallelForInvalidError, BusyError, ReleasedError.
        """
        if hook is not None and not isinstance(hook, ParallelFor):
            raise ParallelForInvalidError("the hook is no ParallelFor")
        if hook is not None and not (
            type(hook.max_tasks) is int and 0 <= hook.max_tasks <= MAX_TASKS
        ):
            raise ParallelForInvalidError(
                f"max_tasks is {hook.max_tasks!r:.60}, no whole number in 0 to {MAX_TASKS}"
            )
        if hook is not None and not callable(hook.run):
            raise ParallelForInvalidError("the hook has nothing to run tasks with")
        if hook is not None and self.model.threads != 1:
            raise ParallelForInvalidError(
                "a model that is mapped with threads has no use for a hook"
            )
        with self.in_use(self.model):
            self.runner.set_parallel_for(None if hook is None else _told(hook))
            self._hook = hook

    @property
    def splits_layers(self) -> bool:
        """Whether a hook is called inside of layers."""
        return self._hook is not None and self._hook.matvec

    # ---- passes -----------------------------------------------------------------------------------

    def layers(
        self, begin: int, end: int, batch: Batch, start: NDArray[np.int32], *, admit: bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Rows from layer `begin` up to layer `end`: X i32[rows, hidden] (a view) and clips i64[rows, sites].

        start: X of the rows before, where begin is not 0.
        """
        marks = self.model.program.marks
        if begin:
            self.runner.put(start)
        self._run(marks[begin] if begin else 0, marks[end], batch, admit)
        rows = len(batch.tokens)
        return self.runner.residual(rows), self.runner.row_saturations()[:rows]

    def finish(
        self, batch: Batch, start: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Logits i32[rows, vocab] (a view) of X i32[rows, hidden] behind the last layer, and clips i64[rows, sites]."""
        program = self.model.program
        self.runner.put(start)
        self._run(program.marks[-1], len(program.ops), batch, True)
        rows = len(batch.tokens)
        return self.runner.logits(rows), self.runner.row_saturations()[:rows]

    def _run(self, begin: int, end: int, batch: Batch, admit: bool) -> None:
        """Raises ParallelForIncompleteError, FileError, ExpertReadError."""
        assert self._cache is not None, "inside of `over`"
        with self.turn():
            self.model.check_files()
            try:
                if self._mixture is None:
                    self.runner.run(begin, end, batch, self._cache)
                else:
                    self._mixture.run(batch, self._cache, (end,), admit=admit, begin=begin)
            except ParallelForError as error:
                raise ParallelForIncompleteError(error.message) from None
            self.model.check_files(after=True)

    @contextmanager
    def over(self, pool: KVPool) -> Iterator[None]:
        """Passes inside the block read and write this pool."""
        self._cache = pool.cache
        try:
            yield
        finally:
            self._cache = None

    def batch(self, rows: Sequence[tuple[Timeline, list[int]]]) -> Batch:
        """The rows of one pass: the next tokens of each timeline."""
        counts = [len(tokens) for _, tokens in rows]
        lines = [line for line, _ in rows]
        spans = [range(line.length, line.length + n) for line, n in zip(lines, counts, strict=True)]
        total = sum(counts)
        return self._batch(
            lines,
            np.fromiter((t for _, tokens in rows for t in tokens), np.int32, total),
            np.fromiter((p for span in spans for p in span), np.int32, total),
            np.repeat(np.arange(len(rows), dtype=np.int32), counts),
        )

    def last_rows(self, lines: Sequence[Timeline]) -> Batch:
        """The last position of each timeline."""
        count = len(lines)
        return self._batch(
            lines,
            np.fromiter((line.memory.tokens[line.length - 1] for line in lines), np.int32, count),
            np.fromiter((line.length - 1 for line in lines), np.int32, count),
            np.arange(count, dtype=np.int32),
        )

    def _batch(
        self,
        lines: Sequence[Timeline],
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: NDArray[np.int32],
    ) -> Batch:
        wanted = np.arange(min(len(tokens), self.max_batch), dtype=np.int32)
        tables = tuple(line.page_table for line in lines)
        return Batch(tokens, positions, sequences, tables, wanted, self._numbers(lines))

    def _numbers(self, lines: Sequence[Timeline]) -> NDArray[np.int32] | None:
        """The runner's number for the adapter of each timeline, which is loaded where it is not."""
        for gone in [adapter for adapter in self._adapters if not adapter.live]:
            self.runner.unload_adapter(self._adapters.pop(gone))
        bound = [line.adapter for line in lines]
        for adapter in bound:
            if adapter is not None and adapter not in self._adapters:
                self._adapters[adapter] = self.runner.load_adapter(adapter.pairs)
        if not any(bound):
            return None
        return np.array([-1 if a is None else self._adapters[a] for a in bound], np.int32)


def _told(hook: ParallelFor) -> ParallelFor:
    """The hook, whose tasks raise errors of this module."""

    def run(count: int, task: Callable[[int], None]) -> None:
        def call(index: int) -> None:
            try:
                task(index)
            except ParallelForError as error:
                raise ParallelForIncompleteError(error.message) from None

        hook.run(count, call)

    return replace(hook, run=run)
