"""Room on the disk: asked for before a byte is written, and reported when it runs out all the same."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import DiskFullError


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds `path`, which need not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_room(path: Path, needed_bytes: int) -> None:
    """Raises DiskFullError where `needed_bytes` do not fit."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise DiskFullError(path, needed_bytes, free)


@contextmanager
def full_disk_told(path: Path, needed_bytes: int) -> Iterator[None]:
    """Turns running out of room meanwhile into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        cause = _other_cause(error.errno, path)
        raise DiskFullError(path, needed_bytes, free_bytes(path), cause) from None


def _other_cause(number: int | None, path: Path) -> str | None:
    """What ran out if it was not the bytes of the disk."""
    if number == errno.EDQUOT:
        return "the quota of this user or group is used up"
    disk = os.statvfs(_existing(path))
    if disk.f_files and not disk.f_favail:
        return "the file system has no inodes left: it holds as many files as it can"
    return None
