"""Every kept input of the fuzzers is read or refused, as on the day it was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(p for p in CORPUS.glob("*/*") if p.is_file())


def test_there_is_a_corpus_for_every_target() -> None:
    assert {p.parent.name for p in FILES} == set(TARGETS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_kept_input(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())
