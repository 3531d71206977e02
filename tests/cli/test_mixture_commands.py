"""Commands over a model with experts: memory options, statistics, traces, fits and context checks."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
from headrace.experts.trace import read_routes
from shell import Shell


def run(shell: Shell, *arguments: object) -> tuple[str, dict[str, object]]:
    report = shell.home.parent / "stats.json"
    done = shell.run(
        "run", *arguments, "--prompt", "abc", "--max-tokens", 9, "--stats-json", report
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8", "replace"), json.loads(report.read_text())


def test_a_pool_changes_no_token(shell: Shell, mixture: Path) -> None:
    text, stats = run(shell, mixture, "--seed", 3)
    for size in (2, 4, 8):
        small, less = run(shell, mixture, "--seed", 3, "--experts-per-layer", size)
        assert (small, less["fingerprint"]) == (text, stats["fingerprint"])
        experts = less["experts"]
        assert isinstance(experts, dict)
        assert size == 8 or experts["bytes_read"] > 0  # all of them may be there before it begins
        assert experts["uses"] == stats["experts"]["uses"]  # type: ignore[index]


def test_a_budget_too_small_is_refused_with_what_fits(shell: Shell, mixture: Path) -> None:
    done = shell.run("run", mixture, "--prompt", "x", "--memory-gb", "0.01")
    assert done.returncode == 2
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith("error: ")
    assert "--memory-gb" in lines[1]
    assert not done.stdout


def test_routes_are_traced(shell: Shell, mixture: Path, tmp_path: Path) -> None:
    file = tmp_path / "routes"
    _, stats = run(shell, mixture, "--seed", 3, "--trace-routes", file)
    header, rows = read_routes(file)
    assert (header.num_layers, header.num_experts, header.top_k) == (2, 8, 2)
    passes = (
        int(stats["read_tokens"]) + int(stats["new_tokens"]) - 1 if "read_tokens" in stats else None
    )  # type: ignore[call-overload]
    positions = sorted(set(rows["position"].tolist()))
    assert positions == list(range(len(positions)))
    assert len(rows) == 2 * len(positions)
    assert passes in (None, len(positions))


def test_a_fit_is_kept_beside_the_model(shell: Shell, mixture: Path) -> None:
    done = shell.run("fit-forecast", mixture, "--tokens", 600, "--memory-gb", "0.3")
    assert done.returncode == 0, done.stderr
    assert b"layer 1: " in done.stdout
    file = mixture / "forecast.safetensors"
    assert file.is_file()
    text, stats = run(shell, mixture, "--seed", 3, "--experts-per-layer", 2)
    file.unlink()
    assert run(shell, mixture, "--seed", 3)[1]["fingerprint"] == stats["fingerprint"]
    assert text


def test_a_spoiled_fit_is_refused_and_can_be_made_again(
    shell: Shell, mixture: Path, tmp_path: Path
) -> None:
    file, text = mixture / "forecast.safetensors", tmp_path / "text"
    text.write_text("".join(f"line {i * i}\n" for i in range(600)))
    fitting = ["fit-forecast", mixture, "--tokens", 400, "--text", text, "--max-context", 256]
    file.write_bytes(b"spoiled")
    done = shell.run("run", mixture, "--prompt", "x", "--max-tokens", 1)
    assert done.returncode == 2
    assert b"fit-forecast" in done.stderr
    assert shell.run(*fitting).returncode == 0
    made = file.read_bytes()
    assert shell.run("run", mixture, "--prompt", "x", "--max-tokens", 1).returncode == 0
    assert shell.run(*fitting).returncode == 0
    assert file.read_bytes() == made  # not fitted on top of the other
    writing = shell.run("fit-forecast", mixture, "--tokens", 300, "--max-context", 256)
    assert writing.returncode == 0, writing.stderr
    file.unlink()


def test_fitting_is_part_of_the_budget(shell: Shell, mixture: Path) -> None:
    """What a run does with, tokens that are kept and sums do not fit beside; the nearest that does is named."""
    fitting = ["fit-forecast", mixture, "--tokens", 8_000_000, "--text", mixture / "tokenizer.json"]
    done = shell.run(*fitting, "--memory-gb", "0.1")
    assert done.returncode == 2
    assert b"nearest that fits is --memory-gb" in done.stderr
    nearest = done.stderr.split(b"--memory-gb ")[1].split()[0].decode().rstrip(";")
    assert float(nearest) > 0.2
    assert not (mixture / "forecast.safetensors").exists()
    done = shell.run(*fitting, "--memory-gb", nearest)
    assert done.returncode == 0, done.stderr
    (mixture / "forecast.safetensors").unlink()


def test_one_layer_with_experts_has_nothing_to_guess(shell: Shell, tmp_path: Path) -> None:
    path = tiny.make(tmp_path / "one", "olmoe", num_hidden_layers=1).path
    done = shell.run("fit-forecast", path, "--tokens", 300)
    assert done.returncode == 2
    assert b"nothing to guess: one layer with experts" in done.stderr
    assert not (path / "forecast.safetensors").exists()


def test_a_trace_never_replaces_a_file_of_a_model(
    shell: Shell, mixture: Path, tmp_path: Path
) -> None:
    file = mixture / "experts-00001.safetensors"
    before = file.read_bytes()
    for place in (file, mixture / "new", Path("/dev/full")):
        done = shell.run("run", mixture, "--prompt", "x", "--trace-routes", place)
        assert done.returncode == 2
        assert str(place).encode() in done.stderr
    assert file.read_bytes() == before
    assert not (mixture / "new").exists()


def test_there_is_nothing_to_fit_or_trace_in_a_dense_model(shell: Shell, model: Path) -> None:
    for arguments in (
        ["fit-forecast", model],
        ["run", model, "--prompt", "x", "--trace-routes", "t"],
    ):
        done = shell.run(*arguments)
        assert done.returncode == 2
        assert b"no experts" in done.stderr


def test_context_check(shell: Shell, mixture: Path) -> None:
    done = shell.run(
        "context-check",
        mixture,
        "--tokens",
        300,
        "--reply-tokens",
        5,
        "--experts-per-layer",
        3,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == 300
    assert len(report["reply"]) == 5
    assert report["fits"] is True
    assert 0 < report["peak_bytes"] <= report["target_bytes"]
    assert report["window"] == 300
    plain = shell.run("context-check", mixture, "--tokens", 300, "--ladder")
    assert plain.returncode == 0
    assert b"kept" in plain.stdout
    planned = shell.run("context-check", mixture, "--tokens", 300, "--plan-only")
    assert planned.returncode == 0
    assert b"pool" in planned.stdout
    long = shell.run("context-check", mixture, "--tokens", 100000)
    assert long.returncode == 2
    assert b"the model's own context is 1024" in long.stderr


def test_context_check_takes_what_the_model_holds(shell: Shell, mixture: Path) -> None:
    """The reply comes out of the length, so a model's whole context can be asked for, and is by default."""
    for flags, size in (((), 1024), (("--tokens", 1024), 1024), (("--max-context", 100), 100)):
        done = shell.run("context-check", mixture, "--json", "--kernels", "auto", *flags)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["tokens"], report["window"], len(report["reply"])) == (size, size, 16)
        assert report["stats"]["prompt_tokens"] == size - 16


def test_context_check_refuses_before_it_loads(shell: Shell, checkpoint: Path) -> None:
    for flags, word in (
        (("--tokens", 100, "--max-context", 50), b"max_context, 50"),
        (("--tokens", 16), b"reply_tokens is 16"),
        (("--max-context", 16), b"reply_tokens is 16"),
        (("--tokens", 0), b"tokens is 0"),
        (("--tokens", "100.5"), b"100.5"),
    ):
        done = shell.run("context-check", checkpoint, *flags)
        assert done.returncode == 2
        assert word in done.stderr
        assert not done.stdout
        assert not shell.home.exists()


def test_whole_numbers_are_not_rounded(shell: Shell, mixture: Path) -> None:
    for command, flag in (
        ("run", "--max-context"), ("run", "--threads"), ("run", "--seed"), ("run", "--max-tokens"), ("run", "--top-k"),
        ("run", "--experts-per-layer"), ("fit-forecast", "--tokens"), ("bench", "--repetitions"),
        ("selfcheck", "--threads"),
    ):  # fmt: skip
        model = () if command == "selfcheck" else (mixture,)
        done = shell.run(command, *model, flag, "2.5")
        assert done.returncode == 2
        assert b"no whole number" in done.stderr
