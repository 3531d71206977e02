"""The machine as a value: how much memory there is, how much of it this process may take, and why.

The only place that reads /proc and the control groups. A `Machine` can be simulated; a simulated one
plans but loads nothing. Knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import SettingError

MAX_BYTES = 1 << 62  # no byte count above this is believed
# A v1 group without a limit names the largest multiple of its page size in 63 bits.
_UNLIMITED = MAX_BYTES


@dataclass(frozen=True)
class Limit:
    """The memory limit of one control group, the process's own or one above it, in bytes.

    `used_bytes` is usage without the inactive file cache, which the kernel gives back for the asking.
    """

    source: str
    limit_bytes: int
    used_bytes: int

    @property
    def room_bytes(self) -> int:
        """What may still be charged to the group."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Pressure:
    """Pressure stall information: shares of the last ten seconds, in percent, spent waiting for memory."""

    some_avg10: float
    full_avg10: float


@dataclass(frozen=True)
class Machine:
    """What a plan needs to know about a machine; sizes in bytes.

    available_bytes: what the system says could be had without swapping. own_bytes: what this process
    already holds for itself, part of what is not available but part of its own budget. charged_bytes: the same as its
    control group accounts it, which also counts mapped files that are in use and the kernel's own memory.
    group_pressure: of the process's own control group, where the kernel accounts it.
    """

    physical_bytes: int
    available_bytes: int
    cores: int
    limits: tuple[Limit, ...] = ()
    pressure: Pressure | None = None
    group_pressure: Pressure | None = None
    own_bytes: int = 0
    charged_bytes: int = 0
    disk_bytes_per_s: int | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        for name in ("physical_bytes", "available_bytes", "own_bytes", "charged_bytes"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_BYTES:
                raise SettingError(f"machine: {name} is {value}; it must be from 0 to {MAX_BYTES}")

    @property
    def capacity_bytes(self) -> int:
        """The memory that there is for this process at most: the least of physical memory and limits."""
        return min([self.physical_bytes, *(limit.limit_bytes for limit in self.limits)])

    @property
    def usable_bytes(self) -> int:
        """What can be taken now: the least room of all groups, and never more than is available."""
        return min([self.available_bytes, *(limit.room_bytes for limit in self.limits)])

    @property
    def held_bytes(self) -> int:
        """What the process holds already, and every plan has to contain."""
        return max(self.own_bytes, self.charged_bytes) if self.limits else self.own_bytes

    @property
    def budget_bytes(self) -> int:
        """The largest budget that the whole process could have now.

        What the system calls available counts mapped files already, a group's room does not.
        """
        rooms = [limit.room_bytes + self.held_bytes for limit in self.limits]
        return min([self.capacity_bytes, self.available_bytes + self.own_bytes, *rooms])

    @property
    def tightest(self) -> Limit | None:
        """The group that bounds the budget; None where what the system has available does."""
        tight = min(self.limits, key=lambda limit: limit.room_bytes, default=None)
        free = self.available_bytes + self.own_bytes
        return tight if tight and tight.room_bytes + self.held_bytes < free else None


def simulated(ram_bytes: int, available_bytes: int | None, cores: int) -> Machine:
    """A machine with this much memory, all of it available by default. It can plan and not load."""
    available = ram_bytes if available_bytes is None else available_bytes
    if available > ram_bytes:
        raise SettingError(
            f"{available:,} bytes cannot be available in a machine of {ram_bytes:,} bytes"
        )
    return Machine(ram_bytes, available, cores, simulated=True)


def read_machine(root: Path = Path("/")) -> Machine:
    """This machine as it is now. `root` is where /proc and /sys are looked for. Raises SettingError."""
    meminfo = _fields(_text(root / "proc/meminfo"))
    total = meminfo.get("MemTotal", 0)
    if total <= 0:
        raise SettingError(f"{root / 'proc/meminfo'} does not say how much memory there is")
    own = group_folders(root)
    pressures = (_pressure(folder / "memory.pressure") for folder in own[:1])
    status = _fields(_text(root / "proc/self/status"))
    held = status.get("RssAnon", 0)
    return Machine(
        physical_bytes=total,
        available_bytes=min(total, meminfo.get("MemAvailable", meminfo.get("MemFree", 0))),
        cores=usable_cores(),
        limits=tuple(limit for folder in own if (limit := _limit(root, folder)) is not None),
        pressure=_pressure(root / "proc/pressure/memory"),
        group_pressure=next(pressures, None),
        own_bytes=held,
        charged_bytes=held + _charged(root, own[0], status) if own else held,
    )


def usable_cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def group_folders(root: Path = Path("/")) -> tuple[Path, ...]:
    """The folders of the process's memory group and of the groups above it, its own first.

    Where both hierarchies exist, the one that has the memory controller counts.
    """
    v1: str | None = None
    v2: str | None = None
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            v1 = path
        elif controllers == "":
            v2 = path
    for group, kind, option in ((v1, "cgroup", "memory"), (v2, "cgroup2", "")):
        if group is None:
            continue
        for mount, inside in _mounts(root, kind, option):
            folders = tuple(_upwards(root, mount, inside, group))
            if any(_has_memory(folder) for folder in folders):
                return folders
    return ()


def _has_memory(folder: Path) -> bool:
    names = ("memory.limit_in_bytes", "memory.max", "memory.current")
    return any((folder / name).is_file() for name in names)


def _mounts(root: Path, kind: str, option: str) -> Iterator[tuple[Path, str]]:
    """Mount points of a hierarchy, and which group of it each shows (proc(5), mountinfo)."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(types) < 3 or types[0] != kind:
            continue
        if not option or option in types[2].split(","):
            yield Path(_unescaped(fields[4])), _unescaped(fields[3])


def _unescaped(text: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _upwards(root: Path, mount: Path, inside: str, group: str) -> Iterator[Path]:
    """Folders from a group up to its hierarchy's mount point.

    A container's mount shows only its own group, under a name that /proc may spell from outside.
    """
    top = root / mount.relative_to(mount.anchor)
    if inside != "/" and (group == inside or group.startswith(inside + "/")):
        group = group[len(inside) :]
    folder = top / group.lstrip("/")
    if ".." in Path(group).parts or not folder.is_dir():
        folder = top
    while True:
        yield folder
        if folder == top:
            return
        folder = folder.parent


def _limit(root: Path, folder: Path) -> Limit | None:
    """A group's limit, or None where it has none or cannot be read."""
    v1 = (folder / "memory.limit_in_bytes").is_file()
    limit = _number(folder / ("memory.limit_in_bytes" if v1 else "memory.max"))
    usage = _number(folder / ("memory.usage_in_bytes" if v1 else "memory.current"))
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    stat = _fields(_text(folder / "memory.stat"))
    # In v1 the plain figure leaves out the groups below; in v2 it holds them.
    reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    name = "/" + str(folder.relative_to(root))
    return Limit(name, limit, max(0, usage - reclaimable))


def _charged(root: Path, folder: Path, status: dict[str, int]) -> int:
    """What a group accounts to this process besides its anonymous memory.

    Mapped files count where the group's cache is in use, so that what it gives back is not counted twice. The kernel's
    memory can only be told from that of others in a group that the process has to itself; else it is its page tables.
    """
    stat = _fields(_text(folder / "memory.stat"))
    files = min(status.get("RssFile", 0), stat.get("total_active_file", stat.get("active_file", 0)))
    kernel = status.get("VmPTE", 0)
    alone = _text(folder / "cgroup.procs").split() == [_own_name(root)]
    if alone and not any(path.is_dir() for path in folder.glob("*")):
        parts = [stat.get(name, 0) for name in ("kernel_stack", "pagetables", "slab")]
        v1 = _number(folder / "memory.kmem.usage_in_bytes")
        kernel = max(kernel, v1 or 0, stat.get("kernel", 0), sum(parts))
    return files + kernel


def _own_name(root: Path) -> str:
    """This process, as its group lists it."""
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("Pid:"):
            return line.split()[1]
    return str(os.getpid())


def _pressure(path: Path) -> Pressure | None:
    """A pressure file: lines `some avg10=0.00 …` and `full avg10=…`."""
    shares = {}
    for line in _text(path).splitlines():
        kind, _, rest = line.partition(" ")
        first, _, value = rest.partition(" ")[0].partition("=")
        if first == "avg10":
            shares[kind] = _share(value)
    if "some" not in shares:
        return None
    return Pressure(shares["some"], shares.get("full", 0.0))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value <= 100 else 0.0


@dataclass(frozen=True)
class ProcessMemory:
    """What the kernel says this process takes and took at most, in bytes.

    The kernel keeps the peaks itself, so nothing that was freed between two looks is missed.
    group_peak_bytes: of the whole control group, with its page cache; None where it is not kept.
    """

    resident_bytes: int
    peak_bytes: int
    group_peak_bytes: int | None


def process_memory(root: Path = Path("/")) -> ProcessMemory:
    """The memory of this process now and at its peak."""
    status = _fields(_text(root / "proc/self/status"))
    peaks = (
        _number(folder / name)
        for folder in group_folders(root)[:1]
        for name in ("memory.max_usage_in_bytes", "memory.peak")
    )
    return ProcessMemory(
        resident_bytes=status.get("VmRSS", 0),
        peak_bytes=status.get("VmHWM", 0),
        group_peak_bytes=next((peak for peak in peaks if peak is not None), None),
    )


def _text(path: Path) -> str:
    """A small kernel file, empty where it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for `max`, for anything else, and where there is no file."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _fields(text: str) -> dict[str, int]:
    """`Name: 12 kB` or `name 12` a line, in bytes."""
    out = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isascii() and words[1].isdigit():
            out[words[0].removesuffix(":")] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return out
