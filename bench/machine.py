"""Facts about the machine and the tree that every row carries. No host names, no paths."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.rows import Run

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("src", "bench", "CMakeLists.txt", "pyproject.toml")  # what may change a number

FLAGS = (
    *(
        "avx2",
        "fma",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
    ),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "sve"),
)


def facts() -> dict[str, Any]:
    """Processor, instruction sets of interest, cores, cache, memory, system, load average."""
    return {
        "cpu": _cpu_model(),
        "flags": [flag for flag in FLAGS if flag in _cpu_flags()],
        "cores": os.cpu_count() or 1,
        "l3_bytes": l3_bytes(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def new_run(command: str) -> Run:
    """The facts of a run that starts now."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Run(now, command, commit(), facts())


def commit() -> str:
    """headrace's commit; "unknown" outside a git tree. Recorded results do not count as a change."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--", *MEASURED, ":!bench/results")
    return f"{head}+changes" if changed else head


def versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of this interpreter's packages; absent ones are left out."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def l3_bytes() -> int:
    """The last-level cache as the system reports it; 0 if it does not."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((_size(path.read_text().strip()) for path in sizes), default=0)


def _size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def _cpu_model() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    return set((_cpu_field("flags") or _cpu_field("Features")).split())


def _cpu_field(name: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
