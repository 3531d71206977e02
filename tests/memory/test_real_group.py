"""The kernel agrees: limits, reclaimable cache and peaks of a real control group, and a live drill."""

from __future__ import annotations

import json
from pathlib import Path

from memory.groups import group, run_inside

MB = 10**6

LOOK = """
import dataclasses, json, sys
from headrace.memory.machine import process_memory, read_machine
def show(**more):
    m, p = read_machine(), process_memory()
    print(json.dumps({"capacity": m.capacity_bytes, "usable": m.usable_bytes, "budget": m.budget_bytes,
        "limits": [x.source for x in m.limits], "group_peak": p.group_peak_bytes,
        "peak": p.peak_bytes, "resident": p.resident_bytes, **more}), flush=True)
"""


def _lines(folder: Path, code: str, *arguments: str) -> list[dict[str, int]]:
    done = run_inside(folder, LOOK + code, *arguments)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_small_group_on_a_large_machine() -> None:
    with group(300 * MB) as folder:
        seen = _lines(folder, "show()")[0]
    assert seen["capacity"] <= 300 * MB
    assert 100 * MB < seen["usable"] < 300 * MB
    assert seen["usable"] <= seen["budget"] <= 300 * MB
    assert seen["limits"] == [str(folder)]


def test_a_parent_with_a_lower_limit() -> None:
    with group(200 * MB) as folder:
        child = folder / "child"
        child.mkdir()
        seen = _lines(child, "show()")[0]
        assert seen["capacity"] <= 200 * MB
        assert seen["limits"] == [str(folder)]


def test_page_cache_does_not_fill_a_group(tmp_path: Path) -> None:
    """A file larger than the limit goes through the cache: what could be had before still can."""
    path = tmp_path / "weights"
    code = """
import os
show()
with open(sys.argv[1], "wb") as file:
    for _ in range(40):
        file.write(bytes(10_000_000))
        file.flush()
        os.fsync(file.fileno())
with open(sys.argv[1], "rb") as file:
    while file.read(1 << 20): pass
show()
"""
    with group(300 * MB) as folder:
        before, after = _lines(folder, code, str(path))
        peak = int((folder / "memory.max_usage_in_bytes").read_text())
    assert peak > 250 * MB, "the cache has filled the group"
    assert after["usable"] > before["usable"] - 20 * MB


def test_a_freed_peak_is_not_missed() -> None:
    code = """
block = bytearray(150_000_000)
block[::4096] = b"x" * len(block[::4096])
del block
show()
"""
    with group(400 * MB) as folder:
        seen = _lines(folder, code)[0]
    assert seen["resident"] < 100 * MB
    assert seen["peak"] > 150 * MB
    assert seen["group_peak"] > 150 * MB


DRILL = """
import subprocess, time
from headrace.memory.governor import Governor
from headrace.memory.inputs import ModelFacts, PlanOptions, Workspace
from headrace.memory.plan import plan
SLOT = 1_000_000
class Pool:
    def __init__(self, slots):
        self.blocks = [bytes([1]) * SLOT for _ in range(slots)]
    def resize(self, slots):
        del self.blocks[slots:]
        self.blocks += [bytes([1]) * SLOT for _ in range(slots - len(self.blocks))]
facts = ModelFacts(1_000_000, 100, 1024, Workspace(), SLOT, 10, 40, 4)
made = plan(read_machine(), facts, PlanOptions(memory_limit_gb=0.36)).for_loading()
clock = [0.0]
pool = Pool(made.pool_slots)
governor = Governor(made, pool, clock=lambda: clock[0])
def look(name):
    clock[0] += 15
    action = governor.between_requests()
    show(name=name, slots=len(pool.blocks), plan=made.pool_slots, reason=action.reason, least=made.min_pool_slots)
look("alone")
hog = subprocess.Popen([sys.executable, "-c", '''
import sys
size = int(sys.argv[1])
held = []
for step in range(40):
    held.append(b"x" * (size // 40))
    print(step, flush=True)
    sys.stdin.readline()
sys.stdin.read()
''', sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
for _ in range(40):
    hog.stdout.readline()
    look("squeezed")
    hog.stdin.write("go\\n"); hog.stdin.flush()
for _ in range(4):
    look("stays")
hog.stdin.close()
hog.wait()
for _ in range(60):
    look("alone again")
"""


def test_a_live_drill() -> None:
    """Another process takes most of what is free in the group: the pool gives way, nobody is killed."""
    with group(400 * MB) as folder:
        seen = _lines(folder, DRILL, str(240 * MB))
        failures = int((folder / "memory.oom_control").read_text().split("oom_kill ")[1].split()[0])
    assert failures == 0
    assert seen[0]["slots"] == seen[0]["plan"]
    squeezed = [line for line in seen if line["name"] == "stays"]
    assert seen[0]["least"] <= squeezed[-1]["slots"] < seen[0]["plan"] - 50
    assert len({line["slots"] for line in squeezed[1:]}) == 1, "at rest under steady pressure"
    slots = [line["slots"] for line in seen if line["name"] == "alone again"]
    assert slots == sorted(slots)
    assert slots[-1] == seen[0]["plan"]
