"""What a pass over several sequences is made of: their rows, the memory of their pages, where it may pause, and who
leaves it there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ROPE_LOW
from headrace.engine.adapters import Adapters
from headrace.engine.sequence import Work
from headrace.errors import CancelledError, InputError
from headrace.kernels.program import Batch, Program, Route, Runner

LAYER_ROWS = 64  # passes of more rows pause between layers; a pause is little beside them

Cancel = Callable[[], bool]
Leaving = Callable[[], Collection[int]]  # which work of a pass leaves it, by index


def copy_page(cache: NDArray[np.uint8], source: int, target: int) -> None:
    cache[target] = cache[source]


def pauses(program: Program, backend: str) -> tuple[int, ...]:
    """Where a long run of a program may pause: behind every layer and at its end; for the reference, every operation.

    Never after a Route, where a pause means that experts are lacking.
    """
    size = len(program.ops)
    if backend != "reference":
        return (*program.marks[1:], size)
    return tuple(i for i in range(1, size + 1) if not isinstance(program.ops[i - 1], Route))


class Company:
    """The work of one pass; between layers parts of it may leave, and the others go on as if they had never been."""

    def __init__(
        self,
        work: Tokens[Work],
        runner: Runner,
        marks: tuple[int, ...],
        adapters: Adapters,
        cancel: Cancel | None,
        leaving: Leaving | None,
    ) -> None:
        """marks: the program's, where X is all that there is of a pass. cancel: asked whether all of it ends."""
        self.work = list(work)  # that is still there
        self._indices = list(range(len(work)))
        self._runner = runner
        self._marks = marks
        self._adapters = adapters
        self._cancel = cancel
        self._leaving = leaving
        self._clips: NDArray[np.int64] | None = None  # of what is still there, before somebody left

    @property
    def asks(self) -> bool:
        """Whether anybody may want to end before the pass does."""
        return self._cancel is not None or self._leaving is not None

    def begin(self) -> Batch:
        """The batch of all work, for which there are pages. Raises InputError where an adapter is not loaded."""
        self.batch = batch_of(self.work, self._adapters)
        return self.batch

    def pause(self, at: int) -> Batch:
        """The batch to go on with before operation `at`. Raises CancelledError where nothing of it is left."""
        if self._cancel is not None and self._cancel():
            raise CancelledError("the pass was cancelled")
        gone = self._leaving() if self._leaving is not None and at in self._marks else ()
        stay = [i for i, index in enumerate(self._indices) if index not in gone]
        if len(stay) == len(self.work):
            return self.batch
        if not stay:
            raise CancelledError("all of the pass was cancelled")
        kept = np.isin(self.batch.sequences, stay)
        rows = self._runner.residual(len(kept))[kept]
        self._clips = self.clips()[kept]
        for item in (item for i, item in enumerate(self.work) if i not in stay):
            item.sequence.trim()
        self.work = [self.work[i] for i in stay]
        self._indices = [self._indices[i] for i in stay]
        self._runner.put(rows)
        return self.begin()

    def clips(self) -> NDArray[np.int64]:
        """Of every row that is still there, i64[rows, sites]."""
        clips = self._runner.row_saturations()
        return clips if self._clips is None else self._clips + clips


def check_rows(batch: Batch, chunk: int, logit_rows: int) -> None:
    """Raises InputError for more rows than a pass holds."""
    if len(batch.tokens) > chunk:
        raise InputError(f"a pass of {len(batch.tokens)} tokens is longer than {chunk}")
    if len(batch.logit_rows) > logit_rows:
        raise InputError(f"{len(batch.logit_rows)} rows of logits, room for {logit_rows}")


def batch_of(work: Tokens[Work], adapters: Adapters) -> Batch:
    """Raises InputError where the adapter of a sequence is not loaded."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    wanted: list[int] = []
    for index, item in enumerate(work):
        start, count = len(item.sequence), len(item.tokens)
        first = len(tokens)
        tokens += item.tokens
        positions += range(start, start + count)
        sequences += [index] * count
        wanted += range(first if item.all_logits else len(tokens) - item.wanted, len(tokens))
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        sequences=np.array(sequences, np.int32),
        page_tables=tuple(item.sequence.page_table() for item in work),
        logit_rows=np.array(wanted, np.int32),
        adapters=adapters.of(item.sequence.history.current for item in work),
    )


def hand_out(work: Tokens[Work], hidden: NDArray[np.int32] | None) -> None:
    """Give whoever wants them the states of their rows, of hidden i32[rows, hidden]; before tokens are committed."""
    first = 0
    for item in work:
        end = first + len(item.tokens)
        if hidden is not None and item.hidden is not None:
            item.hidden(len(item.sequence), item.tokens, hidden[first:end])
        first = end


def within_context(program: Program, context: int) -> Program:
    """The same program with rotary tables, and so with scratch memory, for a shorter context."""
    return replace(program, rope_high=program.rope_high[: -(-context // ROPE_LOW)])


def aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """u8[rows, row_bytes] at a 64-byte boundary; untouched rows take no memory."""
    raw = np.zeros(rows * row_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * row_bytes].reshape(rows, row_bytes)
