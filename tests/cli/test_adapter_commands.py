"""`run --adapter`, `convert` and `inspect` of adapters, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import loras
from headrace.artifact.container import Artifact
from headrace.cli.main import execute
from headrace.models.config import DecoderConfig


@pytest.fixture(scope="module")
def base(tiny_artifact: Callable[[str], Artifact]) -> Artifact:
    return tiny_artifact("llama")


@pytest.fixture
def peft(base: Artifact, tmp_path: Path) -> Path:
    c = DecoderConfig.from_json(base.manifest.config)
    return loras.write(tmp_path / "peft", loras.state(c))


def ran(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = execute([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def digest(capsys: pytest.CaptureFixture[str], model: Path, *flags: str | Path) -> str:
    asked = ("run", model, "--prompt", "x", "--greedy", "--max-tokens", "20", "--digest")
    code, out, err = ran(capsys, *asked, *flags)
    assert code == 0
    assert ("adapter " in err) == ("--adapter" in flags)
    return out


def test_run_convert_and_inspect(
    base: Artifact, peft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, stats = tmp_path / "made", tmp_path / "stats.json"
    code, _, err = ran(capsys, "convert", peft, made, "--base", base.path)
    assert code == 0
    assert "adapter of 14 modules" in err
    plain = digest(capsys, base.path)
    under = digest(capsys, base.path, "--adapter", peft, "--stats-json", stats)
    assert under != plain
    assert digest(capsys, base.path, "--adapter", made) == under
    code, out, _ = ran(capsys, "inspect", made, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["base"] == base.identity
    assert facts["identity"] == json.loads(stats.read_text())["adapter"]
    assert facts["targets"]["layers.1.down"] == {"rank": 4, "alpha": "8.0", "scale": "2.0"}
    assert ran(capsys, "inspect", made)[1].splitlines()[5:7] == [
        "modules", "  layers.0.q rank 4, alpha 8.0, scale 2.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("convert", "PEFT", "DST"), "--base"),
        (("convert", "BASE", "DST", "--base", "BASE"), "no PEFT folder"),
        (("run", "BASE", "--prompt", "x", "--adapter", "DST"), "no such file"),
        (("run", "BASE", "--prompt", "x", "--adapter", "BASE"), "this is a model"),
        (("run", "BASE", "--prompt", "x", "--adapter", "HALF"), "manifest.json"),
        (("run", "HALF", "--prompt", "x"), "HALF"),
        (("inspect", "HALF"), "manifest.json"),
    ],
)
def test_what_is_refused(
    base: Artifact,
    peft: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    """Exit code 2 and one line; an adapter's path is never passed over."""
    half = tmp_path / "half"
    half.mkdir()
    (half / "adapter.safetensors").write_bytes(b"x")
    names = {"PEFT": peft, "BASE": base.path, "DST": tmp_path / "target", "HALF": half}
    code, out, err = ran(capsys, *(names.get(a, a) for a in arguments))
    assert code == 2
    assert not out
    assert words.replace("HALF", str(half)) in err
    assert not (tmp_path / "target").exists()


def test_an_adapter_is_no_model(
    base: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = loras.make(tmp_path / "made", base)
    code, _, err = ran(capsys, "run", made.path, "--prompt", "x")
    assert code == 2
    assert "an adapter, not a model" in err
    assert "--adapter" in err
