"""What runners check of the arrays that a caller gives them: memory to work in, and rows of X."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError

ALIGNMENT = 64  # bytes, of a runner's memory


def check_memory(memory: NDArray[np.uint8], nbytes: int) -> None:
    """Raise InputError unless memory is u8[nbytes or more], contiguous, writable and at a 64-byte boundary."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise InputError("a runner's memory is not a contiguous array of uint8")
    if not memory.flags.writeable:
        raise InputError("a runner's memory cannot be written")
    if memory.nbytes < nbytes:
        raise InputError(f"a runner's memory has {memory.nbytes} bytes, it needs {nbytes}")
    if memory.ctypes.data % ALIGNMENT:
        raise InputError(f"a runner's memory does not begin at a multiple of {ALIGNMENT} bytes")


def check_rows(rows: NDArray[np.int32], hidden: int, capacity: int) -> None:
    """Raise InputError unless rows are i32[1 to capacity, hidden]."""
    if rows.dtype != np.int32 or rows.ndim != 2 or rows.shape[1] != hidden:
        raise InputError(f"rows of X are {rows.dtype}{list(rows.shape)}, not int32[rows, {hidden}]")
    if not 1 <= len(rows) <= capacity:
        raise InputError(f"{len(rows)} rows of X, the runner takes 1 to {capacity}")
