"""How fast this machine reads: a file past the page cache, and memory. Measured, never assumed."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.errors import FileError

READ_BYTES = 1 << 20  # of one read: about one expert
DEFAULT_BYTES = 128 << 20
_ALIGNMENT = 4096


@dataclass(frozen=True)
class DiskSpeed:
    """What was read, how fast, and whether the page cache was really passed by."""

    bytes_per_s: int
    nbytes: int
    direct: bool


def measure_disk(path: Path, nbytes: int = DEFAULT_BYTES, *, lanes: int = 4) -> DiskSpeed | None:
    """Read up to `nbytes` of a file with O_DIRECT, in reads of 1 MiB on parallel lanes.

    Where the file system has no O_DIRECT the cache is asked to forget the file first. None where the
    file holds less than one read. Raises FileError when it cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise FileError(path, "read", "is not a plain file")
        handle, direct = _open(path)
        try:
            reads = min(nbytes, os.fstat(handle).st_size) // READ_BYTES
            if reads < 1:
                return None
            start = time.perf_counter()
            with ThreadPoolExecutor(lanes) as pool:
                work = [pool.submit(_read, handle, range(i, reads, lanes)) for i in range(lanes)]
                done = sum(item.result() for item in work)
            seconds = time.perf_counter() - start
        finally:
            os.close(handle)
    except OSError as error:
        raise FileError(path, "read", error.strerror or str(error)) from None
    return DiskSpeed(int(done / max(seconds, 1e-9)), done, direct)


def _open(path: Path) -> tuple[int, bool]:
    """A handle that passes the page cache by, and whether it does."""
    flag = getattr(os, "O_DIRECT", 0)
    if flag:
        try:
            handle = os.open(path, os.O_RDONLY | flag)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            if _reads_directly(handle):
                return handle, True
            os.close(handle)
    handle = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    return handle, False


def _reads_directly(handle: int) -> bool:
    """Some file systems take the flag and refuse the read."""
    with mmap.mmap(-1, _ALIGNMENT) as buffer:
        try:
            os.preadv(handle, [buffer], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
    return True


def _read(handle: int, indices: range) -> int:
    """Read whole pieces of READ_BYTES by index into one page-aligned buffer; the bytes read."""
    done = 0
    with mmap.mmap(-1, READ_BYTES) as buffer:
        for index in indices:
            done += os.preadv(handle, [buffer], index * READ_BYTES)
    return done


def measure_memory(threads: int, nbytes: int = 64 << 20, rounds: int = 3) -> int:
    """Bytes a second that `threads` threads read from memory together; the best of some rounds."""
    data = np.ones((threads, max(1, nbytes // 8 // threads)), np.int64)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(np.max, data))
            best = max(best, data.nbytes / max(time.perf_counter() - start, 1e-9))
    return int(best)
