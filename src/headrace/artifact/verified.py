"""Which files of an artifact were hashed already, as the file system knew them then.

The record lies in the home folder, outside the artifact. A file counts as hashed while its device, inode, size, time
of writing and time of change are those of the record. Where the record cannot be kept, files are hashed every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from headrace import config
from headrace.artifact.unfinished import replacing

FOLDER = "verified"
MAX_RECORDS = 512  # of artifacts; the oldest go first
MAX_BYTES = 1 << 20  # of one record
_CHUNK = 8 << 20
_TICK_NS = 100_000_000  # two writes within a tick of the file system's clock have one time

Facts = list[int]


def hashed_facts(
    path: Path, *, release: bool = False, read: Callable[[int], None] | None = None
) -> tuple[str, Facts | None]:
    """SHA-256 of a file, and its facts if it cannot have changed meanwhile.

    release: drop its pages from the page cache, for files that are not read through it. read: is told how many bytes
    were read since it was called last.
    """
    digest, began = hashlib.sha256(), time.time_ns()
    with path.open("rb", buffering=0) as file:
        before = facts(os.fstat(file.fileno()))
        at = 0
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if release:
                os.posix_fadvise(file.fileno(), at, len(chunk), os.POSIX_FADV_DONTNEED)
            at += len(chunk)
            if read is not None:
                read(len(chunk))
        after = os.fstat(file.fileno())
    settled = facts(after) == before and began - after.st_ctime_ns > _TICK_NS
    return digest.hexdigest(), before if settled else None


def facts(stat: os.stat_result) -> Facts:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


class Record:
    """What is known of the artifact directory `path`; a rename of it keeps what is known."""

    def __init__(self, path: Path, identity: str) -> None:
        stat = path.stat()
        name = f"{identity[:32]}-{stat.st_dev}-{stat.st_ino}.json"
        self._path = config.load().home / FOLDER / name
        self._known = _read(self._path)
        self._changed = False

    def holds(self, file: Path, sha256: str) -> bool:
        """Whether the file was hashed to `sha256` as it is now."""
        return self._known.get(file.name) == [sha256, *facts(file.stat())]

    def add(self, file: Path, sha256: str, known: Facts | None) -> None:
        """The file was hashed; without facts it will be again."""
        self._changed = self._changed or known is not None
        if known is not None:
            self._known[file.name] = [sha256, *known]

    def save(self) -> None:
        """Keep the record where it can be kept."""
        if not self._changed:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as work:
                work.write_text(json.dumps(self._known), "utf-8")
            _forget_oldest(self._path.parent)


def _read(path: Path) -> dict[str, list[object]]:
    try:
        with path.open("rb") as file:
            body = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _forget_oldest(folder: Path) -> None:
    records = list(folder.glob("*.json"))
    if len(records) > MAX_RECORDS:
        oldest = sorted(records, key=lambda p: p.stat().st_mtime_ns)[: len(records) - MAX_RECORDS]
        for path in oldest:
            path.unlink(missing_ok=True)
