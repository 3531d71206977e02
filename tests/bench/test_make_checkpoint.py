"""Random checkpoints: every family and layout converts, the same seed gives the same bytes, the skew is the one asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.make_checkpoint import FAMILIES, Shape, make, vocabulary

import tiny
from headrace.artifact.convert import convert
from headrace.errors import InputError
from models import resident


def shape(family: str, layout: str = "mlx4", skew: float = 0.0) -> Shape:
    return Shape(family, tiny.VOCAB, 2, 256, 4, 2, 64, 16, 2, 64, 64, layout, skew)


def checkpoint(path: Path, wanted: Shape) -> Path:
    tokenizer = path.with_name("tokenizer")
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text(tiny.tokenizer_json())
    make(path, wanted, tokenizer)
    return path


@pytest.mark.parametrize("layout", ["bf16", "mlx4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_converts_and_computes(tmp_path: Path, family: str, layout: str) -> None:
    artifact = convert(checkpoint(tmp_path / "src", shape(family, layout)), tmp_path / "out")
    assert artifact.manifest.family == family
    logits, routes = resident.run(artifact, [1, 2, 3])
    assert len(routes) == 2
    assert 0 < np.abs(logits).max() < 100 << artifact.manifest.fraction_bits


@pytest.mark.parametrize(
    "change",
    [
        {"expert_ffn": 96},
        {"hidden": 96},
        {"shared_ffn": 96},
        {"head_dim": 24},
        {"kv_heads": 3},
        {"top_k": 17},
        {"layers": 0},
        {"layout": "bf16", "expert_ffn": 48},
    ],
)
def test_a_shape_that_could_not_be_converted_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        checkpoint(tmp_path / "src", replace(shape("qwen2_moe"), **change))
    assert not (tmp_path / "src").exists()


def test_the_same_seed_gives_the_same_weights_in_any_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = checkpoint(tmp_path / "a", shape("qwen3_moe"))
    second = checkpoint(tmp_path / "b", shape("qwen3_moe"))
    for file in sorted(p.name for p in first.iterdir()):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    monkeypatch.setattr("bench.make_checkpoint.SHARD_BYTES", 100_000)
    parts = checkpoint(tmp_path / "c", shape("qwen3_moe"))
    assert len(list(parts.glob("*.safetensors"))) > 3
    one, many = convert(first, tmp_path / "one"), convert(parts, tmp_path / "many")
    assert (
        one.manifest.files["experts-00001.safetensors"]
        == many.manifest.files["experts-00001.safetensors"]
    )


def test_the_skew_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """The share of the likeliest quarter of the experts, against that of Zipf's law."""
    shares = {}
    for skew in (0.0, 1.0, 2.0):
        source = checkpoint(tmp_path / f"src{skew}", shape("mixtral", skew=skew))
        artifact = convert(source, tmp_path / f"out{skew}")
        _, routes = resident.run(artifact, list(range(200)))
        counts = np.array([np.sort(np.bincount(r.ravel(), minlength=16))[::-1] for r in routes])
        shares[skew] = float((counts[:, :4].sum(1) / counts.sum(1)).mean())
    print(shares)
    assert shares[0.0] < 0.5  # of few tokens, and with what layers have in common
    assert shares[0.0] + 0.15 < shares[1.0] < shares[2.0] - 0.1


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tiny.tokenizer_json())
    assert vocabulary(tmp_path) == 256 + len(tiny.SPECIAL)
