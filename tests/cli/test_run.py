"""`headrace run` as a process: what goes where, exit codes, and the same bytes for every setting."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from headrace.llm import LLM
from shell import Shell

GREEDY = ("--greedy", "--max-tokens", "12")


def fingerprint(done: subprocess.CompletedProcess[bytes]) -> str:
    return done.stderr.decode().splitlines()[-1]


def test_an_answer_and_its_statistics(shell: Shell, model: Path) -> None:
    done = shell.run("run", model, "--prompt", "Why?", *GREEDY)
    with LLM(model) as llm:
        expected = llm.generate("Why?", temperature=0.0, max_tokens=12)
    assert done.returncode == 0
    assert done.stdout.decode() == expected.text + "\n"
    assert fingerprint(done) == f"fingerprint {expected.stats.fingerprint}"
    report = done.stderr.decode()
    for word in (
        "read ",
        "wrote 12 tokens",
        "tok/s",
        "loaded in",
        "peak memory",
        ", 11 after the first in",
    ):
        assert word in report
    assert "seed" not in report  # nothing was drawn


def test_the_model_is_a_flag_too(shell: Shell, model: Path) -> None:
    done = shell.run("run", "--model", model, "--prompt", "Why?", *GREEDY, "--digest")
    named = shell.run("run", model, "--prompt", "Why?", *GREEDY)
    assert done.stdout.decode().strip() == fingerprint(named).split()[1]


def test_the_prompt_is_piped(shell: Shell, model: Path) -> None:
    given = shell.run("run", model, "--prompt", "Why?", *GREEDY)
    piped = shell.run("run", model, *GREEDY, stdin=b"Why?\n")
    assert piped.stdout == given.stdout
    assert fingerprint(piped) == fingerprint(given)


def test_invalid_utf8_is_a_prompt(shell: Shell, model: Path) -> None:
    piped = shell.run("run", model, *GREEDY, stdin=b"a\xffb")
    with LLM(model) as llm:
        expected = llm.generate(b"a\xffb", temperature=0.0, max_tokens=12)
    assert piped.returncode == 0
    assert fingerprint(piped) == f"fingerprint {expected.stats.fingerprint}"
    given = subprocess.run(
        [*shell.command("run", model, *GREEDY, "--prompt"), b"a\xffb"],
        capture_output=True, env=shell.environment, timeout=60, check=False,
    )  # fmt: skip
    assert given.stdout == piped.stdout


@pytest.mark.parametrize(
    "setting", [("--threads", "1"), ("--threads", "3"), ("--kernels", "portable")]
)
def test_settings_change_nothing(shell: Shell, model: Path, setting: tuple[str, str]) -> None:
    sampled = ("--prompt", "Why?", "--seed", "7", "--max-tokens", "16", "--top-p", "0.9")
    done, other = shell.run("run", model, *sampled), shell.run("run", model, *sampled, *setting)
    assert other.stdout == done.stdout
    assert fingerprint(other) == fingerprint(done)


def test_stop_strings_and_leading_hyphens(shell: Shell, model: Path) -> None:
    whole = shell.run("run", model, "--prompt", "-x", *GREEDY).stdout.decode()
    stop = whole[4:6]
    done = shell.run("run", model, "--prompt", "-x", *GREEDY, "--stop=--", "--stop", stop)
    assert done.stdout.decode() == whole[: whole.index(stop)] + "\n"


def test_statistics_as_json(shell: Shell, model: Path, tmp_path: Path) -> None:
    target = tmp_path / "stats.json"
    done = shell.run(
        "run", model, "--prompt", "Why?", "--seed", "0", *GREEDY, "--stats-json", target
    )
    body = json.loads(target.read_text())
    assert fingerprint(done) == f"fingerprint {body['fingerprint']}"
    assert body["seed"] == 0
    assert body["new_tokens"] == 12
    assert body["reused_tokens"] == 0 < body["prompt_tokens"]
    assert body["peak_memory_bytes"] > 1 << 20
    assert [p.name for p in tmp_path.glob("*stats*")] == ["stats.json"]


def test_a_report_that_cannot_be_written_is_refused_first(shell: Shell, model: Path) -> None:
    done = shell.run("run", model, "--prompt", "x", "--stats-json", "/nowhere/at/all.json")
    assert (done.returncode, done.stdout) == (2, b"")


def test_control_c_ends_with_130(shell: Shell, model: Path) -> None:
    process = shell.start(
        "run", model, "--prompt", "x", "--seed", "3", "--kernels", "reference",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, report = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in report
    assert b"ended by cancelled" in report


def test_a_closed_pipe_is_quiet(shell: Shell, model: Path) -> None:
    read, write = os.pipe()
    process = shell.start(
        "run", model, "--prompt", "x", "--seed", "3", stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    os.close(read)
    _, report = process.communicate(timeout=60)
    assert process.returncode == 0
    assert report == b""


def test_a_source_is_converted_once(shell: Shell, checkpoint: Path) -> None:
    first = shell.run("run", checkpoint, "--prompt", "x", *GREEDY)
    made = list((shell.home / "converted").iterdir())
    before = made[0].stat().st_mtime_ns
    second = shell.run("run", checkpoint, "--prompt", "x", *GREEDY)
    assert first.returncode == 0
    assert first.stdout == second.stdout
    assert list((shell.home / "converted").iterdir()) == made
    assert made[0].stat().st_mtime_ns == before
    assert b"convert" in first.stderr
    assert b"convert" not in second.stderr


def test_a_source_that_changed_is_converted_again(
    shell: Shell, checkpoint: Path, tmp_path: Path
) -> None:
    """Also where its size and time of writing are as before; the old conversion goes."""
    source = shutil.copytree(checkpoint, tmp_path / "source")
    other = shutil.copytree(checkpoint, tmp_path / "other")
    weights = source / "model.safetensors"
    for model in (source, other):
        assert shell.run("run", model, "--prompt", "x", *GREEDY).returncode == 0
    before = {p.name for p in (shell.home / "converted").iterdir()}
    stat = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    done = shell.run("run", source, "--prompt", "x", *GREEDY)
    after = {p.name for p in (shell.home / "converted").iterdir()}
    assert b"convert" in done.stderr
    assert len(before) == len(after) == 2
    assert len(before & after) == 1


def test_a_prompt_without_end_is_refused(shell: Shell, model: Path) -> None:
    with Path("/dev/zero").open("rb") as zeros:
        process = shell.start(
            "run", model, *GREEDY, stdin=zeros, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, report = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert report == b"error: the piped prompt is longer than 67,108,864 bytes\n"


BAD = {
    "empty prompt": (["--prompt", ""], "the prompt is empty"),
    "temperature": (["--prompt", "x", "--temperature", "nan"], "temperature is nan"),
    "damped and temperature": (["--prompt", "x", "--damped", "--temperature", "1"], "damped means"),
    "greedy and temperature": (["--prompt", "x", "--greedy", "--temperature", "1"], "greedy means"),
    "seed": (["--prompt", "x", "--seed", "-1"], "seed is -1"),
    "threads": (["--prompt", "x", "--threads", "0"], "threads is 0"),
    "kernels": (["--prompt", "x", "--kernels", "abacus"], "'abacus' is not known"),
    "context": (
        ["--prompt", "x", "--max-context", "99999"],
        "max_context is 99999, the model's own context is 1024",
    ),
    "too long": (["--prompt", "x" * 2000], "tokens, the context holds 1024"),
    "raw with system": (["--prompt", "x", "--raw", "--system", "y"], "no system message"),
    "unknown flag": (["--prompt", "x", "--tempurature", "1"], "tempurature"),
    "no number": (["--prompt", "x", "--seed", "many"], "many"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(shell: Shell, model: Path, name: str) -> None:
    flags, cause = BAD[name]
    done = shell.run("run", model, *flags)
    report = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert done.stdout == b""
    assert report[0].startswith("error: ")
    assert cause in report[0]
    assert all(line.startswith("hint: ") for line in report[1:])


def test_a_missing_or_broken_model(shell: Shell, model: Path, tmp_path: Path) -> None:
    missing = shell.run("run", tmp_path / "none.gguf", "--prompt", "x")
    assert missing.returncode == 2
    assert b"none.gguf" in missing.stderr
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    cut = shell.run("run", tmp_path / "cut.gguf", "--prompt", "x")
    assert cut.returncode == 2
    assert len(cut.stderr.splitlines()) <= 2
    assert b"cut.gguf" in cut.stderr


def test_starting_is_quick(shell: Shell) -> None:
    start = time.perf_counter()
    done = shell.run("--version")
    assert done.stdout.startswith(b"headrace ")
    assert time.perf_counter() - start < 5
    probe = "import sys, headrace.cli.main as m; m.make_app(); print('numpy' in sys.modules)"
    found = subprocess.run([*shell.command()[:1], "-c", probe], capture_output=True, check=True)
    assert found.stdout.strip() == b"False"
