"""Fixtures that several folders share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder of the session's own, so that no test leaves anything in the user's."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Artifact]:
    """The converted tiny model of a variant, made once a session."""
    made: dict[str, Artifact] = {}
    base = tmp_path_factory.mktemp("tiny")

    def get(name: str) -> Artifact:
        if name not in made:
            made[name] = tiny.make(base / name, name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The pinned default model as an artifact; tests that need it are skipped by name without it."""
    home = Path(os.environ.get("HEADRACE_TEST_HOME", str(Path.home() / ".headrace")))
    path = home / "models" / "smollm2-135m"
    if not path.is_dir():
        pytest.skip("smollm2:135m is not pulled (make run, or headrace pull smollm2:135m)")
    return path


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """The folder of shared models."""
    path = Path(os.environ.get("HEADRACE_TEST_MODELS", str(ROOT.parent / "shared" / "models")))
    if not path.is_dir():
        pytest.skip("no folder of shared models (HEADRACE_TEST_MODELS)")
    return path


@pytest.fixture(scope="session")
def smolmoe_source() -> Path:
    """The small real mixture-of-experts checkpoint; tests that need it are skipped by name without it."""
    default = ROOT.parent / "shared" / "models" / "smolmoe"
    path = Path(os.environ.get("HEADRACE_TEST_MOE", str(default)))
    if not (path / "config.json").is_file():
        pytest.skip("smolmoe is not there (HEADRACE_TEST_MOE names its directory)")
    return path


@pytest.fixture(scope="session")
def smolmoe(smolmoe_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """It as an artifact."""
    return convert(smolmoe_source, tmp_path_factory.mktemp("smolmoe") / "artifact")
