"""`run --prefix-cache-dir` over several processes, and `headrace prefix-cache`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from headrace.engine.prefix_disk import LOCK, lock
from shell import Shell

PROMPT = "One two three four five six seven eight nine ten. " * 3


def run(shell: Shell, model: Path, *arguments: object, prompt: str = PROMPT) -> dict[str, object]:
    report = shell.home.parent / "stats.json"
    done = shell.run(
        "run", model, "--greedy", "--max-tokens", 6, "--prompt", prompt, "--stats-json", report, *arguments
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {**json.loads(report.read_text()), "stderr": done.stderr.decode()}


def options(directory: Path, minimum: int = 20) -> tuple[object, ...]:
    return ("--prefix-cache-dir", directory, "--prefix-cache-min-tokens", minimum)


def listed(shell: Shell, directory: Path) -> dict[str, object]:
    done = shell.run("prefix-cache", "--dir", directory, "--json")
    assert done.returncode == 0, done.stderr
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def test_a_later_process_reads_only_what_is_new(shell: Shell, model: Path, tmp_path: Path) -> None:
    cold = run(shell, model)
    for reused in (0, cold["prompt_tokens"] - 1):  # type: ignore[operator]
        warm = run(shell, model, *options(tmp_path / "kept"))
        assert (warm["reused_tokens"], warm["fingerprint"]) == (reused, cold["fingerprint"])
        assert "warning" not in str(warm["stderr"])
    facts = listed(shell, tmp_path / "kept")
    assert [s["kind"] for s in facts["segments"]] == ["state", "state"]  # type: ignore[attr-defined]
    shown = shell.run("prefix-cache", "--dir", tmp_path / "kept").stdout.decode()
    assert "2 segments" in shown
    assert "not continued" in shown


def test_a_short_prompt_is_not_written(shell: Shell, model: Path, tmp_path: Path) -> None:
    run(shell, model, *options(tmp_path / "kept", 1024))
    assert listed(shell, tmp_path / "kept")["segments"] == []


def test_a_busy_folder_costs_reuse_and_is_not_cleared(
    shell: Shell, model: Path, tmp_path: Path
) -> None:
    wanted = run(shell, model, *options(tmp_path))["fingerprint"]
    handle = lock(tmp_path)
    try:
        done = run(shell, model, *options(tmp_path))
        assert (done["reused_tokens"], done["fingerprint"]) == (0, wanted)
        assert "warning: the prefix cache on disk" in str(done["stderr"])
        refused = shell.run("prefix-cache", "--dir", tmp_path, "--clear")
        assert refused.returncode == 1
        assert b"another process uses" in refused.stderr
        assert len(listed(shell, tmp_path)["segments"]) == 2  # type: ignore[arg-type]
    finally:
        os.close(handle)


def test_clear_removes_all_or_names_what_is_left(shell: Shell, model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run(shell, model, *options(kept))
    stubborn = kept / f"{'0' * 64}-state.kv"
    stubborn.mkdir()
    (kept / "mine.txt").write_text("not the cache's")
    done = shell.run("prefix-cache", "--dir", kept, "--clear")
    assert done.returncode == 1
    assert stubborn.name.encode() in done.stderr
    assert sorted(p.name for p in kept.iterdir()) == sorted([LOCK, "mine.txt", stubborn.name])
    stubborn.rmdir()
    done = shell.run("prefix-cache", "--dir", kept, "--clear", "--json")
    assert json.loads(done.stdout) == {"directory": str(kept), "removed": 0, "left": []}


def test_what_is_damaged_is_listed_then_removed_and_named(
    shell: Shell, model: Path, tmp_path: Path
) -> None:
    wanted = run(shell, model, *options(tmp_path))["fingerprint"]
    for file in tmp_path.glob("*.kv"):
        file.write_bytes(file.read_bytes()[:-7])
    assert len(listed(shell, tmp_path)["faulty"]) == 2  # type: ignore[arg-type]
    done = run(shell, model, *options(tmp_path))
    assert (done["reused_tokens"], done["fingerprint"]) == (0, wanted)
    assert str(done["stderr"]).count("warning: the prefix cache on disk: removed") == 2
    assert run(shell, model, *options(tmp_path))["reused_tokens"] != 0


def test_a_folder_that_cannot_be_is_told(shell: Shell, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run(shell, model, *options(tmp_path / "file"))
    assert "warning: the prefix cache on disk" in str(done["stderr"])


@pytest.mark.parametrize("flag", ["--prefix-cache-disk-gb=-1", "--prefix-cache-min-tokens=0"])
def test_impossible_settings_are_refused(shell: Shell, model: Path, flag: str) -> None:
    done = shell.run("run", model, "--prompt", "x", flag)
    assert done.returncode == 2
    assert b"prefix_cache_" in done.stderr


@pytest.mark.parametrize("flag", ["disk-gb=1", "min-tokens=1024", "max-age-days=30"])
def test_flags_of_no_folder_are_refused(shell: Shell, model: Path, flag: str) -> None:
    done = shell.run("run", model, "--prompt", "x", f"--prefix-cache-{flag}")
    assert done.returncode == 2
    assert f"--prefix-cache-{flag.partition('=')[0]} is given without".encode() in done.stderr


def test_an_empty_name_is_no_folder(shell: Shell, model: Path) -> None:
    done = shell.run("run", model, "--prompt", "x", "--prefix-cache-dir", "")
    assert done.returncode == 2
    assert b"--prefix-cache-dir is empty" in done.stderr
    done = shell.run("prefix-cache", "--dir", "", "--clear")
    assert done.returncode == 2
    assert b"--dir is empty" in done.stderr


@pytest.mark.parametrize("flags", [(), ("--clear",), ("--json",)])
def test_a_file_is_no_folder(shell: Shell, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "file").write_text("mine")
    done = shell.run("prefix-cache", "--dir", tmp_path / "file", *flags)
    assert done.returncode == 2
    assert b"is no folder" in done.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_never_was_a_cache(shell: Shell, tmp_path: Path) -> None:
    for flags in ((), ("--clear",), ("--json",)):
        done = shell.run("prefix-cache", "--dir", tmp_path / "none", *flags)
        assert done.returncode == 2
        assert b"does not exist" in done.stderr
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    assert shell.run("prefix-cache", "--dir", tmp_path / "other", "--clear").returncode == 0
    assert os.listdir(tmp_path / "other") == ["file"]


def test_no_folder_of_its_own_is_an_empty_one(shell: Shell) -> None:
    done = shell.run("prefix-cache")
    assert done.returncode == 0
    assert str(shell.home / "prefix-cache") in done.stdout.decode()
    shutil.rmtree(shell.home, ignore_errors=True)
