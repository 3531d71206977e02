"""Models that answer, opened once a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.llm import LLM


@pytest.fixture(scope="module")
def wild(tiny_artifact: Callable[[str], Artifact]) -> Iterator[LLM]:
    """A random model whose tokens are bytes: it takes every turn that a grammar allows."""
    with LLM(tiny_artifact("llama").path, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def real(default_model: Path) -> Iterator[LLM]:
    with LLM(default_model, threads=2, max_context=1024) as model:
        yield model
