"""A real memory control group of its own for one test, where this machine lets the tests make one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@contextmanager
def group(limit_bytes: int, name: str = "headrace-test") -> Iterator[Path]:
    """A v1 memory group under the root of its hierarchy, with a limit; removed when the block ends."""
    if not (V1 / "memory.limit_in_bytes").is_file():
        pytest.skip("no memory control group of version 1 (/sys/fs/cgroup/memory)")
    folder = V1 / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here ({error.strerror})")
    try:
        yield folder
    finally:
        _remove(folder)


@contextmanager
def any_group(limit_bytes: int) -> Iterator[Path]:
    """A memory group of version 1, or of version 2 where the tests may make one in its root."""
    if (V1 / "memory.limit_in_bytes").is_file():
        with group(limit_bytes) as folder:
            yield folder
        return
    control = V2 / "cgroup.subtree_control"
    if not control.is_file() or "memory" not in control.read_text().split():
        pytest.skip("no memory control group of version 1, and none of version 2 that gives memory")
    folder = V2 / f"headrace-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.max").write_text(str(limit_bytes))
        (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        pytest.skip(f"no memory control group can be made here ({error.strerror})")
    try:
        yield folder
    finally:
        _remove(folder)


def kills(folder: Path) -> int:
    """How many processes of the group the kernel killed for memory."""
    events = folder / "memory.events"
    text = (events if events.is_file() else folder / "memory.oom_control").read_text()
    return int(text.split("oom_kill ")[1].split()[0])


def _remove(folder: Path) -> None:
    for below in [p for p in folder.iterdir() if p.is_dir()]:
        _remove(below)
    for pid in (folder / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)  # its own children that a failed test left
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)


def run_inside(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code as a process of the group; it joins before it does anything else."""
    return subprocess.run(
        command(folder, code, *arguments), capture_output=True, text=True, check=False, timeout=100
    )


def command(folder: Path, code: str, *arguments: str) -> list[str]:
    join = f"import os; open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    return [sys.executable, "-c", join + code, *arguments]
