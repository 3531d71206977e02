"""The model bigger than memory: memory groups, workers that follow given tokens, and what is made of their rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench.ablations import AS_PLANNED, variants
from bench.cgroup import GroupError, MemoryGroup, Usage
from bench.figures import Figures
from bench.process import Worker, WorkerError
from bench.settings import Settings
from bench.stream import Sample, Workload, row, workloads
from bench.stream_figures import StreamFigures, flow
from bench.workers.protocol import drawn_tokens, peak_bytes, storage_bytes
from bench_rows import MACHINE, run, stream_rows

import tiny
from bench import page

MIB = 1 << 20
OWN = Path(sys.executable)


@pytest.fixture
def group() -> MemoryGroup:
    try:
        return MemoryGroup(96 * MIB)
    except (GroupError, OSError) as error:
        pytest.skip(f"no memory group can be made here: {error}")


def test_a_group_counts_what_a_process_in_it_used(group: MemoryGroup) -> None:
    with group:
        with Worker(OWN, "memory_reader", {}, 1, group.prefix) as worker:
            worker.ask("read", nbytes=32 * MIB)
        found = group.usage()
    assert 32 * MIB < found.peak_bytes <= 96 * MIB
    assert found.killed == 0
    assert not group.path.exists()


def test_a_group_kills_what_passes_its_limit_and_says_so(group: MemoryGroup) -> None:
    with group:
        with (
            Worker(OWN, "memory_reader", {}, 1, group.prefix) as worker,
            pytest.raises(WorkerError, match="ended with -9"),
        ):
            worker.ask("read", nbytes=256 * MIB)
        found = group.usage()
    assert found.killed == 1


def test_without_a_controller_there_is_no_group(tmp_path: Path) -> None:
    with pytest.raises(GroupError, match="no memory controller"):
        MemoryGroup(MIB, tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_either_version_are_read(tmp_path: Path, version: int) -> None:
    """Invented files, since a machine has one version."""
    if version == 1:
        (tmp_path / "memory").mkdir()
        (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1")
        counts = {"memory.max_usage_in_bytes": "5", "memory.failcnt": "6"}
        counts["memory.oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"
        limit = "memory.limit_in_bytes"
    else:
        (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
        counts = {"memory.peak": "5", "memory.events": "low 0\nmax 6\noom_kill 7\n"}
        limit = "memory.max"
    group = MemoryGroup(123, tmp_path)
    assert (group.path / limit).read_text() == "123"
    for name, text in counts.items():
        (group.path / name).write_text(text)
    assert group.usage() == Usage(peak_bytes=5, hits=6, killed=7)


def test_drawn_tokens_are_prefixes_without_a_period() -> None:
    tokens = drawn_tokens(2000, 300)
    assert drawn_tokens(10, 300) == tokens[:10]
    assert set(tokens) <= set(range(300))
    assert tokens[:251] != tokens[251:502]


def test_what_the_kernel_counts() -> None:
    assert peak_bytes() > MIB
    assert storage_bytes() >= 0


def test_the_worker_follows_given_tokens_inside_its_plan(tmp_path: Path) -> None:
    artifact = tiny.make(tmp_path, "qwen3_moe")
    config = {"model": str(artifact.path), "max_context": 128, "experts_per_layer": 2}
    with Worker(OWN, "headrace_stream", config, threads=1) as worker:
        about = worker.facts["settings"]
        assert about["pool_slots"] < about["experts"]
        answer = worker.ask("follow", context=8, steps=5, seconds=60)
        assert answer["prompt"]["tokens"] == 8
        steps = answer["steps"]
        assert steps["tokens"] == 5
        assert steps["counters"]["uses"] == 5 * about["uses_per_token"]
        assert worker.ask("follow", context=8, steps=5, seconds=0)["steps"]["tokens"] == 1
        assert worker.ask("peak")["bytes"] > MIB


def test_without_lookahead_its_slots_are_the_pool(tmp_path: Path) -> None:
    artifact = tiny.make(tmp_path, "qwen3_moe")
    base = {"model": str(artifact.path), "max_context": 128, "experts_per_layer": 2}
    slots = []
    for lookahead in (True, False):
        with Worker(OWN, "headrace_stream", {**base, "lookahead": lookahead, "lanes": 2}, 1) as w:
            about = w.facts["settings"]
            slots.append((about["pool_slots"] + about["lookahead_slots"], about["lookahead_slots"]))
            assert about["lanes"] == 2
    assert slots[0][0] == slots[1][0]
    assert slots[0][1] > slots[1][1] == 0


def test_a_worker_that_was_killed_is_a_row_with_its_error() -> None:
    workload = Workload("decode 8 tokens", 16, 8)
    dead = Sample(Usage(100, 3, 1), error="the worker ended with -9:")
    found = row("stream", "AirLLM", workload, [dead], run(), Settings(), {"limit_bytes": 100})
    assert found.samples == (0.0,)
    assert found.settings["killed"] == 1
    assert found.settings["error"] == "the worker ended with -9:"
    assert flow(found) is None


def test_workloads_and_variants() -> None:
    names = [w.name for w in workloads(Settings())]
    assert names == ["prefill 512", "decode 256 tokens", "decode 1,000 tokens"]
    found = variants(10**9, 128)
    assert found[AS_PLANNED] == {"memory_gb": 1.0}
    assert found["pool of 25%"] == {"experts_per_layer": 32}
    assert found["8 lanes"] == {"memory_gb": 1.0, "lanes": 8}


def test_the_roofline_is_what_the_pool_has_no_room_for() -> None:
    found = StreamFigures(Figures(stream_rows()))
    assert found.raw() == 1000
    assert found.missing_bytes() == 200e6 * (1 - 25 / 100)
    assert found.roofline() == pytest.approx(1000 / 150)
    own = flow(next(r for r in found.limited() if r.measure.startswith("decode")))
    assert own is not None
    assert own.resident == pytest.approx(0.4)
    assert own.agreement == pytest.approx(0.8)
    assert own.bytes_read == 160e6


def test_targets_of_the_model_bigger_than_memory() -> None:
    met = {t.name: t.met for t in StreamFigures(Figures(stream_rows())).targets()}
    assert met == {
        "bigger than memory: prefill 512, over llama.cpp": True,
        "bigger than memory: decode 256 tokens, over llama.cpp": True,
        "bigger than memory: decode 256 tokens, share of the disk's roofline": True,
        "mixture of experts, resident decode, over llama.cpp": False,
    }


def test_the_page_tells_speeds_and_failures() -> None:
    text = page.page(Figures(stream_rows()))
    assert "| headrace | 100 | 6 | 900 MB (800) | 160 |" in text
    assert "| llama.cpp | 20 (5.0x) | 0.2 (30.0x; 10 tokens) | 900 MB (800) | 160 |" in text
    assert "- AirLLM, decode 256 tokens, killed by the kernel for memory: `ended with -9`" in text
    assert "| decode 256 tokens | 40.0% | 80.0% | 160.0 | 10.0 | 25% | 96% | 90% |" in text
    assert MACHINE["cpu"] in text
