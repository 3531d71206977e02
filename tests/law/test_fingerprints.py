"""The refactor gate: recorded fingerprints hold on every tier and change only with the arithmetic's version."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.artifact.container import Artifact, open_artifact
from headrace.kernels.select import TIERS, unavailable
from law.fingerprints import RECORDED, fingerprint, weights_sha256

RECORD = json.loads(RECORDED.read_text())


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    reason = unavailable()[request.param]
    if reason:
        pytest.skip(f"tier {request.param}: {reason}")
    return str(request.param)


def test_the_record_belongs_to_this_arithmetic() -> None:
    assert RECORD["arithmetic"] == ARITHMETIC_VERSION


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *tiny.MIXTURES])
def test_tiny_models(tiny_artifact: Callable[[str], Artifact], name: str, tier: str) -> None:
    artifact = tiny_artifact(name)
    assert weights_sha256(artifact) == RECORD["weights"][f"tiny-{name}"]
    assert fingerprint(artifact, tier) == RECORD["fingerprints"][f"tiny-{name}"]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_default_model(default_model: Path, tier: str, threads: int) -> None:
    if tier == "reference":
        pytest.skip(
            "tier reference: a minute of NumPy; tests/law/test_real.py compares it on a short prompt"
        )
    if tier == "portable" and threads != 2:
        pytest.skip("tier portable: slow; two threads stand for all")
    artifact = open_artifact(default_model)
    assert weights_sha256(artifact) == RECORD["weights"]["smollm2:135m"]
    assert fingerprint(artifact, tier, threads) == RECORD["fingerprints"]["smollm2:135m"]
