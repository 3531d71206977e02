"""What runners check of the arrays that a caller gives them: memory to work in, and rows of X."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.errors import InputError

ALIGNMENT = 64  # bytes, of a runner's memory


def check_rows(rows: NDArray[np.int32], hidden: int, capacity: int) -> None:
    """Raise InputError unless rows are i32[1 to capacity, hidden]."""
    if rows.dtype != np.int32 or rows.ndim != 2 or rows.shape[1] != hidden:
        raise InputError(f"rows of X are {rows.dtype}{list(rows.shape)}, not int32[rows, {hidden}]")
    if not 1 <= len(rows) <= capacity:
        raise InputError(f"{len(rows)} rows of X, the runner takes 1 to {capacity}")
