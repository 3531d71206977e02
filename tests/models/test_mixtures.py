"""Mixture-of-experts families against transformers in float32, by the definition itself.

The band is measured as for dense families, with the inputs of experts rounded too.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "torch", reason="torch is not installed: parity with transformers is not tested"
)
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from models import reference, resident

TEXT = "The capital of France is Paris, and the capital of Italy is"
TOKENS = [(11 * i * i + 5 * i) % 256 for i in range(96)]


def by_definition(artifact: Artifact, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities float64 [len, vocab], and the chosen experts [layers, len, top_k]."""
    logits, routes = resident.run(artifact, tokens)
    wide = torch.tensor(logits).double() / 2**artifact.manifest.fraction_bits
    return torch.log_softmax(wide, -1), torch.tensor(np.sort(np.stack(routes), -1)).long()


def by_transformers(
    model: Any, tokens: list[int], routes: torch.Tensor, normalise: bool
) -> tuple[torch.Tensor, float]:
    """Log-probabilities with the given experts, and the share of them that it would have chosen itself.

    Where two experts are nearly equally likely, another choice is another model, not an error.
    """
    with reference.forced_experts(model, routes, normalise) as own:
        values = reference.log_probabilities(model, tokens)
    pairs = zip(torch.stack(own).flatten(0, 1).tolist(), routes.flatten(0, 1).tolist(), strict=True)
    shared = sum(len(set(a) & set(b)) for a, b in pairs)
    return values, shared / routes.numel()


@dataclass(frozen=True)
class Parity:
    """Mean KL of the definition and of the band, and the shares of experts that transformers agrees with."""

    kl: float
    band: float
    same: float
    top: float


def parity(artifact: Artifact, settings: dict[str, Any], tokens: list[int]) -> Parity:
    model = reference.load(artifact, settings)
    got, routes = by_definition(artifact, tokens)
    normalise = bool(artifact.manifest.config["experts"]["normalise"])
    exact, same = by_transformers(model, tokens, routes, normalise)
    with reference.rounded_experts(model):
        rounded, _ = by_transformers(model, tokens, routes, normalise)
    band, _ = reference.divergence(exact, rounded)
    kl, top = reference.divergence(exact, got)
    return Parity(kl, band, same, top)


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_family_equals_transformers_within_its_band(
    tiny_artifact: Callable[[str], Artifact],
    name: str,
    record_property: Callable[[str, object], None],
) -> None:
    found = parity(tiny_artifact(name), tiny.config(name), TOKENS)
    record_property("kl", found.kl)
    record_property("band", found.band)
    print(f"{name}: {found}")
    assert math.isfinite(found.kl)
    assert found.band > 0
    assert found.kl < 2 * found.band
    assert found.same > 0.95


def test_smolmoe_equals_transformers_on_its_first_tokens(
    smolmoe_source: Path, smolmoe: Artifact
) -> None:
    config = json.loads((smolmoe_source / "config.json").read_text())
    settings = {k: v for k, v in config.items() if not k.startswith("quantization")}
    tokens = Tokenizer.from_file(str(smolmoe.tokenizer_path)).encode(TEXT).ids[:8]
    found = parity(smolmoe, settings, tokens)
    print(f"smolmoe: {found}")
    assert found.kl < 0.03
    assert found.same > 0.97
    assert found.top > 0.8


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_what_transformers_saves_converts_to_the_same_weights(tmp_path: Path, name: str) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", name)
    first = convert(source, tmp_path / "a")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    for file in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(source / file, tmp_path / "saved")
    second = convert(tmp_path / "saved", tmp_path / "b")
    for mine in first.manifest.files:
        if mine.endswith(".safetensors"):
            assert first.manifest.files[mine] == second.manifest.files[mine]
