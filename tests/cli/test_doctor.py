"""doctor as a process: the plan it shows, its refusals, and that it loads and changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.memory.facts import model_facts, plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan, Refusal
from headrace.memory.machine import simulated, usable_cores
from shell import Shell


def _json(shell: Shell, *arguments: str | Path) -> dict[str, Any]:
    done = shell.run("doctor", *arguments, "--json", "--no-measure")
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_the_plan_is_the_planners(shell: Shell, model: Path) -> None:
    """What doctor shows is the value that loading gets for the same machine and options."""
    shown = _json(shell, model, "--sim-ram", "8", "--memory-gb", "1.5", "--max-context", "512")
    options = PlanOptions(memory_gb=1.5, max_context=512)
    made = plan_model(model, options, simulated(8 * 10**9, None, usable_cores()))
    assert isinstance(made, Plan)
    assert shown["plan"]["ledger"] == dict(made.ledger.rows())
    assert shown["plan"]["window"] == made.window == 512
    assert shown["plan"]["target_bytes"] == sum(shown["plan"]["ledger"].values()) == 1_500_000_000
    assert shown["plan"]["simulated"] is True
    assert shown["machine"]["budget_bytes"] == 8_000_000_000
    assert shown["refusal"] is None
    assert [c["window"] for c in shown["plan"]["candidates"] if c["taken"]] == [512]


def test_a_plan_for_several_generations_at_a_time(shell: Shell, model: Path) -> None:
    sizes = ("--sim-ram", "8", "--max-context", "512")
    one, four = (_json(shell, model, *sizes, "--parallel", n)["plan"] for n in ("1", "4"))
    assert four["num_sequences"] == 4
    assert four["ledger"]["kv"] == 4 * one["ledger"]["kv"]
    assert four["ledger"]["workspace"] > one["ledger"]["workspace"]
    refused = shell.run("doctor", model, "--parallel", "0")
    assert (refused.returncode, b"parallel is 0" in refused.stderr) == (2, True)


def test_this_machine(shell: Shell, model: Path) -> None:
    done = shell.run("doctor", model, "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["machine"]["simulated"] is False
    assert shown["machine"]["usable_bytes"] > 0
    assert shown["memory_bytes_per_s"] > 0
    assert shown["estimate"]["decode_rate"] > 0
    assert shown["estimate"]["streamed_bytes"] == 0


def test_a_picture_of_the_ledger(shell: Shell, model: Path) -> None:
    done = shell.run("doctor", model, "--sim-ram", "4", "--no-measure", PYTHONIOENCODING="utf-8")
    shown = done.stdout.decode()
    assert done.returncode == 0
    for part in ("machine    simulated, 4.00 GB", "dense weights", "headroom", "total", "█"):
        assert part in shown
    assert "taken: the model's own context" in shown
    plain = shell.run("doctor", model, "--no-measure", PYTHONIOENCODING="ascii").stdout
    assert "█" in plain.decode()  # output is UTF-8 in any locale


def test_a_refusal_names_the_nearest(shell: Shell, model: Path) -> None:
    done = shell.run("doctor", model, "--memory-gb", "0.01", "--json", "--no-measure")
    assert done.returncode == 2
    body = json.loads(done.stdout)
    assert body["plan"] is None
    assert body["refusal"]["needed_bytes"] > body["refusal"]["budget_bytes"] == 10_000_000
    assert done.stderr.startswith(b"error: the model needs at least ")
    nearest = done.stderr.decode().split("--memory-gb ")[1].split()[0].rstrip(";")
    assert _json(shell, model, "--memory-gb", nearest)["plan"]["source"] == "memory_gb"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--memory-gb", "-1"), b"memory_gb"),
        (("--memory-gb", "nan"), b"memory_gb"),
        (("--memory-gb", "4", "--memory-limit-gb", "4"), b"combined"),
        (("--max-context", "0"), b"max_context"),
        (("--max-context", "many"), b"max-context"),
        (("--max-context", "9999999"), b"max_context"),
        (("--experts-per-layer", "4"), b"has none"),
        (("--sim-available", "4"), b"sim_ram"),
        (("--sim-ram", "4", "--sim-available", "5"), b"available"),
    ],
)
def test_flags_that_cannot_be(
    shell: Shell, model: Path, flags: tuple[str, ...], word: bytes
) -> None:
    done = shell.run("doctor", model, "--no-measure", *flags)
    assert done.returncode == 2
    assert word in done.stderr
    assert b"Traceback" not in done.stderr


def test_threads_are_those_of_a_run(shell: Shell, mixture: Path) -> None:
    """Whoever plans plans for the threads that a load would have."""

    def asked(*arguments: str | Path, **environment: str) -> tuple[int, str]:
        done = shell.run(*arguments, "--memory-gb", gb, **environment)
        message = [line for line in done.stderr.decode().splitlines() if line.startswith("error")]
        return done.returncode, "".join(message)

    few, many = (model_facts(mixture, threads=n).workspace.nbytes(16, 512) / 1e9 for n in (1, 64))
    alone = _json(shell, mixture, "--sim-ram", "8", "--threads", "1")
    assert (
        alone["facts"]["workspace"]
        != _json(shell, mixture, "--threads", "64")["facts"]["workspace"]
    )
    least = plan_model(
        mixture, PlanOptions(memory_gb=0.01, max_context=512), simulated(10**10, None, 1), threads=1
    )
    assert isinstance(least, Refusal)
    gb = f"{least.needed_bytes / 1e9 + (many - few) / 2:.4f}"
    doctor = ("doctor", mixture, "--no-measure", "--max-context", "512")
    check = ("context-check", mixture, "--plan-only", "--tokens", "512")
    run = ("run", mixture, "--prompt", "x", "--max-tokens", "1", "--max-context", "512")
    fit = ("fit-forecast", mixture, "--max-context", "512", "--tokens", "256")
    for command in (doctor, check, run):
        assert asked(*command, "--threads", "1") == (0, "")
        assert asked(*command, HEADRACE_THREADS="1") == (0, "")
    refused = asked(*doctor, "--threads", "64")
    assert refused[0] == 2
    for command in (doctor, check, run, fit):
        assert asked(*command, "--threads", "64") == refused
        assert asked(*command, HEADRACE_THREADS="64") == refused
        assert asked(*command, "--threads", "0")[0] == 2


def test_flags_that_cannot_be_are_json_too(shell: Shell, model: Path) -> None:
    """Programs get one object, whatever is wrong."""
    cases = {
        "bad_setting": (("--memory-gb", "-1"), ("--max-context", "1.5"), ("--max-context", "many"),
                        ("--threads", "2.5"), ("--experts-per-layer", "2.5"), ("--sim-available", "1"), ("--what",)),
        "bad_file": (("/nowhere/at.gguf",),),
        "unknown_model": (("gpt:9000t",),),
    }  # fmt: skip
    for code, flags in cases.items():
        for extra in flags:
            named = () if code != "bad_setting" else (model,)
            done = shell.run("doctor", *named, *extra, "--json", "--no-measure")
            assert done.returncode == 2
            body = json.loads(done.stdout)
            assert list(body) == ["error"]
            assert body["error"]["code"] == code
            assert done.stderr.decode().startswith(f"error: {body['error']['message']}")
    for command in ("inspect", "context-check", "bench"):
        done = shell.run(command, "/nowhere/at.gguf", "--json")
        assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (2, "bad_file")
    refused = shell.run("doctor", model, "--memory-gb", "0.01", "--json", "--no-measure")
    assert json.loads(refused.stdout)["refusal"] is not None


def test_budgets_beyond_the_machine(shell: Shell, model: Path) -> None:
    for flags in (("--memory-gb", "4e9"), ("--sim-ram", "8", "--memory-gb", "9")):
        done = shell.run("doctor", model, "--no-measure", *flags)
        assert done.returncode == 2
        assert b"more than this machine has" in done.stderr
        assert b"--memory-gb " in done.stderr


def test_a_machine_with_nothing_free(shell: Shell, model: Path) -> None:
    done = shell.run(
        "doctor", model, "--no-measure", "--json", "--sim-ram", "8", "--sim-available", "0"
    )
    assert done.returncode == 2
    body = json.loads(done.stdout)
    assert body["refusal"]["budget_bytes"] == body["machine"]["available_bytes"] == 0


def test_what_has_to_be_done_first(shell: Shell, checkpoint: Path) -> None:
    for name, command in (
        (checkpoint, "headrace convert"),
        ("smollm2:135m", "headrace pull smollm2:135m"),
    ):
        done = shell.run("doctor", name, "--no-measure", "--json")
        assert done.returncode == 2
        assert json.loads(done.stdout)["plan"] is None
        assert command in done.stderr.decode()
    assert shell.run("doctor", "--no-measure").returncode == 0


def test_where_weights_are_read_from(shell: Shell, mixture: Path) -> None:
    whole = shell.run("doctor", mixture, "--sim-ram", "8").stdout.decode()
    assert " from memory" in whole
    assert "disk first" not in whole
    some = shell.run(
        "doctor", mixture, "--sim-ram", "8", "--experts-per-layer", "3"
    ).stdout.decode()
    assert "of them from disk first" in some or "no speed" in some


def test_damaged_files_are_told(shell: Shell, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    weights = copy / "dense-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (copy / "tokenizer.json").unlink()
    shown = _json(shell, copy)
    assert len(shown["warnings"]) == 2
    assert any("is missing" in warning for warning in shown["warnings"])
    weights.unlink()
    assert shell.run("doctor", copy).returncode == 0


def test_nothing_is_pulled_or_converted(shell: Shell, checkpoint: Path) -> None:
    for arguments in ((), (checkpoint,)):
        done = shell.run("doctor", *arguments, "--json", "--no-measure")
        assert done.returncode == (2 if arguments else 0)
        shown = json.loads(done.stdout)
        assert shown["path"] is None
        assert shown["plan"] is None
        assert shown["warnings"]
        assert not shell.home.exists() or not any(shell.home.iterdir())


def test_what_is_installed(shell: Shell, checkpoint: Path) -> None:
    shell.run("run", checkpoint, "--prompt", "x", "--max-tokens", "1")
    shown = _json(shell, checkpoint)
    assert len(shown["installed"]) == 1
    assert shown["path"] == shown["installed"][0]["path"]
    assert shown["installed"][0]["nbytes"] > 0


def test_what_is_no_model(shell: Shell, tmp_path: Path) -> None:
    for name in ("gpt:9000t", str(tmp_path / "missing.gguf")):
        done = shell.run("doctor", name)
        assert done.returncode == 2
        assert done.stderr.startswith(b"error: ")


def test_a_draft_model_is_counted(shell: Shell, model: Path) -> None:
    flags = ("--sim-ram", "8", "--memory-gb", "1.5", "--max-context", "512")
    alone, both = _json(shell, model, *flags), _json(shell, model, *flags, "--draft-model", model)
    machine = simulated(8 * 10**9, None, usable_cores())
    made = plan_model(model, PlanOptions(memory_gb=1.5, max_context=512), machine, draft=model)
    assert isinstance(made, Plan)
    assert both["plan"]["ledger"] == dict(made.ledger.rows())
    for row in ("dense", "kv"):
        assert both["plan"]["ledger"][row] == 2 * alone["plan"]["ledger"][row]
    done = shell.run("doctor", model, "--no-measure", "--draft-model", "nothing:1b")
    assert done.returncode == 2
    assert b"nothing:1b" in done.stderr
