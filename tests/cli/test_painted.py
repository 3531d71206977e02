"""The painted mixtures of `selfcheck` check something: experts come, go and are guessed, and every byte of them counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.artifact.records import record_fields
from headrace.cli import painted, painted_mixture
from headrace.experts.stream import ExpertStream
from headrace.kernels.select import select

RESIDENT, SMALL = painted_mixture.POOLS


@pytest.fixture(params=painted.MIXTURES, ids=lambda case: case.name)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> painted_mixture.PaintedMixture:
    return painted_mixture.paint(request.param, tmp_path / "experts")


def test_a_small_pool_reads_again_and_again(
    model: painted_mixture.PaintedMixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the streams did, asked just before they close."""
    seen = []
    close = ExpertStream.close
    monkeypatch.setattr(
        ExpertStream, "close", lambda stream: (seen.append(stream.stats), close(stream))[1]
    )
    backend = select("portable", threads=2)
    assert model.outcome(backend, RESIDENT) == model.outcome(backend, SMALL)
    resident, small = seen
    total = sum(r.num_experts for r in model.records)
    assert total * 2 / 3 < resident.reads <= total  # routes differ: most experts are chosen
    assert small.reads + small.swept > 2 * total
    assert small.swept > total
    assert small.misses > 0
    assert small.reads > small.misses  # guesses


def test_nothing_is_saturated_to_equality(model: painted_mixture.PaintedMixture) -> None:
    outcome = model.outcome(select("portable", threads=1), RESIDENT)
    assert all(count == 0 for _, count in outcome.clipped)
    logits = np.frombuffer(outcome.logits, np.int32)
    assert len(np.unique(logits)) > len(logits) // 10


def test_every_field_of_an_expert_counts(model: painted_mixture.PaintedMixture) -> None:
    """The last bit of a field's values, in the experts of one layer: the logits are others."""
    backend = select("portable", threads=2)
    right = model.outcome(backend, SMALL).logits
    for layer in model.records:
        whole = layer.path.read_bytes()
        record = np.frombuffer(whole, np.uint8)[: layer.layout.nbytes]
        for name, _ in record_fields(record, layer.layout):
            data = np.frombuffer(bytearray(whole), np.uint8)
            experts = data[layer.offset :][: layer.num_experts * layer.layout.nbytes]
            for one in experts.reshape(layer.num_experts, -1):
                field = dict(record_fields(one, layer.layout))[name]
                field ^= 1
            layer.path.write_bytes(data.tobytes())
            assert model.outcome(backend, SMALL).logits != right, name
        layer.path.write_bytes(whole)
    assert model.outcome(backend, SMALL).logits == right
