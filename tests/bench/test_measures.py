"""The parts of the benchmarks that compute: scores, windows, settings, workers."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from bench.process import Worker, WorkerError, timed
from bench.quality import scores
from bench.workers.protocol import painted_tokens

from bench import machine, settings, windows


def test_equal_logits_have_no_divergence() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 11)).astype(np.float32)
    found = scores(logits, logits + 3, [1, 2, 3, 4, 5, 6])
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert found.top1 == 1.0


def test_scores_by_hand() -> None:
    exact = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    got = np.log(np.array([[0.25, 0.75], [0.9, 0.1]], np.float32))
    found = scores(exact, got, [0, 1])
    assert found.kl == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)) / 2)
    assert found.top1 == 0.5
    assert found.loss == pytest.approx(-np.log(0.75))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_logit_that_is_not_finite_is_refused(bad: float, which: int) -> None:
    pair = [np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)]
    pair[which][1, 1] = bad
    with pytest.raises(ValueError, match="not finite"):
        scores(pair[0], pair[1], [0, 1])


def test_windows_are_seven_of_512() -> None:
    found = windows.windows(lambda text: [ord(c) for c in text])
    assert [len(w) for w in found] == [512] * 7
    assert "".join(map(chr, found[5])).lstrip().startswith("Apache License")
    assert windows.fingerprint(found) != windows.fingerprint(found[::-1])


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="are needed"):
        windows.windows(lambda text: [0] * 1000)


def test_painted_tokens_are_in_the_vocabulary_and_prefixes() -> None:
    tokens = painted_tokens(1000, 300)
    assert min(tokens) >= 0
    assert max(tokens) < 300
    assert painted_tokens(10, 300) == tokens[:10]


def test_settings_from_flags() -> None:
    parts, found = settings.parse(["load", "speed", "--llama-python", "a", "--llama-python", "b"])
    assert parts == ("speed", "load")
    assert [p.name for p in found.llama_python] == ["a", "b"]
    assert settings.parse([])[0] == settings.PARTS


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(["sped"])
    assert "'sped' is not a part" in capsys.readouterr().err


def test_the_recorded_command_names_no_path() -> None:
    found = settings.parse(["--gguf", "/secret/m.gguf", "--llama-python", "/secret/python"])[1]
    assert "secret" not in settings.command("speed", found)


def test_machine_facts() -> None:
    facts = machine.facts()
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1 << 20
    assert set(facts["flags"]) <= set(machine.FLAGS)


def test_a_worker_answers_and_ends() -> None:
    with Worker(Path(sys.executable), "memory_reader", {}, threads=1) as worker:
        assert worker.facts["versions"]["numpy"] == np.__version__
        assert worker.ask("read", nbytes=1 << 20)["seconds"] > 0


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(WorkerError, match="no_such_worker"):
        Worker(Path(sys.executable), "no_such_worker", {}, threads=1)
    with (
        Worker(Path(sys.executable), "memory_reader", {}, threads=1) as worker,
        pytest.raises(WorkerError, match="KeyError"),
    ):
        worker.ask("nonsense")


def test_whole_processes_are_timed() -> None:
    found = timed([sys.executable, "-c", "x = bytearray(50 << 20)"], threads=1)
    assert found.seconds > 0
    assert found.peak_bytes > 50 << 20
    with pytest.raises(WorkerError, match="ended with 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"], threads=1)
