"""Downloads one file, pinned by size and SHA-256: resumable, and never under its final name before it is right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3

from headrace.errors import DownloadError

Progress = Callable[[int, int], None]

CHUNK = 1 << 20
TIMEOUT = urllib3.Timeout(connect=20, read=60)
RETRIES = urllib3.Retry(total=3, backoff_factor=0.5, status_forcelist=(429, 502, 503, 504))


def fetch_pinned(url: str, target: Path, nbytes: int, sha256: str, progress: Progress) -> None:
    """Download `url` to `target`, going on with what an earlier try left in `target`.partial.

    Raises DownloadError; the partial file is kept when the connection broke and removed when its bytes are
    not the pinned ones.
    """
    partial = target.with_name(target.name + ".partial")
    have = partial.stat().st_size if partial.exists() else 0
    if have > nbytes:
        partial.unlink()
        have = 0
    if have < nbytes:
        _append(url, partial, have, nbytes, progress)
    if (digest := _sha256(partial)) != sha256:
        partial.unlink()
        raise DownloadError(
            f"{url}: the bytes have SHA-256 {digest[:16]}…, the registry pins {sha256[:16]}…",
            hint="the download was removed; try again",
        )
    partial.replace(target)


def _append(url: str, partial: Path, have: int, nbytes: int, progress: Progress) -> None:
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib3.PoolManager(retries=RETRIES, timeout=TIMEOUT) as pool:
            response = pool.request("GET", url, headers=headers, preload_content=False)
            try:
                _receive(url, response, partial, have, nbytes, progress)
            finally:
                response.release_conn()
    except urllib3.exceptions.HTTPError as error:
        raise DownloadError(
            f"{url}: {_cause(error)}", hint="run it again to go on where it stopped"
        ) from None


def _receive(
    url: str, response: Any, partial: Path, have: int, nbytes: int, progress: Progress
) -> None:
    start = _start(url, response, have, nbytes)
    with partial.open("r+b" if start else "wb") as file:
        file.seek(start)
        done = start
        while chunk := response.read(CHUNK):
            done += len(chunk)
            if done > nbytes:
                file.truncate(0)
                raise DownloadError(f"{url}: more than the {nbytes:,} bytes that the registry pins")
            file.write(chunk)
            progress(done, nbytes)
        file.truncate()
    if done < nbytes:
        raise DownloadError(
            f"{url}: broke off after {done:,} of {nbytes:,} bytes",
            hint="run it again to go on where it stopped",
        )


def _start(url: str, response: Any, have: int, nbytes: int) -> int:
    """Where the body belongs: a server that ignored the range sends the whole file again."""
    if response.status == 200:
        return 0
    if response.status == 206 and have:
        wanted = f"bytes {have}-{nbytes - 1}/{nbytes}"
        if response.headers.get("Content-Range", "").strip() == wanted:
            return have
        raise DownloadError(
            f"{url}: asked for {wanted}, got {response.headers.get('Content-Range')!r:.80}"
        )
    raise DownloadError(f"{url}: the server answered {response.status}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


def fetch_json(url: str, accept: str, max_bytes: int) -> bytes:
    """A small document. Raises DownloadError."""
    try:
        with urllib3.PoolManager(retries=RETRIES, timeout=TIMEOUT) as pool:
            response = pool.request("GET", url, headers={"Accept": accept}, preload_content=False)
            body: bytes = response.read(max_bytes + 1)
            response.release_conn()
    except urllib3.exceptions.HTTPError as error:
        raise DownloadError(f"{url}: {_cause(error)}") from None
    if response.status != 200 or len(body) > max_bytes:
        raise DownloadError(
            f"{url}: the server answered {response.status} with {len(body):,} bytes"
        )
    return body
