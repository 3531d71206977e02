"""Models that several files of this folder use."""

from __future__ import annotations

import pytest

import tiny
from headrace.artifact.container import Artifact


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Three layers and a vocabulary that are large enough for projections to be cut into blocks."""
    return tiny.make(
        tmp_path_factory.mktemp("wide") / "wide",
        "llama",
        hidden_size=512,
        intermediate_size=2048,
        vocab_size=4096,
        num_hidden_layers=3,
    )
