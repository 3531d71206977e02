"""The promise, as the kernel counts it: a model several times its budget, inside a control group of that size.

Slow: makes and converts a checkpoint of half a gigabyte.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.artifact.container import open_artifact
from headrace.artifact.convert import convert
from headrace.memory.facts import model_facts
from headrace.memory.inputs import GB, PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.machine import Machine, usable_cores
from headrace.memory.plan import plan
from headrace.memory.sizing import Sizer
from memory.groups import command, group

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUDGET_GB = 0.25
SHAPE = [
    "--layers",
    "16",
    "--hidden",
    "512",
    "--experts",
    "64",
    "--top-k",
    "4",
    "--expert-ffn",
    "512",
]

CHECK = """
import sys
from headrace.cli.main import execute
sys.exit(execute(sys.argv[1:]))
"""
# Another process of the group: takes what it is told to, and keeps it.
HOG = "import sys, time; block = bytearray(int(sys.argv[1])); print('ready', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """An artifact of about 0.5 GB with 1,024 experts."""
    folder = tmp_path_factory.mktemp("big")
    maker = [sys.executable, "-m", "bench.make_checkpoint", str(folder / "source")]
    done = subprocess.run(
        [*maker, "--tokenizer", str(default_model), *SHAPE],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return convert(folder / "source", folder / "big").path


def check(model: Path, folder: Path, *flags: str) -> dict[str, object]:
    """`context-check` as a process of the group."""
    arguments = ["context-check", str(model), "--json", "--reply-tokens", "8", *flags]
    done = subprocess.run(
        command(folder, CHECK, *arguments), capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return report


def number(folder: Path, name: str) -> int:
    return int((folder / name).read_text())


def test_a_full_window_stays_inside_its_budget(big: Path) -> None:
    size = sum(r.num_experts * r.layout.nbytes for r in open_artifact(big).records)
    limit = int(BUDGET_GB * 1e9)
    assert size > 1.7 * limit
    with group(limit) as folder:
        report = check(big, folder, "--tokens", "4000", "--memory-gb", str(BUDGET_GB))
        assert number(folder, "memory.max_usage_in_bytes") <= limit
        assert number(folder, "memory.failcnt") == 0
        assert "oom_kill 0" in (folder / "memory.oom_control").read_text()
    assert report["fits"] is True
    assert int(str(report["peak_bytes"])) <= limit
    with group(int(1.5e9)) as folder:
        whole = check(big, folder, "--tokens", "4000")
    assert whole["reply"] == report["reply"]
    assert whole["stats"]["fingerprint"] == report["stats"]["fingerprint"]  # type: ignore[index]


def test_budgets_near_the_least_in_groups_of_exactly_their_size(big: Path) -> None:
    """What is planned is loaded there, with a window that gives way, and the whole of that window can be used."""
    facts = model_facts(big, threads=usable_cores())
    machine = Machine(64 * GB, 64 * GB, usable_cores())
    least = Sizer(machine, facts, PlanOptions()).needed(512) // 10_000_000 + 1
    flags = ["--raw", "--prompt", "hi", "--greedy", "--max-tokens", "8", "--digest"]
    digests = set()
    for hundredths in (least, least + 1, least + 3):
        gb, limit = f"{hundredths / 100:.2f}", hundredths * 10_000_000
        with group(limit) as folder:
            arguments = ["run", "--model", str(big), "--memory-gb", gb, *flags]
            done = subprocess.run(
                command(folder, CHECK, *arguments), capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            digests.add(done.stdout)
            assert number(folder, "memory.max_usage_in_bytes") <= limit
            assert "oom_kill 0" in (folder / "memory.oom_control").read_text()
        roomy = plan(machine, facts, PlanOptions(memory_gb=float(gb)))
        assert isinstance(roomy, Plan)
        with group(limit) as folder:
            window = str(max(512, roomy.window - 512))
            report = check(big, folder, "--tokens", window, "--memory-gb", gb)
            assert "oom_kill 0" in (folder / "memory.oom_control").read_text()
        assert report["fits"] is True
    assert len(digests) == 1


def test_what_another_process_holds_is_not_there(big: Path) -> None:
    """Beside a process that eats the group's memory, a budget is refused or kept; nothing is killed."""
    with group(int(0.5e9)) as folder:
        hog = subprocess.Popen(command(folder, HOG, "320000000"), stdout=subprocess.PIPE, text=True)
        try:
            assert hog.stdout is not None
            assert hog.stdout.readline() == "ready\n"
            flags = ["--tokens", "600", "--memory-gb", "0.4"]
            arguments = ["context-check", str(big), "--json", *flags]
            done = subprocess.run(
                command(folder, CHECK, *arguments), capture_output=True, text=True, check=False
            )
            assert done.returncode == 2
            assert "can be had now" in done.stderr
            assert "oom_kill 0" in (folder / "memory.oom_control").read_text()
            assert hog.poll() is None
        finally:
            hog.kill()
            hog.wait()
