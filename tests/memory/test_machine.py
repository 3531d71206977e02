"""Memory is read as the kernel counts it: limits of all groups above, reclaimable cache not as used."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import SettingError
from headrace.memory.machine import (
    Limit,
    Machine,
    Pressure,
    process_memory,
    read_machine,
    simulated,
)
from memory import trees
from memory.trees import GIB

V1_UNLIMITED = "9223372036854771712"


def test_without_groups_the_system_says_what_is_available(tmp_path: Path) -> None:
    machine = read_machine(trees.system(tmp_path))
    assert machine.physical_bytes == 16 * GIB
    assert machine.usable_bytes == machine.available_bytes == 12 * GIB
    assert machine.limits == ()
    assert machine.pressure == Pressure(1.5, 0.25)
    assert machine.group_pressure is None
    assert machine.own_bytes == 100 * 1024
    assert machine.budget_bytes == 12 * GIB + 100 * 1024
    assert not machine.simulated
    assert machine.cores >= 1


@pytest.mark.parametrize("make", [trees.v1, trees.v2])
def test_reclaimable_cache_is_not_used(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """After a first load the group is full of page cache, and a model still fits."""
    make(
        trees.system(tmp_path),
        "/job",
        {"/": ("max", 0, 0), "/job": (str(4 * GIB), 4 * GIB, 3 * GIB)},
    )
    machine = read_machine(tmp_path)
    assert machine.usable_bytes == 3 * GIB
    assert machine.capacity_bytes == 4 * GIB
    assert [limit.limit_bytes for limit in machine.limits] == [4 * GIB]
    assert machine.limits[0].source.endswith("/job")


@pytest.mark.parametrize("make", [trees.v1, trees.v2])
def test_the_least_of_all_ancestors_counts(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    groups = {
        "/": ("max" if make is trees.v2 else V1_UNLIMITED, 9 * GIB, 0),
        "/box": (str(2 * GIB), GIB, GIB // 2),
        "/box/pod": (str(8 * GIB), 0, 0),
        "/box/pod/job": ("max" if make is trees.v2 else V1_UNLIMITED, 0, 0),
    }
    make(trees.system(tmp_path), "/box/pod/job", groups)
    machine = read_machine(tmp_path)
    assert machine.usable_bytes == 2 * GIB - GIB // 2
    assert machine.capacity_bytes == 2 * GIB
    assert [limit.limit_bytes for limit in machine.limits] == [8 * GIB, 2 * GIB]


@pytest.mark.parametrize("make", [trees.v1, trees.v2])
@pytest.mark.parametrize("own", ["/docker/abc", "/../../elsewhere", "/gone"])
def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, make, own: str) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    make(trees.system(tmp_path), own, {"/": (str(GIB), GIB // 4, 0)}, inside="/docker/abc")
    machine = read_machine(tmp_path)
    assert machine.capacity_bytes == GIB
    assert machine.usable_bytes == GIB - GIB // 4


def test_what_a_group_charges_for_the_process_is_its_own(tmp_path: Path) -> None:
    """Its mapped files as far as they are in use, and the kernel's memory where nobody else is in the group."""
    root = trees.v2(trees.system(tmp_path), "/a", {"/a": (GIB, 50 << 20, 10 << 20)})
    status = "Pid:\t42\nRssAnon:\t 20480 kB\nRssFile:\t 8192 kB\nVmPTE:\t 100 kB\n"
    stat = "inactive_file 10485760\nactive_file 4194304\nkernel 3145728\nslab 1048576\n"
    at = "sys/fs/cgroup/a"
    trees.write(root, {"proc/self/status": status, f"{at}/memory.stat": stat})
    for others, kernel in (("42\n", 3 << 20), ("42\n7\n", 100 << 10), ("", 100 << 10)):
        trees.write(root, {f"{at}/cgroup.procs": others})
        machine = read_machine(root)
        assert machine.own_bytes == 20 << 20
        assert machine.charged_bytes == machine.held_bytes == (24 << 20) + kernel
        assert machine.budget_bytes == GIB - (40 << 20) + machine.charged_bytes
    trees.write(root, {f"{at}/cgroup.procs": "42\n", f"{at}/below/memory.max": "max\n"})
    assert read_machine(root).charged_bytes == (24 << 20) + (100 << 10)
    v1_root = trees.v1(trees.system(tmp_path / "v1"), "/a", {"/a": (GIB, 50 << 20, 10 << 20)})
    at = "sys/fs/cgroup/memory/a"
    files = {f"{at}/memory.kmem.usage_in_bytes": "2097152\n", f"{at}/cgroup.procs": "42\n"}
    trees.write(v1_root, {"proc/self/status": status, **files})
    assert read_machine(v1_root).charged_bytes == (22 << 20)


def test_a_limit_of_max_is_none(tmp_path: Path) -> None:
    trees.v2(trees.system(tmp_path), "/job", {"/job": ("max", 5, 0)})
    machine = read_machine(tmp_path)
    assert machine.limits == ()
    assert machine.capacity_bytes == 16 * GIB
    assert machine.group_pressure == Pressure(33.0, 0.0)


def test_a_limit_above_what_is_free_does_not_make_memory(tmp_path: Path) -> None:
    trees.v2(trees.system(tmp_path, available=GIB), "/job", {"/job": (str(64 * GIB), 0, 0)})
    assert read_machine(tmp_path).usable_bytes == GIB


def test_more_used_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    """A limit that was lowered under a running group: no wrap to a huge number."""
    trees.v2(trees.system(tmp_path), "/job", {"/job": (str(GIB), 3 * GIB, GIB)})
    assert read_machine(tmp_path).usable_bytes == 0
    assert Limit("x", 1, 2).room_bytes == 0


def test_more_cache_than_usage_is_no_negative_use(tmp_path: Path) -> None:
    """The two files are read one after the other."""
    trees.v2(trees.system(tmp_path), "/job", {"/job": (str(GIB), 10, 4096)})
    assert read_machine(tmp_path).usable_bytes == GIB


@pytest.mark.parametrize("text", ["", "MemAvailable: 5 kB\n", "MemTotal: lots kB\n", "\x00\xff"])
def test_a_machine_that_says_nothing_is_refused(tmp_path: Path, text: str) -> None:
    trees.write(trees.system(tmp_path), {"proc/meminfo": text})
    with pytest.raises(SettingError, match="meminfo"):
        read_machine(tmp_path)


def test_odd_files_are_not_believed(tmp_path: Path) -> None:
    trees.v2(trees.system(tmp_path), "/job", {"/job": ("-5", 0, 0)})
    trees.write(
        tmp_path,
        {
            "proc/pressure/memory": "some avg10=nan\nfull avg10=x\n",
            "proc/self/mountinfo": "short\n30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n - \n",
        },
    )
    machine = read_machine(tmp_path)
    assert machine.limits == ()
    assert machine.pressure == Pressure(0.0, 0.0)


def test_peaks_are_the_kernels_own(tmp_path: Path) -> None:
    trees.v1(trees.system(tmp_path), "/job", {"/job": (str(GIB), 500, 0)})
    seen = process_memory(tmp_path)
    assert (seen.resident_bytes, seen.peak_bytes) == (200 * 1024, 300 * 1024)
    assert seen.group_peak_bytes == 501


def test_a_simulated_machine() -> None:
    machine = simulated(8 * GIB, None, 4)
    assert machine.simulated
    assert machine.usable_bytes == 8 * GIB
    with pytest.raises(SettingError):
        simulated(GIB, 2 * GIB, 4)


@pytest.mark.parametrize("value", [-1, 1 << 63])
def test_impossible_figures_are_refused(value: int) -> None:
    with pytest.raises(SettingError):
        Machine(value, 0, 1)
    with pytest.raises(SettingError):
        Machine(1, 1, 1, own_bytes=value)


def test_this_machine() -> None:
    machine = read_machine()
    assert 0 < machine.usable_bytes <= machine.capacity_bytes <= machine.physical_bytes
    seen = process_memory()
    assert 0 < seen.resident_bytes <= seen.peak_bytes
