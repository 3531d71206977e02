"""Memory that the caller gives: what of it is needed, and what lies where in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.embed.errors import (
    AllocationError,
    BufferTooSmallError,
    InvalidArgumentError,
    MisalignedBufferError,
)
from headrace.engine.batch import aligned_zeros
from headrace.engine.pages import pages_for
from headrace.kernels.program import SITES

ALIGNMENT = 64  # bytes; of every buffer and of every part of one
Buffer = Any  # whatever has the buffer protocol
T = TypeVar("T")


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """A new buffer u8[nbytes] that begins where `Workspace` and `KVPool` want it.

    Raises InvalidArgumentError, AllocationError.
    """
    size = whole("nbytes", nbytes, 1)
    try:
        row: NDArray[np.uint8] = aligned_zeros(1, size)[0]
    except (MemoryError, ValueError, OverflowError):
        raise AllocationError(f"the process has no {size:,} bytes of memory") from None
    return row


def typed(value: object, kind: type[T], what: str) -> T:
    """The value, of that class. Raises InvalidArgumentError."""
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{what} is of type {type(value).__name__}, no {kind.__name__}")
    return value


def whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """A whole number in [low, high]. Raises InvalidArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidArgumentError(f"{name} is {value!r:.60}; it must be a whole number")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in {low} to {high}"
        raise InvalidArgumentError(f"{name} is {value}; it must be {bounds}")
    return int(value)


def bytes_of(buffer: Buffer, what: str, *, writable: bool = True) -> NDArray[np.uint8]:
    """The bytes of a caller's buffer, u8[any], not copied. Raises InvalidArgumentError."""
    try:
        view = memoryview(buffer).cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgumentError(f"the memory of {what} is no contiguous buffer") from error
    if writable and view.readonly:
        raise InvalidArgumentError(f"the memory of {what} cannot be written to")
    return np.frombuffer(view, np.uint8)


def memory_of(buffer: Buffer, what: str, needed: int) -> NDArray[np.uint8]:
    """The first `needed` bytes of a caller's buffer, aligned.

    Raises InvalidArgumentError, MisalignedBufferError, BufferTooSmallError.
    """
    found = bytes_of(buffer, what)
    if len(found) < needed:
        raise BufferTooSmallError(what, needed, len(found))
    if found.ctypes.data % ALIGNMENT:
        raise MisalignedBufferError(f"the memory of {what} must begin at a multiple of 64 bytes")
    return found[:needed]


@dataclass(frozen=True, eq=False)
class SequenceMemory:
    """Where the state of one sequence lies, its keys and values apart; all of it has a fixed size.

    residual i32[2, hidden], clips i64[2, sites]: X of the last position and counts, as they are and as they are to be:
    what is valid is never written to (timeline.py). hidden i32[hidden]: X that the last prefill left. tokens
    i32[context + 1], read and pending. marks u8[context + 1]: what is known of each. answer i32[context + 1]: the
    generated ones alone. pages i32[pages of the context].
    """

    residual: NDArray[np.int32]
    hidden: NDArray[np.int32]
    tokens: NDArray[np.int32]
    answer: NDArray[np.int32]
    pages: NDArray[np.int32]
    clips: NDArray[np.int64]
    marks: NDArray[np.uint8]


def _fields(hidden: int, context: int) -> dict[str, tuple[type[np.generic], int]]:
    return {
        "residual": (np.int32, 2 * hidden),
        "hidden": (np.int32, hidden),
        "tokens": (np.int32, context + 1),
        "answer": (np.int32, context + 1),
        "pages": (np.int32, pages_for(context)),
        "clips": (np.int64, 2 * len(SITES)),
        "marks": (np.uint8, context + 1),
    }


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def sequence_bytes(hidden: int, context: int) -> int:
    """Bytes of a `SequenceMemory`."""
    fields = _fields(hidden, context).values()
    return sum(_padded(count * np.dtype(kind).itemsize) for kind, count in fields)


def sequence_memory(memory: NDArray[np.uint8], hidden: int, context: int) -> SequenceMemory:
    """The parts of memory u8[sequence_bytes]."""
    parts: dict[str, NDArray[Any]] = {}
    at = 0
    for name, (kind, count) in _fields(hidden, context).items():
        size = count * np.dtype(kind).itemsize
        parts[name] = memory[at : at + size].view(kind)
        at += _padded(size)
    for name in ("residual", "clips"):
        parts[name] = parts[name].reshape(2, -1)
    return SequenceMemory(**parts)
