"""`run --speculate`, as a user types it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.artifact.container import Artifact
from headrace.cli.main import execute


@pytest.fixture
def model(tiny_artifact: Callable[[str], Artifact]) -> str:
    return str(tiny_artifact("llama").path)


def asked(capsys: pytest.CaptureFixture[str], model: str, *flags: str) -> tuple[int, str, str]:
    code = execute(
        ("run", model, "--prompt", "abcabcabcabc", "--greedy", "--max-tokens", "60", *flags)
    )
    out, err = capsys.readouterr()
    return code, out, err


def test_the_answer_is_the_same_and_drafts_are_reported(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = asked(capsys, model)
    assert code == 0
    assert "drafts:" not in err
    for mode in ("off", "0", "auto", "1", "15"):
        again = asked(capsys, model, "--speculate", mode)
        assert again[:2] == (code, out)
        assert again[2].splitlines()[-1] == err.splitlines()[-1]  # the fingerprint


def test_drafts_are_reported(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = asked(capsys, model, "--regex", "(abc){20}x?", "--speculate", "4")[2]
    free = asked(capsys, model, "--speculate", "4")[2]
    assert "drafts: " in err + free


@pytest.mark.parametrize("given", ["-1", "16", "on", "1.5", ""])
def test_what_is_no_depth_is_refused(
    model: str, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    code, out, err = asked(capsys, model, f"--speculate={given}")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_a_draft_model_says_the_same(
    tiny_artifact: Callable[[str], Artifact], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = asked(capsys, model)
    for draft in (model, str(tiny_artifact("qwen3").path)):
        again = asked(capsys, model, "--draft-model", draft, "--speculate", "4", "--draft", "model")
        assert again[:2] == plain[:2]
        assert again[2].splitlines()[-1] == plain[2].splitlines()[-1]
        assert "drafts: " in again[2]


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (["--draft", "lookup"], "speculate is off"),
        (["--draft-model", "."], "speculate is off"),
        (["--draft", "model", "--speculate", "auto"], "there is no draft model"),
        (["--draft", "lookup", "--draft-model", ".", "--speculate", "2"], "has no effect"),
    ],
)
def test_flags_that_contradict_each_other(
    model: str, capsys: pytest.CaptureFixture[str], flags: list[str], cause: str
) -> None:
    code, out, err = asked(capsys, model, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert cause in err
