"""`run --damped`, as a user types it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.artifact.container import Artifact
from headrace.cli.main import execute


@pytest.fixture
def model(tiny_artifact: Callable[[str], Artifact]) -> str:
    return str(tiny_artifact("llama").path)


def test_it_is_greedy_and_repeats_less(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for flags in (["--greedy"], ["--damped"], ["--damped", "--greedy", "--speculate", "4"]):
        code = execute(("run", model, "--prompt", "abcabc", "--max-tokens", "60", *flags))
        out, err = capsys.readouterr()
        assert code == 0
        answers.append((out, err.splitlines()[-1]))
    assert answers[1] == answers[2] != answers[0]
