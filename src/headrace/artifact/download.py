"""Downloads one file that is pinned by size and SHA-256.

Resumable, and never under its final name before it is right: what has come so far lies in `NAME.partial`,
the server's tag for that version of the file in `NAME.partial.etag`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from urllib3 import BaseHTTPResponse

from headrace.artifact.room import full_disk_told
from headrace.artifact.web import opened, shown
from headrace.errors import DownloadError

Progress = Callable[[int, int], None]

CHUNK = 1 << 20
TRIES = 5  # connections for one file; each begins where the last broke off
AGAIN = "run it again to go on where it stopped"


def is_pinned(path: Path, nbytes: int, sha256: str) -> bool:
    """Whether the file is there and has the pinned size and hash."""
    return path.is_file() and path.stat().st_size == nbytes and _sha256(path) == sha256


def fetch_pinned(url: str, target: Path, nbytes: int, sha256: str, progress: Progress) -> None:
    """Download `url` to `target`, going on with what an earlier try left.

    Raises DownloadError, DiskFullError. The partial file is kept when the connection broke or the user did,
    and removed when its bytes are not the pinned ones.
    """
    partial = _Partial(target, nbytes)
    with full_disk_told(target, nbytes):
        _fill(url, partial, progress)
    if (digest := _sha256(partial.path)) != sha256:
        partial.remove()
        raise DownloadError(
            f"{shown(url)}: the bytes have SHA-256 {digest[:16]}…, the registry pins {sha256[:16]}…",
            hint="the download was removed; try again",
        )
    partial.publish(target)


class _Partial:
    """What has come so far, and of which version of the file."""

    def __init__(self, target: Path, nbytes: int) -> None:
        self.path = target.with_name(target.name + ".partial")
        self.nbytes = nbytes
        self._tag_path = target.with_name(target.name + ".partial.etag")
        if self.size > nbytes:
            self.remove()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def tag(self) -> str | None:
        """The tag of the version that the partial file is of, where the server gave a strong one."""
        return self._tag_path.read_text("latin-1") if self._tag_path.exists() else None

    def begin(self, tag: str | None) -> None:
        """Forget what has come; what comes now is of the version `tag`."""
        self.remove()
        if tag is not None and tag.startswith('"'):  # a weak one promises no equal bytes
            self._tag_path.write_text(tag, "latin-1")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._tag_path.unlink(missing_ok=True)

    def publish(self, target: Path) -> None:
        self.path.replace(target)
        self._tag_path.unlink(missing_ok=True)


def _fill(url: str, partial: _Partial, progress: Progress) -> None:
    """Connect until all has come, as long as each connection brings something."""
    for left in reversed(range(TRIES)):
        before = partial.size
        if before == partial.nbytes:
            return
        try:
            _append(url, partial, progress)
        except DownloadError as error:
            if partial.size == 0:
                partial.remove()
            if left == 0 or partial.size <= before:
                raise DownloadError(error.message, hint=error.hint or AGAIN) from None


def _append(url: str, partial: _Partial, progress: Progress) -> None:
    with opened(url, _headers(partial)) as response:
        _place(url, response, partial)
        with partial.path.open("ab") as file:
            _receive(url, response, file, partial.nbytes, progress)


def _headers(partial: _Partial) -> dict[str, str]:
    headers = {"Accept-Encoding": "identity"}
    if partial.size:
        headers["Range"] = f"bytes={partial.size}-"
        if partial.tag is not None:
            headers["If-Range"] = partial.tag
    return headers


def _place(url: str, response: BaseHTTPResponse, partial: _Partial) -> None:
    """Make the end of the partial file the place where the body belongs.

    A server that ignores the range, or has another version by now, sends the whole file again (200).
    """
    if response.status == 200:
        partial.begin(response.headers.get("ETag"))
        return
    if response.status == 206 and partial.size:
        wanted = f"bytes {partial.size}-{partial.nbytes - 1}/{partial.nbytes}"
        if response.headers.get("Content-Range", "").strip() == wanted:
            return
    hint = "try again"
    if response.status == 416:  # it has no such rest: what has come is of another file
        partial.remove()
    elif response.status == 206:  # a fault of the server or of a proxy: what has come may be right
        hint = f"try again; if it stays so, remove {partial.path}"
    raise DownloadError(
        f"{shown(url)}: the server answered {response.status}"
        f" {response.headers.get('Content-Range', '')!r:.80}",
        hint=hint,
    )


def _receive(
    url: str, response: BaseHTTPResponse, file: BinaryIO, nbytes: int, progress: Progress
) -> None:
    done = file.tell()
    while chunk := response.read1(CHUNK):
        done += len(chunk)
        if done > nbytes:
            file.truncate(0)
            raise DownloadError(
                f"{shown(url)}: sends more than the {nbytes:,} bytes that the registry pins",
                hint="the download was removed; try again",
            )
        file.write(chunk)
        progress(done, nbytes)
    if done < nbytes:
        raise DownloadError(f"{shown(url)}: broke off after {done:,} of {nbytes:,} bytes")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
