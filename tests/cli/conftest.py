"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact
from shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


@pytest.fixture(scope="session")
def model(tiny_artifact: Callable[[str], Artifact]) -> Path:
    """A tiny artifact."""
    return tiny_artifact("llama").path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face directory."""
    return tiny.write_checkpoint(tmp_path_factory.mktemp("source") / "checkpoint", "qwen2")


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny artifact with experts, whose folder may be written to."""
    return tiny.make(tmp_path_factory.mktemp("mixture") / "mixtral", "mixtral").path
