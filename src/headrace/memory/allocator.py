"""How the C library's allocator treats large blocks."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 4 << 20  # more than a pass allocates for the logits of some rows
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h


def give_back_large_blocks() -> bool:
    """From now on a block of four megabytes or more is the system's again once it is freed; whether that could be set.

    glibc raises its own limit with every larger block that it frees, up to 32 MB, and keeps what is below: a server
    that once refused some long requests would hold their memory for ever, beside what was planned.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE_BYTES))
