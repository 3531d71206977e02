"""The float reference of the adapters' benchmark: parity of adapters with it, family by family, and the made adapter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench.float_model import FloatModel
from bench.quality import scores

import loras
from bench import adapters
from headrace.artifact.adapter_convert import convert_adapter
from headrace.artifact.container import Artifact
from headrace.artifact.peft import read_peft, values
from headrace.engine.engine import Engine
from headrace.engine.sequence import Work

TOKENS = [(11 * i * i + 5 * i) % 256 for i in range(120)]


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3"])
def test_an_adapter_costs_no_more_than_the_model_does(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path, family: str
) -> None:
    """KL to the float model with the adapter merged, beside the KL of both without it."""
    base = tiny_artifact(family)
    floats = FloatModel(base)
    source = loras.write(
        tmp_path / "peft", loras.state(floats.config, rank=6), loras.config(rank=6)
    )
    adapter = convert_adapter(source, tmp_path / "made", base)
    plain = floats.logits(TOKENS)
    floats.merge(source)
    under = floats.logits(TOKENS)
    with Engine(base, max_context=256) as engine:
        loaded = engine.load_adapter(adapter)

        def got(salt: bytes) -> np.ndarray:
            sequence = engine.new_sequence(salt)
            parts = [
                engine.forward([Work(sequence, TOKENS[at : at + 12], True)]).copy()
                for at in range(0, len(TOKENS), 12)
            ]
            sequence.release()
            return (np.concatenate(parts) / 2.0**engine.fraction_bits).astype(np.float32)

        without = scores(plain, got(b""), TOKENS)
        with_it = scores(under, got(loaded.salt), TOKENS)
    moved = scores(under, plain, TOKENS)
    print(f"{family}: KL {without.kl:.6f} without, {with_it.kl:.6f} with, {moved.kl:.4f} between")
    assert math.isfinite(without.kl)
    assert without.kl < 0.05
    assert with_it.kl < 2 * without.kl + 0.001
    assert moved.kl > 20 * with_it.kl


def test_the_made_adapter_is_as_large_as_it_says(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path
) -> None:
    floats = FloatModel(tiny_artifact("llama"))
    made = read_peft(adapters.make(tmp_path / "made", floats, 1))
    assert len(made.pairs) == 7 * floats.config.num_layers
    for pair in made.pairs:
        a, b = (
            values(made.files[1], n, t) for n, t in ((pair.a_name, pair.a), (pair.b_name, pair.b))
        )
        weight = np.linalg.norm(floats.weights(pair.layer)[pair.module])
        share = pair.scale * np.linalg.norm(b @ a) / weight
        assert math.isclose(share, adapters.RELATIVE_NORM, rel_tol=1e-3)
