"""A memory limit as the kernel enforces it: a group of processes, its peak, and whether something was killed in it.

Control groups of either version; making one takes root. A command joins by `prefix`, before it is anything else, so
that everything it touches counts against the limit, the page cache of its files included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MOUNT = Path("/sys/fs/cgroup")


class GroupError(Exception):
    """There can be no memory group here; the message says why."""


@dataclass(frozen=True)
class Names:
    """What a version calls its files. events: "max" or "oom_kill" of memory.events, or a file of one number."""

    limit: str
    peak: str
    swap: str
    unlimited_swap: bool  # whether the swap limit counts swap alone


V1 = Names(
    "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.memsw.limit_in_bytes", False
)
V2 = Names("memory.max", "memory.peak", "memory.swap.max", True)


@dataclass(frozen=True)
class Usage:
    """What a group did so far. hits: how often usage met the limit, so that the kernel had to take pages back."""

    peak_bytes: int
    hits: int
    killed: int


class MemoryGroup:
    """A group with a limit; use it in a `with`. Raises GroupError."""

    def __init__(self, limit_bytes: int, mount: Path = MOUNT) -> None:
        parent, self._names = _find(mount)
        self.limit_bytes = limit_bytes
        self.path = parent / f"headrace-bench-{os.getpid()}-{time.monotonic_ns()}"
        try:
            self.path.mkdir()
            (self.path / self._names.limit).write_text(str(limit_bytes))
        except OSError as error:
            raise GroupError(f"no memory group can be made in {parent}: {error.strerror}") from None
        self._limit_swap()

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command: a shell that joins the group and becomes the command."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"))

    def usage(self) -> Usage:
        peak = int((self.path / self._names.peak).read_text())
        if self._names is V2:
            events = _pairs((self.path / "memory.events").read_text())
            return Usage(peak, events.get("max", 0), events.get("oom_kill", 0))
        hits = int((self.path / "memory.failcnt").read_text())
        killed = _pairs((self.path / "memory.oom_control").read_text()).get("oom_kill", 0)
        return Usage(peak, hits, killed)

    def close(self) -> None:
        """Remove the group; the kernel may need a moment after its last process."""
        for _ in range(50):
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return

    def _limit_swap(self) -> None:
        """Nothing of the limit may be had as swap, where the kernel accounts for swap."""
        file = self.path / self._names.swap
        if file.exists():
            file.write_text("0" if self._names.unlimited_swap else str(self.limit_bytes))


def drop_page_cache() -> None:
    """Write back what is dirty and forget every clean page. Raises GroupError without the right to."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        raise GroupError(f"the page cache cannot be dropped: {error.strerror}") from None


def _find(mount: Path) -> tuple[Path, Names]:
    """Where groups with a memory limit are made, and how their files are called."""
    if (mount / "memory" / "memory.limit_in_bytes").exists():
        return mount / "memory", V1
    if "memory" in _words(mount / "cgroup.subtree_control"):
        return mount, V2
    raise GroupError(f"no memory controller for groups below {mount}")


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _pairs(text: str) -> Mapping[str, int]:
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}
