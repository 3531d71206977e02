"""`run` with a schema, a regular expression or a grammar, and `schema`, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.cli.main import execute

COLORS = '{"enum": ["red", "green"]}'


@pytest.fixture
def model(tiny_artifact: Callable[[str], Artifact]) -> str:
    return str(tiny_artifact("llama").path)


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = execute(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def asked(capsys: pytest.CaptureFixture[str], model: str, *flags: str) -> tuple[int, str, str]:
    return ran(capsys, "run", model, "--prompt", "x", "--greedy", "--max-tokens", "200", *flags)


def test_a_schema_as_text_and_as_a_file(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "colors.json"
    file.write_text(COLORS, "utf-8")
    code, out, err = asked(capsys, model, "--json-schema", COLORS)
    assert code == 0
    assert json.loads(out) in ("red", "green")
    assert "forced in" in err
    assert asked(capsys, model, "--json-schema", str(file))[:2] == (0, out)


def test_a_regex_and_a_grammar(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert asked(capsys, model, "--regex", "-ab")[:2] == (0, "-ab\n")
    file = tmp_path / "g.lark"
    file.write_text('start: "one" " " "two"', "utf-8")
    assert asked(capsys, model, "--grammar", str(file))[:2] == (0, "one two\n")
    file.write_text('root ::= "one" " " "two"\n', "utf-8")
    assert asked(capsys, model, "--grammar", str(file))[:2] == (0, "one two\n")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--json-schema", '{"not": {}}'), "/not"),
        (("--json-schema", "nothere.json"), "nothere.json"),
        (("--json-schema", "@nothere"), "nothere"),
        (("--regex", "("), "unclosed"),
        (("--regex", "a", "--json-schema", "{}"), "one of"),
        (("--grammar", "nothere.lark"), "nothere.lark"),
    ],
)
def test_refusals_name_the_cause(
    model: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], named: str
) -> None:
    code, out, err = asked(capsys, model, *flags)
    assert (code, out) == (2, "")
    assert named in err
    assert err.startswith("error: ")


def test_files_that_are_no_text(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "g"
    file.write_bytes(b"\xff")
    assert asked(capsys, model, "--grammar", str(file))[0] == 2
    assert asked(capsys, model, "--grammar", str(tmp_path))[0] == 2


def test_a_dead_end_is_an_error(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "g.lark"
    file.write_text('start: "ab" <|im_end|> "c"', "utf-8")
    code, out, err = asked(capsys, model, "--grammar", str(file))
    assert code == 1
    assert out.startswith("ab")
    assert "cannot be continued" in err


def test_schemas_by_name(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "colors.json"
    file.write_text(COLORS, "utf-8")
    assert ran(capsys, "schema", "add", model, "colors", str(file)) == (0, "", "")
    code, out, _ = ran(capsys, "schema", "list", model)
    assert (code, out.split()[0]) == (0, "colors")
    code, out, _ = asked(capsys, model, "--json-schema", "@colors")
    assert code == 0
    assert json.loads(out) in ("red", "green")
    assert ran(capsys, "schema", "remove", model, "colors") == (0, "", "")
    assert ran(capsys, "schema", "list", model) == (0, "", "")
    code, _, err = ran(capsys, "schema", "remove", model, "colors")
    assert code == 2
    assert "it has: none" in err


def test_a_schema_that_cannot_be_followed_is_not_stored(
    model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "s.json"
    file.write_text('{"type": "array", "uniqueItems": true}', "utf-8")
    code, _, err = ran(capsys, "schema", "add", model, "s", str(file))
    assert code == 2
    assert "uniqueItems" in err
    assert ran(capsys, "schema", "list", model)[1] == ""


@pytest.mark.parametrize(
    "arguments", [("list", "M", "x"), ("add", "M", "x"), ("remove", "M"), ("add", "M")]
)
def test_incomplete_commands(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:  # fmt: skip
    code, _, err = ran(capsys, "schema", *arguments)
    assert code == 2
    assert "schema add MODEL NAME FILE" in err
