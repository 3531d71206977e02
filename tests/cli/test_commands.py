"""convert, inspect, bench, selfcheck and pull as processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shell import Shell


def test_convert_and_inspect(shell: Shell, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    done = shell.run("convert", checkpoint, target, "--bits", "8", "--group", "64")
    assert done.returncode == 0
    assert b"100 %" in done.stderr
    facts = json.loads(shell.run("inspect", target, "--json", "--verify").stdout)
    manifest = json.loads((target / "manifest.json").read_text())
    assert facts["identity"] == manifest["identity"]
    assert facts["family"] == "qwen2"
    assert facts["tensors"]["layers.0.qkv"]["format"].startswith("q8")
    assert facts["tensors"]["layers.0.qkv"]["group"] == 64
    assert facts["bytes"] == sum(f["bytes"] for f in manifest["files"].values())
    assert facts["verified"] is True
    shown = shell.run("inspect", target).stdout.decode()
    assert "verified" not in shown
    verified = shell.run("inspect", target, "--verify").stdout.decode()
    assert f"verified: every byte of {len(manifest['files'])} files has its hash" in verified
    for part in (manifest["identity"], "family qwen2", "hidden_size 64", "<|im_start|>"):
        assert part in shown


def test_an_artifact_without_its_manifest(shell: Shell, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    shell.run("convert", checkpoint, target)
    (target / "manifest.json").unlink()
    for command in (("inspect", target), ("run", target, "--prompt", "x")):
        done = shell.run(*command)
        assert done.returncode == 2
        assert b"manifest.json: is missing: this is an artifact that is not complete" in done.stderr


def test_convert_refuses_other_bits(shell: Shell, checkpoint: Path, tmp_path: Path) -> None:
    done = shell.run("convert", checkpoint, tmp_path / "made", "--bits", "3")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: ")
    assert not (tmp_path / "made").exists()


def test_a_flipped_bit_is_found(shell: Shell, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    shell.run("convert", checkpoint, target)
    weights = target / "dense-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = shell.run("inspect", target, "--verify")
    assert done.returncode == 2
    assert b"dense-00001.safetensors" in done.stderr


def test_bench(shell: Shell, model: Path) -> None:
    flags = ("--repetitions", "2", "--json")
    first = json.loads(shell.run("bench", model, *flags).stdout)
    other = json.loads(shell.run("bench", model, *flags, "--threads", "1").stdout)
    assert [r["name"] for r in first["rows"]] == ["load", "prefill", "decode", "decode"]
    assert all(len(r["seconds"]) == 2 and min(r["seconds"]) > 0 for r in first["rows"])
    assert first["fingerprint"] == other["fingerprint"]
    lines = shell.run("bench", model, "--repetitions", "1").stdout.decode().splitlines()
    assert lines[-1] == f"fingerprint {first['fingerprint']}"


def test_selfcheck(shell: Shell) -> None:
    done = shell.run("selfcheck", "--kernels", "portable")
    shown = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "portable: 5 painted models equal" in shown
    assert "portable: 2 painted mixtures equal" in shown
    assert "avx2: skipped (" in shown
    assert "real generation: skipped (smollm2:135m is not installed" in shown
    assert shown.splitlines()[-1].startswith("digest ")


def test_an_unknown_name(shell: Shell) -> None:
    for command in (("pull", "gpt:9000t"), ("run", "gpt:9000t", "--prompt", "x")):
        done = shell.run(*command)
        assert done.returncode == 2
        assert b"gpt:9000t" in done.stderr
        assert b"Traceback" not in done.stderr


def test_a_model_that_is_not_here_is_not_pulled_unasked(shell: Shell) -> None:
    done = shell.run("run", "--prompt", "x")
    assert done.returncode == 2
    assert b"headrace pull smollm2:135m" in done.stderr
    assert not shell.home.exists() or not any(shell.home.iterdir())


def test_pull_without_a_name_lists_the_registry(shell: Shell) -> None:
    done = shell.run("pull")
    assert done.returncode == 0
    assert done.stdout.startswith(b"smollm2:135m  ")
    assert b"installed" not in done.stdout


def test_help_names_every_command(shell: Shell) -> None:
    shown = shell.run("--help").stdout.decode()
    for name in ("run", "pull", "convert", "inspect", "bench", "selfcheck"):
        assert re.search(rf"{name} +[A-Z]\w+", shown), name  # with what it does
    flags = shell.run("run", "--help").stdout.decode()
    for name in ("--prompt", "--greedy", "--seed", "--raw", "--stats-json", "--digest", "--stop"):
        assert name in flags
    assert "statistics to standard error" in flags


def test_selfcheck_refuses_before_it_computes(shell: Shell) -> None:
    for flags in (
        ("--threads", "0"),
        ("--kernels", "neno"),
        ("--kernels", "auto", "--threads", "0"),
    ):
        done = shell.run("selfcheck", *flags)
        assert done.returncode == 2, done.stderr
        assert done.stdout == b""
