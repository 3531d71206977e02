"""A neighbour in the same memory group takes memory in steps: while a model loads, while it generates, and beyond
what there is. The tokens never change; where memory is really gone, somebody is told or the neighbour is killed.

Slow: makes and converts a checkpoint of a quarter of a gigabyte, and fills real control groups.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiny
from headrace.artifact.convert import convert
from memory.groups import any_group, command, kills

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MB = 10**6
LIMIT = 450 * MB
TARGET_GB = 0.2
STEP = 4 * MB
PACE = 0.02  # seconds between steps: they are spread over a load
MARGIN = 20 * MB  # of what the plan left: the neighbour's own interpreter, and some for the kernel
SHAPE = ["--layers", "8", "--hidden", "512", "--experts", "64", "--top-k", "4", "--expert-ffn", "512"]  # fmt: skip
TOKENS = 300

RUN = """
import sys
from headrace.cli.main import execute
sys.exit(execute(sys.argv[1:]))
"""
# Takes as many bytes as it is told to, line by line, and keeps them. The kernel's first choice when memory is out.
HOG = """
import sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("held", flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a quarter of a gigabyte with 512 experts."""
    folder = tmp_path_factory.mktemp("neighbour")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(tiny.tokenizer_json())
    maker = [sys.executable, "-m", "bench.make_checkpoint", str(folder / "source"), *SHAPE]
    done = subprocess.run(
        [*maker, "--tokenizer", str(folder / "tokenizer")], cwd=ROOT, capture_output=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return convert(folder / "source", folder / "artifact").path


class Hog:
    """The neighbour."""

    def __init__(self, folder: Path) -> None:
        self.held = 0
        self._process = subprocess.Popen(
            command(folder, HOG), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, nbytes: int) -> bool:
        """Whether it has them now; False once it was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{nbytes}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        taken = self._process.stdout.readline() == "held\n"
        self.held += nbytes if taken else 0
        return taken

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def neighbour(folder: Path) -> Iterator[Hog]:
    hog = Hog(folder)
    try:
        yield hog
    finally:
        hog.end()


def start(model: Path, folder: Path, report: Path) -> subprocess.Popen[bytes]:
    flags = ["--raw", "--prompt", "abcdefgh" * 12, "--seed", "5", "--temperature", "1"]
    flags += ["--max-tokens", str(TOKENS), "--memory-gb", str(TARGET_GB), "--max-context", "512"]
    arguments = ["run", str(model), *flags, "--stats-json", str(report)]
    return subprocess.Popen(
        command(folder, RUN, *arguments), bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, str]:
    """The answer, and its fingerprint, without a neighbour."""
    report = tmp_path_factory.mktemp("right") / "stats.json"
    with any_group(LIMIT) as folder:
        text, told = start(model, folder, report).communicate(timeout=100)
        assert kills(folder) == 0, told
    stats = json.loads(report.read_text())
    assert stats["new_tokens"] == TOKENS
    assert stats["experts"]["reads"] > 512, "the pool is smaller than the model"
    return text, stats["fingerprint"]


def left(hog: Hog) -> int:
    """What the neighbour may still take of what the plan left."""
    return LIMIT - int(TARGET_GB * 1e9) - MARGIN - hog.held


@pytest.mark.parametrize("while_it", ["loads", "generates"])
def test_up_to_what_the_plan_left(
    model: Path, right: tuple[bytes, str], tmp_path: Path, while_it: str
) -> None:
    report = tmp_path / "stats.json"
    with any_group(LIMIT) as folder, neighbour(folder) as hog:
        assert hog.take(STEP)
        process = start(model, folder, report)
        assert process.stdout is not None
        text = process.stdout.read(1) if while_it == "generates" else b""
        while left(hog) > STEP:
            assert hog.take(STEP)
            if while_it == "generates":
                text += process.stdout.read(1)
            else:
                time.sleep(PACE)
        rest, told = process.communicate(timeout=100)
        assert process.returncode == 0, told
        assert kills(folder) == 0
        assert hog.take(1), "the neighbour lives"
    assert (text + rest, json.loads(report.read_text())["fingerprint"]) == right


@pytest.mark.parametrize("while_it", ["loads", "generates"])
def test_beyond_what_there_is(
    model: Path, right: tuple[bytes, str], tmp_path: Path, while_it: str
) -> None:
    """The neighbour takes until it is killed, or the model refuses to load: never another token, never a hang."""
    report = tmp_path / "stats.json"
    with any_group(LIMIT) as folder, neighbour(folder) as hog:
        assert hog.take(STEP)
        process = start(model, folder, report)
        assert process.stdout is not None
        text = process.stdout.read(1) if while_it == "generates" else b""
        while hog.take(STEP):
            assert hog.held < LIMIT
            time.sleep(PACE)
        rest, told = process.communicate(timeout=100)
        assert kills(folder) == 1, "of the neighbour"
    if while_it == "loads" and process.returncode == 2:
        assert b"error: " in told
        assert b"can be had now" in told
        assert (text + rest, report.exists()) == (b"", False)
    else:
        assert process.returncode == 0, told
        assert (text + rest, json.loads(report.read_text())["fingerprint"]) == right


# A model whose pool adapts, in a group; the neighbour is its child. The governor has a clock of the test's, and sees no
# pressure: what other groups of the machine wait for is none of this test's business.
ADAPTIVE = """
import dataclasses, json, subprocess, sys
from headrace.llm import LLM
from headrace.memory.governor import Governor
from headrace.memory.inputs import PlanOptions
from headrace.memory.machine import read_machine
model, limit_gb, hog_code, step, steps = sys.argv[1], float(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
clock = [0.0]
def read():
    return dataclasses.replace(read_machine(), pressure=None, group_pressure=None)
with LLM(model, memory=PlanOptions(memory_limit_gb=limit_gb, max_context=512), threads=2) as llm:
    pool = llm._loaded.governor._pool
    for seed in range(8):  # fill it
        llm.generate(f"{seed} other words " * 8, raw=True, seed=seed, temperature=1.0, max_tokens=40)
    llm._turns._scheduler._governor = Governor(llm.plan, pool, read=read, clock=lambda: clock[0])
    def look(name, seconds):
        clock[0] += seconds
        done = llm.generate("abcdefgh" * 12, raw=True, seed=5, temperature=1.0, max_tokens=16)
        print(json.dumps({"name": name, "slots": llm.engine.experts.capacity - llm.plan.lookahead_slots,
            "plan": llm.plan.pool_slots, "least": llm.plan.min_pool_slots, "held": held,
            "fingerprint": done.stats.fingerprint}), flush=True)
    held = 0
    for _ in range(4):
        look("alone", 15)
    hog = subprocess.Popen([sys.executable, "-c", hog_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for _ in range(steps):
        hog.stdin.write(f"{step}\\n")
        hog.stdin.flush()
        if hog.stdout.readline() != "held\\n":
            break
        held += step
        look("squeezed", 15)
    hog.kill()
    hog.communicate()
    held = 0
    look("cooling", 15)
    for _ in range(12):
        look("alone again", 60)
"""


def test_between_requests_the_pool_gives_way_and_comes_back(model: Path) -> None:
    limit, step, steps = 400 * MB, 5 * MB, 40
    arguments = [str(model), "0.36", HOG, str(step), str(steps)]
    with any_group(limit) as folder:
        done = subprocess.run(
            command(folder, ADAPTIVE, *arguments), capture_output=True, text=True, check=False, timeout=300
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert kills(folder) == 0
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({line["fingerprint"] for line in seen}) == 1
    slots = {
        name: [line["slots"] for line in seen if line["name"] == name]
        for name in ("alone", "squeezed", "cooling", "alone again")
    }
    plan, least = seen[0]["plan"], seen[0]["least"]
    assert set(slots["alone"]) == {plan}
    assert len(slots["squeezed"]) == steps, "the neighbour got all that it asked for"
    assert slots["squeezed"] == sorted(slots["squeezed"], reverse=True)
    assert least <= slots["squeezed"][-1] < plan * 3 // 4
    assert slots["cooling"] == slots["squeezed"][-1:], "it does not come back at once"
    assert slots["alone again"] == sorted(slots["alone again"])
    assert slots["alone again"][-1] == plan
