"""What a pass over several sequences is made of: their rows, the memory of their pages, where it may pause."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ROPE_LOW
from headrace.engine.adapters import Adapters
from headrace.engine.sequence import Work
from headrace.kernels.program import Batch, Program, Route


def copy_page(cache: NDArray[np.uint8], source: int, target: int) -> None:
    cache[target] = cache[source]


def pauses(program: Program, backend: str) -> tuple[int, ...]:
    """Where a run of a program may pause for a cancellation: its end, for the reference every operation.

    Never after a Route, where a pause means that experts are lacking.
    """
    size = len(program.ops)
    if backend != "reference":
        return (size,)
    return tuple(i for i in range(1, size + 1) if not isinstance(program.ops[i - 1], Route))


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


def within_context(program: Program, context: int) -> Program:
    """The same program with rotary tables, and so with scratch memory, for a shorter context."""
    return replace(program, rope_high=program.rope_high[: -(-context // ROPE_LOW)])


def aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """u8[rows, row_bytes] at a 64-byte boundary; untouched rows take no memory."""
    raw = np.zeros(rows * row_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * row_bytes].reshape(rows, row_bytes)
