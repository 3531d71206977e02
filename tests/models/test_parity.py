"""Each family against transformers in float32 with the same weights, and against its own error band.

The band is measured: the float32 model with its Linear inputs rounded to int8 as the engine rounds them.
Quality figures are tolerances by nature; nothing here is on the token path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip(
    "torch", reason="torch is not installed: parity with transformers is not tested"
)
pytest.importorskip("transformers", reason="transformers is not installed")

import torch

import tiny
from headrace.artifact.container import Artifact, open_artifact
from headrace.engine.engine import Engine
from models import reference

TOKENS = [(11 * i * i + 5 * i) % 256 for i in range(200)]


def engine_log_probabilities(artifact: Artifact, tokens: list[int]) -> torch.Tensor:
    with Engine(artifact, max_context=512) as engine:
        logits = torch.tensor(engine.logits(tokens)).double() / 2**engine.fraction_bits
    assert torch.isfinite(logits).all()
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_family_equals_transformers_within_its_band(
    tiny_artifact: Callable[[str], Artifact],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    artifact = tiny_artifact(name)
    model = reference.load(artifact, tiny.config(name))
    exact = reference.log_probabilities(model, TOKENS)
    band, band_top = reference.divergence(
        exact, reference.log_probabilities(reference.quantize_inputs(model), TOKENS)
    )
    kl, top = reference.divergence(exact, engine_log_probabilities(artifact, TOKENS))
    record_property("kl", kl)
    record_property("band", band)
    print(f"{name}: KL {kl:.6f} (band {band:.6f}), top-1 {top:.3f} (band {band_top:.3f})")
    assert math.isfinite(kl)
    assert math.isfinite(band)
    assert band > 0
    # The engine also rounds queries, keys, values and the router of scales: up to twice the band.
    assert kl < 2 * band
    assert top > band_top - 0.05


def test_llama_on_the_real_model(default_model: Path) -> None:
    artifact = open_artifact(default_model)
    settings = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    tokens = [(7919 * i) % 40000 + 100 for i in range(48)]
    exact = reference.log_probabilities(reference.load(artifact, settings), tokens)
    kl, top = reference.divergence(exact, engine_log_probabilities(artifact, tokens))
    print(f"smollm2:135m: KL {kl:.5f}, top-1 {top:.3f}")
    assert kl < 0.03  # random tokens are harsher than text; bench/ measures text
    assert top > 0.85


def test_divergence_fails_on_nan() -> None:
    """A parity check must not pass when a value is NaN."""
    good = torch.log_softmax(torch.zeros(2, 4).double(), -1)
    kl, _ = reference.divergence(good, torch.full((2, 4), math.nan).double())
    assert not kl < 1e9
