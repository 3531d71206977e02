"""The disk tier of the prefix cache: a directory of segments that outlives the process.

A conversation is a chain of segments, each of which begins where its parent ends, so a later turn writes only what
is new in it. Only segments that nothing goes on from are removed, so whenever the process is killed, what is there
is whole chains and at most a temporary file. One process writes to a directory; a lock file says which.

The room is bounded. What goes first: what nobody continued, then conversations, then heads that several
conversations start from; within each the least recently used.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.engine.pages import PAGE_TOKENS
from headrace.engine.prefix_cache import common_length
from headrace.engine.prefix_segment import (
    KINDS,
    NO_PARENT,
    TEMPORARY,
    DamagedSegmentError,
    Ids,
    InaccessibleSegmentError,
    Label,
    Segment,
    is_name,
    read,
    write,
)
from headrace.errors import DiskFullError, FileError, HeadraceError, SettingError, UnsupportedError

LOCK = "lock"
DEFAULT_DISK_GB = 20.0
DEFAULT_MIN_TOKENS = 1024
DEFAULT_MAX_AGE_DAYS = 30.0
GB = 10**9
DAY = 86400

Page = Callable[[int, int], NDArray[np.uint8]]  # page `index`, zero from position `end` on


class PrefixDirectoryBusyError(HeadraceError):
    """Another process writes to the directory."""

    code = "prefix_directory_busy"
    http_status = 409


@dataclass(frozen=True)
class DiskOptions:
    """Where prefixes are kept, and how many of them. GB are decimal. Raises SettingError.

    min_tokens: shorter ones are not written. max_age_days: unused for so long, they are removed; 0 keeps them.
    """

    directory: Path
    disk_gb: float = DEFAULT_DISK_GB
    min_tokens: int = DEFAULT_MIN_TOKENS
    max_age_days: float = DEFAULT_MAX_AGE_DAYS

    def __post_init__(self) -> None:
        for title, low in (("disk_gb", 0.0), ("max_age_days", 0.0), ("min_tokens", 1)):
            value = getattr(self, title)
            if not math.isfinite(value) or not low <= value <= 10**9:
                raise SettingError(f"prefix_cache_{title} is {value}; it must be {low:g} to 10^9")


@dataclass(frozen=True)
class Binding:
    """Whose keys and values: the artifact's identity, and a hash of all that they depend on but tokens."""

    identity: bytes
    digest: bytes
    page_bytes: int


@dataclass(frozen=True)
class Found:
    """A chain from the root that begins with some tokens: `length` of them."""

    chain: tuple[Segment, ...]
    length: int

    def page(self, index: int) -> NDArray[np.uint8]:
        """Page `index`, complete up to `length`. Raises DamagedSegmentError, InaccessibleSegmentError."""
        return self.holder(index).page(index)

    def holder(self, index: int) -> Segment:
        """The deepest segment with the page: what is above it is in its page too."""
        return [s for s in self.chain if s.label.start // PAGE_TOKENS <= index][-1]


class PrefixDisk:
    """The directory while one process owns it."""

    def __init__(self, options: DiskOptions, clock: Callable[[], float] = time.time) -> None:
        """Takes the lock, and removes what is damaged, orphaned, expired or beyond the quota.

        Raises PrefixDirectoryBusyError; FileError where others may write to it; InaccessibleSegmentError for a file
        that the system refuses to read, which is kept; UnsupportedError where there are no locks; OSError where the
        directory itself cannot be used.
        """
        self.options = options
        self._clock = clock
        self.removed: list[str] = []  # names of files that were removed on opening, and why
        options.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(options.directory)
        self._lock = lock(options.directory)
        try:
            self._roots: list[Segment] = []
            self._build(*self._read())
            self._tidy(0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others have the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def nbytes(self) -> int:
        return sum(s.label.nbytes for s in self._segments())

    def find(self, binding: Binding, tokens: Tokens[int]) -> Found:
        """The longest beginning of `tokens` that is on the disk."""
        ids = np.asarray(tokens, np.int32)
        best = Found((), 0)
        todo: list[tuple[tuple[Segment, ...], Segment]] = [
            ((), root) for root in self._roots if root.label.binding == binding.digest
        ]
        while todo:
            above, segment = todo.pop()
            chain = (*above, segment)
            start = segment.label.start
            length = start + common_length(segment.tokens, ids[start:])
            if length > best.length or (length == best.length and segment.kind == "head"):
                best = Found(chain, length) if length > start else best
            if length == segment.label.end:
                todo += [(chain, child) for child in segment.children]
        return best

    def used(self, found: Found) -> None:
        """The chain has been of use now."""
        now = self._clock()
        for segment in found.chain:
            segment.used = now
            with suppress(OSError):
                os.utime(segment.path, (now, now))

    def store(
        self,
        binding: Binding,
        tokens: Tokens[int],
        prompt_tokens: int,
        page: Page,
        head: int = 0,
    ) -> None:
        """Write what is not there yet of a sequence. Raises DiskFullError, OSError; all there is stays valid.

        prompt_tokens: how many the prompt had; what follows is a reply. head: so many of the prompt are the head of
        several conversations already at the first, if they are worth writing.
        """
        ids = np.asarray(tokens, np.int32)
        if len(ids) < self.options.min_tokens:
            return
        found = self.find(binding, tokens)
        self.used(found)
        if found.length == len(ids):
            return
        parent = self._joint(binding, found, ids, page)
        head = head if self.options.min_tokens <= head <= min(prompt_tokens, len(ids)) else 0
        for end in sorted({head, min(prompt_tokens, len(ids)), len(ids)}):
            if end > (parent.label.end if parent else 0):
                kind = "head" if end == head else None
                reply = end > prompt_tokens
                parent = self._add(binding, parent, ids, end, page, reply=reply, kind=kind)

    def drop(self, segment: Segment) -> None:
        """Remove a segment and whatever goes on from it."""
        below = [segment]
        for one in below:
            below += one.children
        for one in reversed(below):  # so that what is left is whole chains
            self._remove(one)

    def _joint(self, binding: Binding, found: Found, ids: Ids, page: Page) -> Segment | None:
        """The segment to go on from: one that ends where the sequence parts from all that is there."""
        if not found.chain:
            return None
        *above, last = found.chain
        if found.length == last.label.end:
            return last
        parent = above[-1] if above else None
        if found.length < self.options.min_tokens:
            return parent
        # Inside a prompt, several conversations begin so; inside a reply, one was answered twice.
        reply = last.label.reply
        kind = None if reply else "head"
        return self._add(binding, parent, ids, found.length, page, reply=reply, kind=kind)

    def _add(
        self,
        binding: Binding,
        parent: Segment | None,
        ids: Ids,
        end: int,
        page: Page,
        *,
        reply: bool,
        kind: str | None = None,
    ) -> Segment:
        start = parent.label.end if parent else 0
        above = parent.id if parent else NO_PARENT
        label = Label(
            binding.digest, binding.identity, above, start, end, binding.page_bytes, reply
        )
        self._make_room(label.nbytes, parent)
        if kind is None:
            kind = _kind(parent, reply)
        segment = write(
            self.options.directory,
            label,
            ids[start:end].copy(),
            lambda index: page(index, end),
            kind,
            self._clock(),
        )
        self._link(segment, parent)
        if parent is not None and not reply:
            _continued(parent)
        return segment

    def _link(self, segment: Segment, parent: Segment | None) -> None:
        segment.parent = parent
        (parent.children if parent else self._roots).append(segment)

    def _make_room(self, nbytes: int, parent: Segment | None) -> None:
        quota = int(self.options.disk_gb * GB)
        if nbytes > quota:
            raise DiskFullError(
                self.options.directory, nbytes, quota, "the quota is smaller than it"
            )
        self._tidy(nbytes, keep=parent)
        free = shutil.disk_usage(self.options.directory).free
        if self.nbytes + nbytes > quota or nbytes > free:
            raise DiskFullError(self.options.directory, nbytes, min(free, quota - self.nbytes))

    def _tidy(self, nbytes: int, keep: Segment | None = None) -> None:
        """Remove what is too old, then what must make room for `nbytes` more; never what leads to `keep`."""
        oldest = self._clock() - self.options.max_age_days * DAY
        quota = int(self.options.disk_gb * GB)
        while True:
            leaves = [s for s in self._segments() if not s.children and s is not keep]
            if self.options.max_age_days and (old := [s for s in leaves if s.used < oldest]):
                gone = old[0]
            elif leaves and self.nbytes + nbytes > quota:
                gone = min(leaves, key=lambda s: (KINDS.index(s.kind), s.used))
            else:
                return
            self._remove(gone)

    def _remove(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        (segment.parent.children if segment.parent else self._roots).remove(segment)

    def _segments(self) -> Iterator[Segment]:
        todo = list(self._roots)
        while todo:
            segment = todo.pop()
            yield segment
            todo += segment.children

    def _read(self) -> tuple[list[Segment], list[InaccessibleSegmentError]]:
        """Every segment; what is damaged is removed, as is a writer's unfinished file."""
        found, refused = [], []
        for path in sorted(self.options.directory.iterdir()):
            if path.name.startswith(TEMPORARY):
                path.unlink()
                self.removed.append(f"{path.name}: unfinished")
            if not is_name(path.name):
                continue
            try:
                found.append(read(path))
            except DamagedSegmentError as error:
                path.unlink()
                self.removed.append(f"{path.name}: {error.place}: {error.cause}")
            except InaccessibleSegmentError as error:
                refused.append(error)
        return found, refused

    def _build(self, found: list[Segment], refused: list[InaccessibleSegmentError]) -> None:
        """The tree of segments; those whose parent is gone are removed."""
        if refused:
            raise refused[0]
        known = {segment.id: segment for segment in found}
        for segment in sorted(found, key=lambda s: s.label.start):
            parent = known.get(segment.label.parent)
            if segment.label.start == 0 and segment.label.parent == NO_PARENT:
                self._link(segment, None)
            elif parent is not None and _goes_on(parent.label, segment.label):
                self._link(segment, parent)
            else:
                known.pop(segment.id)
                segment.path.unlink()
                self.removed.append(f"{segment.path.name}: what it goes on from is gone")


@dataclass(frozen=True)
class Survey:
    """What a directory holds, in order of use, the latest first; files that are damaged or cannot be read."""

    segments: tuple[Segment, ...]
    faulty: tuple[FileError, ...]


def survey(directory: Path) -> Survey:
    """Look, and change nothing; also while another process writes. Raises FileError."""
    _check_folder(directory)
    segments, faulty = [], []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if is_name(path.name):
            try:
                segments.append(read(path))
            except (DamagedSegmentError, InaccessibleSegmentError) as error:
                if os.path.lexists(path):  # not removed meanwhile
                    faulty.append(error)
    segments.sort(key=lambda s: (-s.used, -s.label.end))
    return Survey(tuple(segments), tuple(faulty))


def clear(directory: Path) -> tuple[int, list[OSError]]:
    """Remove every segment; how many are gone, and why others are not.

    Raises PrefixDirectoryBusyError, FileError.
    """
    _check_folder(directory)
    if not directory.is_dir():
        return 0, []
    if not any(_is_ours(path) for path in directory.iterdir()):
        return 0, []  # and no lock is made in what never was a cache
    gone, left, handle = 0, [], lock(directory)
    try:
        for path in sorted(directory.iterdir()):
            if path.name != LOCK and _is_ours(path):
                try:
                    path.unlink()
                    gone += 1
                except OSError as error:
                    left.append(error)
    finally:
        os.close(handle)
    return gone, left


def _is_ours(path: Path) -> bool:
    return path.name == LOCK or is_name(path.name) or path.name.startswith(TEMPORARY)


def _check_folder(directory: Path) -> None:
    """One that is not there yet is empty. Raises FileError."""
    if directory.exists() and not directory.is_dir():
        raise FileError(directory, "kind", "is no folder")


def check_owner(directory: Path) -> None:
    """Digests find damage, not forgery: who may write here may say what is answered. Raises FileError."""
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FileError(directory, "permissions", "others may write to it", hint="chmod 700")


def lock(directory: Path) -> int:
    """The open lock file of a directory. Raises PrefixDirectoryBusyError, UnsupportedError."""
    try:
        import fcntl
    except ImportError:
        raise UnsupportedError("this system has no file locks for a prefix cache on disk") from None
    handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise PrefixDirectoryBusyError(
            f"{directory}: another process uses this prefix cache", hint="one at a time may"
        ) from None
    return handle


def _goes_on(parent: Label, label: Label) -> bool:
    same = parent.binding == label.binding and parent.page_bytes == label.page_bytes
    return same and parent.end == label.start


def _kind(parent: Segment | None, reply: bool) -> str:
    if parent is None or parent.kind == "head":
        return "state"
    return parent.kind if reply and not parent.label.reply else "turn"


def _continued(segment: Segment) -> None:
    """Another prompt goes on from a segment: the first makes it a conversation, the second the head of several."""
    prompts = [child for child in segment.children if not child.label.reply]
    if len(prompts) > 1 and not segment.label.reply:
        segment.rename("head")
    above: Segment | None = segment
    while above is not None and above.kind == "state":
        above.rename("turn")
        above = above.parent
