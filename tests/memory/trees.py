"""File trees that look like /proc and /sys of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30

Group = tuple[str, int, int]  # limit as the kernel spells it, usage, inactive file cache


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def system(root: Path, total: int = 16 * GIB, available: int = 12 * GIB) -> Path:
    """A machine without groups."""
    meminfo = f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"
    status = "Name: x\nVmHWM:\t 300 kB\nVmRSS:\t 200 kB\nRssAnon:\t 100 kB\n"
    psi = "some avg10=1.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=3\n"
    return write(
        root,
        {"proc/meminfo": meminfo, "proc/self/status": status, "proc/pressure/memory": psi},
    )


def v2(root: Path, own: str, groups: Mapping[str, Group], inside: str = "/") -> Path:
    """Groups of the unified hierarchy by path; the process is in `own`."""
    mount = f"30 1 0:26 {inside} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    write(root, {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": mount})
    for path, (limit, usage, inactive) in groups.items():
        at = f"sys/fs/cgroup{path.rstrip('/')}"
        write(
            root,
            {
                f"{at}/memory.max": f"{limit}\n",
                f"{at}/memory.current": f"{usage}\n",
                f"{at}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
                f"{at}/memory.peak": f"{usage + 1}\n",
                f"{at}/memory.pressure": "some avg10=33.00 avg60=0 avg300=0 total=1\n",
            },
        )
    return root


def v1(root: Path, own: str, groups: Mapping[str, Group], inside: str = "/") -> Path:
    """Groups of the memory controller's own hierarchy, beside an empty unified one."""
    mounts = (
        f"35 1 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 1 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    groups_text = f"9:name=systemd:/\n4:cpu,cpuacct:/elsewhere\n3:memory:{own}\n0::/\n"
    write(root, {"proc/self/cgroup": groups_text, "proc/self/mountinfo": mounts})
    for path, (limit, usage, inactive) in groups.items():
        at = f"sys/fs/cgroup/memory{path.rstrip('/')}"
        write(
            root,
            {
                f"{at}/memory.limit_in_bytes": f"{limit}\n",
                f"{at}/memory.usage_in_bytes": f"{usage}\n",
                f"{at}/memory.max_usage_in_bytes": f"{usage + 1}\n",
                f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
            },
        )
    return root
