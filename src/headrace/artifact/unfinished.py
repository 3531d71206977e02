"""What is being written: hidden names beside the place that it is for, with the process that writes in them.

A file or folder gets its own name when it is complete. What a killed process left is found by the next one that
writes to the same place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"\.(?P<target>.+)\.partial-(?P<pid>\d+)(?:\.(?P<start>\d+))?(?:-(?P<kind>.*))?")


@dataclass(frozen=True)
class Leftover:
    """What a process that is gone left in `path` on its way to `target`; kind: the end of its name."""

    path: Path
    target: str
    kind: str


def working_name(target: Path) -> str:
    """The hidden name of what this process writes for `target`; more may follow after a dash."""
    pid = os.getpid()
    return f".{target.name}.partial-{pid}.{_start_of(pid) or 0}"


def leftovers(folder: Path) -> Iterator[Leftover]:
    """What processes that are gone left in a folder. Raises OSError where it cannot be read."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and not _lives(int(match["pid"]), match["start"]):
            yield Leftover(path, match["target"], match["kind"] or "")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place when the block ends without an error."""
    with suppress(OSError):  # a folder that may be written to, but not listed
        for left in leftovers(path.parent):
            if left.target == path.name:
                left.path.unlink(missing_ok=True)
    work = path.with_name(working_name(path))
    try:
        yield work
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)


def _lives(pid: int, start: str | None) -> bool:
    """Whether the process is there, and not another one that got its number since."""
    found = _start_of(pid)
    return found is not None and start in (None, "0", str(found))


def _start_of(pid: int) -> int | None:
    """When a process began, in ticks since the system did; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("latin-1")
    except OSError:
        return None
    return int(
        text.rpartition(")")[2].split()[19]
    )  # field 22; the command before it may hold anything
