"""Whether the files of an artifact are what its manifest says: which were hashed already, and which changed since.

The record of what was hashed lies in the home folder, outside the artifact. A file counts as hashed while its device,
inode, size, time of writing and time of change are those of the record. Where the record cannot be kept, files are
hashed every time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace import config
from headrace.artifact.unfinished import replacing
from headrace.errors import FileError

FOLDER = "verified"
MAX_RECORDS = 512  # of artifacts; the oldest go first
MAX_BYTES = 1 << 20  # of one record
_CHUNK = 8 << 20
_TICK_NS = 100_000_000  # two writes within a tick of the file system's clock have one time

Facts = list[int]
_TIME_OF_CHANGE = 4  # of the facts the last one; a new name or mode changes it too


def hashed_facts(
    path: Path, *, release: bool = False, read: Callable[[int], None] | None = None
) -> tuple[str, Facts | None]:
    """SHA-256 of a file, and its facts if it cannot have changed meanwhile.

    release: drop its pages from the page cache, for files that are not read through it. read: is told how many bytes
    were read since it was called last.
    """
    with path.open("rb", buffering=0) as file:
        return _hash(file.fileno(), release, read)


def _hash(
    fd: int, release: bool, read: Callable[[int], None] | None = None
) -> tuple[str, Facts | None]:
    digest, began = hashlib.sha256(), time.time_ns()
    before = facts(os.fstat(fd))
    at = 0
    while chunk := os.pread(fd, _CHUNK, at):
        digest.update(chunk)
        if release:
            os.posix_fadvise(fd, at, len(chunk), os.POSIX_FADV_DONTNEED)
        at += len(chunk)
        if read is not None:
            read(len(chunk))
    after = os.fstat(fd)
    settled = facts(after) == before and began - after.st_ctime_ns > _TICK_NS
    return digest.hexdigest(), before if settled else None


def facts(stat: os.stat_result) -> Facts:
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


class Watch:
    """The files of a loaded artifact, kept open: what is written into them must not become an answer.

    files: each with its SHA-256. Raises OSError.
    """

    def __init__(self, files: Mapping[Path, str]) -> None:
        self._files: list[tuple[Path, int, str]] = []
        try:
            for path, sha256 in files.items():
                self._files.append((path, os.open(path, os.O_RDONLY | os.O_CLOEXEC), sha256))
            self._known = [facts(os.fstat(fd)) for _, fd, _ in self._files]
        except BaseException:
            self.close()
            raise

    def changed(self) -> bool:
        """Whether the system says that any file was changed since they were opened, or verified."""
        return any(
            facts(os.fstat(fd)) != known
            for (_, fd, _), known in zip(self._files, self._known, strict=True)
        )

    def verify(self) -> bool:
        """Hash what was changed; whether any file was written to. Raises FileError for one that is another now."""
        written = False
        for i, (path, fd, sha256) in enumerate(self._files):
            before = self._known[i]
            if facts(os.fstat(fd)) == before:
                continue
            now = None
            while now is None:  # written to at this moment
                digest, now = _hash(fd, True)
                if digest != sha256:
                    cause = "the file was changed while the model is loaded"
                    raise FileError(
                        path, "sha256", cause, hint="restore it, or load the model again"
                    )
                if now is None:
                    time.sleep(_TICK_NS / 1e9)
            self._known[i] = now
            written = written or now[:_TIME_OF_CHANGE] != before[:_TIME_OF_CHANGE]
        return written

    def close(self) -> None:
        for _, fd, _ in self._files:
            os.close(fd)
        self._files = []


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
