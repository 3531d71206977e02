"""One file of the prefix cache's disk tier: a span of tokens and the pages that hold them. Knows no tree.

Layout, little-endian: a header (`_HEADER`); token ids i32[end - start]; a SHA-256 of each page; the SHA-256 of all
that; the pages, from the one of position `start` on. A segment goes on from the segment `parent`, which ends where
it starts; its id is the hash of its header and tokens, and so of every token before them. Segments are written
under another name, synced and renamed: under its own name a file is whole, or damaged later.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.engine.pages import PAGE_TOKENS, pages_for
from headrace.errors import FileError

SUFFIX = ".kv"
TEMPORARY = ".new-"
KINDS = ("state", "turn", "head")  # what nobody continued, a conversation, what several start from
NO_PARENT = bytes(32)
SEGMENT_VERSION = 1
_MAGIC = b"HR-SEG\r\n"
_HEADER = struct.Struct("<8sII32s32s32sQQQ")
_DIGEST = 32
_MOST_TOKENS = 1 << 28
_MOST_PAGE_BYTES = 1 << 32

Ids = NDArray[np.int32]
Pages = Callable[[int], NDArray[np.uint8]]  # a page of a sequence by its index, u8[page_bytes]


class DamagedSegmentError(FileError):
    """A segment's bytes are not those that were written, or another version wrote them."""

    code = "bad_segment"


class InaccessibleSegmentError(FileError):
    """The system refuses to read or remove a file of the prefix cache; it is kept."""

    code = "inaccessible_segment"


@dataclass(frozen=True)
class Label:
    """What a segment is: whose, after which, and where. binding: a hash of what its bytes depend on but tokens."""

    binding: bytes
    identity: bytes  # of the artifact, to show
    parent: bytes
    start: int
    end: int
    page_bytes: int
    reply: bool  # tokens that the model generated

    def __post_init__(self) -> None:
        possible = 0 <= self.start < self.end <= _MOST_TOKENS
        if not possible or not 0 < self.page_bytes <= _MOST_PAGE_BYTES:
            raise ValueError("impossible lengths")

    @property
    def num_pages(self) -> int:
        return pages_for(self.end) - self.start // PAGE_TOKENS

    @property
    def meta_bytes(self) -> int:
        """Of everything in front of the pages."""
        return _HEADER.size + 4 * (self.end - self.start) + _DIGEST * (self.num_pages + 1)

    @property
    def nbytes(self) -> int:
        return self.meta_bytes + self.num_pages * self.page_bytes

    def pack(self) -> bytes:
        hashes = (self.binding, self.identity, self.parent)
        sizes = (self.start, self.end, self.page_bytes)
        return _HEADER.pack(_MAGIC, SEGMENT_VERSION, self.reply, *hashes, *sizes)


@dataclass(eq=False)
class Segment:
    """A segment that is on the disk, with everything but its pages. used: seconds since the epoch."""

    path: Path
    label: Label
    tokens: Ids
    digests: bytes
    id: bytes
    kind: str
    used: float
    parent: Segment | None = None
    children: list[Segment] = field(default_factory=list)

    def page(self, index: int) -> NDArray[np.uint8]:
        """Page `index` of the sequence, verified. Raises DamagedSegmentError, InaccessibleSegmentError."""
        at = index - self.label.start // PAGE_TOKENS
        size = self.label.page_bytes
        with opened(self.path) as file:
            data = os.pread(file.fileno(), size, self.label.meta_bytes + at * size)
        if hashlib.sha256(data).digest() != self.digests[at * _DIGEST : (at + 1) * _DIGEST]:
            raise DamagedSegmentError(self.path, f"page {at}", "its bytes are not those written")
        return np.frombuffer(data, np.uint8)

    def rename(self, kind: str) -> None:
        """Say what it is now, in its name."""
        if kind != self.kind:
            path = self.path.with_name(name(self.id, kind))
            self.path.rename(path)
            self.path, self.kind = path, kind


def name(identity: bytes, kind: str) -> str:
    return f"{identity.hex()}-{kind}{SUFFIX}"


def is_name(text: str) -> bool:
    """Whether a file name is a segment's."""
    stem, dash, kind = text.removesuffix(SUFFIX).partition("-")
    hexadecimal = len(stem) == 64 and not set(stem) - set("0123456789abcdef")
    return text.endswith(SUFFIX) and bool(dash) and kind in KINDS and hexadecimal


def opened(path: Path) -> BufferedReader:
    """A regular file for reading. Raises InaccessibleSegmentError."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise InaccessibleSegmentError(path, "open", error.strerror or str(error)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InaccessibleSegmentError(path, "open", "it is no regular file")
    return file


def read(path: Path) -> Segment:
    """Everything of a segment but its pages, verified.

    Raises DamagedSegmentError; InaccessibleSegmentError where the system refuses; FileNotFoundError never.
    """
    with opened(path) as file:
        status = os.fstat(file.fileno())
        try:
            label = _label(path, file.read(_HEADER.size))
            if status.st_size != label.nbytes:
                raise DamagedSegmentError(
                    path, "size", f"{status.st_size:,} bytes in place of {label.nbytes:,}"
                )
            rest = file.read(label.meta_bytes - _HEADER.size)
        except OSError as error:
            raise InaccessibleSegmentError(path, "read", error.strerror or str(error)) from None
    header, size = label.pack(), 4 * (label.end - label.start)
    if hashlib.sha256(header + rest[:-_DIGEST]).digest() != rest[-_DIGEST:]:
        raise DamagedSegmentError(path, "header", "its digest does not match")
    tokens, digests = rest[:size], rest[size:-_DIGEST]
    own = hashlib.sha256(header + tokens).digest()
    stem, _, kind = path.name.removesuffix(SUFFIX).partition("-")
    if stem != own.hex():
        raise DamagedSegmentError(path, "name", "it is another segment's")
    ids = np.frombuffer(tokens, "<i4").astype(np.int32)
    return Segment(path, label, ids, digests, own, kind, status.st_mtime)


def _label(path: Path, header: bytes) -> Label:
    if len(header) < _HEADER.size:
        raise DamagedSegmentError(path, "header", "the file ends in it")
    magic, version, flags, binding, identity, parent, start, end, size = _HEADER.unpack(header)
    if magic != _MAGIC or version != SEGMENT_VERSION or flags > 1:
        raise DamagedSegmentError(path, "header", "it is not of this version")
    try:
        return Label(binding, identity, parent, start, end, size, bool(flags))
    except ValueError as error:
        raise DamagedSegmentError(path, "header", str(error)) from None


def write(
    directory: Path, label: Label, tokens: Ids, page: Pages, kind: str, now: float
) -> Segment:
    """Write and publish a segment; the path has nothing or all of it. Raises OSError, leaving nothing behind."""
    header, ids = label.pack(), tokens.astype("<i4").tobytes()
    own = hashlib.sha256(header + ids).digest()
    temporary = directory / f"{TEMPORARY}{secrets.token_hex(8)}"
    path = directory / name(own, kind)
    first = label.start // PAGE_TOKENS
    digests = []
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.seek(label.meta_bytes)
            for index in range(first, first + label.num_pages):
                data = page(index).tobytes()
                digests.append(hashlib.sha256(data).digest())
                file.write(data)
            meta = header + ids + b"".join(digests)
            file.seek(0)
            file.write(meta + hashlib.sha256(meta).digest())
            file.flush()
            os.fsync(file.fileno())
        os.utime(temporary, (now, now))
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(directory)
    return Segment(path, label, tokens, b"".join(digests), own, kind, now)


def sync(directory: Path) -> None:
    """Make names durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
