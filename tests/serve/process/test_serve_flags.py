"""Flags of `headrace serve` that are refused before anything is opened, and what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import execute
from headrace.cli.serve import adapters, served_name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 is beyond loopback and no API key is set"),
        (("--api-key", "two words"), "the API key has to be printable ASCII without spaces"),
        (("--allow-host", "a/b"), "--allow-host 'a/b' is no host name or address"),
        (("--port", "65536"), "--port 65536 is not between 0 and 65535"),
        (("--port", "-1"), "--port -1 is not between 0 and 65535"),
        (("--idle-exit", "-1"), "--idle-exit -1 is not between 0 and 10080"),
        (("--idle-exit", "nan"), "--idle-exit nan is not between 0 and 10080"),
        (("--max-prefill-wait", "-1"), "--max-prefill-wait -1 is not between 0 and 100000"),
        (("--adapter", "folder"), "--adapter 'folder' is not NAME=PATH, with a name without +"),
        (("--adapter", "a+b=folder"), "--adapter 'a+b=folder' is not NAME=PATH, with a name without +"),
        (("--adapter", "a=x", "--adapter", "a=y"), "--adapter gives the name 'a' twice"),
        (("--parallel", "0"), "parallel is 0; it must be between 1 and 1024"),
        (("--no-prefix-cache", "--prefix-cache-dir", "x"), "--no-prefix-cache is given together with --prefix-cache-dir"),
        (("--draft", "lookup"), "drafts are asked for, and speculate is off"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_flags_that_are_refused(
    capfd: pytest.CaptureFixture[str], home: Path, flags: tuple[str, ...], said: str
) -> None:
    assert execute(["serve", *flags]) == 2
    assert said in capfd.readouterr().err
    assert not home.exists()


def test_a_key_of_the_environment_is_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "two words")
    assert execute(["serve", "--host", "0.0.0.0"]) == 2
    assert "the API key has to be printable ASCII" in capfd.readouterr().err


def test_adapters_by_name() -> None:
    assert adapters([]) == {}
    assert adapters(["a=x", "b=c=d"]) == {"a": Path("x"), "b": Path("c=d")}


def test_what_clients_call_a_model(tmp_path: Path) -> None:
    assert served_name("smollm2:135m") == "smollm2:135m"
    assert served_name(str(tmp_path / "tiny-llama")) == "tiny-llama"
    assert served_name(str(tmp_path / "tiny.q4.gguf")) == "tiny.q4"
    assert served_name("tiny+one.gguf") == "tiny-one"
