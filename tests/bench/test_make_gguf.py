"""Random GGUF files: they convert and compute, hold what was asked for, and depend on the seed alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench.make_checkpoint import Shape
from bench.make_gguf import FORMS, SIZES, make, shape_of, vocabulary

from artifact.test_convert import TOKENS
from headrace.artifact.convert import convert
from models import resident

gguf = pytest.importorskip("gguf")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A GGUF with nothing but a tokenizer that headrace knows."""
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*TOKENS[:-1], TOKENS[0] + TOKENS[1]])
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[not t.startswith("<|")] for t in TOKENS])
    writer.add_token_merges([f"{TOKENS[0]} {TOKENS[1]}"])  # the package writes no empty list
    writer.add_eos_token_id(258)
    writer.add_bos_token_id(256)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def small(tokenizer: Path, form: str = "q4_1", skew: float = 0.0) -> Shape:
    sizes = {
        "layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "experts": 16, "top_k": 2, "expert_ffn": 64,
    }  # fmt: skip
    return shape_of(tokenizer, form=form, skew=skew, **sizes)


@pytest.mark.parametrize("form", FORMS)
def test_it_converts_and_computes(tmp_path: Path, tokenizer: Path, form: str) -> None:
    path = tmp_path / "model.gguf"
    total = make(path, small(tokenizer, form), tokenizer)
    assert total < path.stat().st_size < total + 100_000
    artifact = convert(path, tmp_path / "out")
    assert artifact.manifest.family == "qwen3_moe"
    logits, routes = resident.run(artifact, [1, 2, 3])
    assert len(routes) == 2
    assert 0 < np.abs(logits).max() < 100 << artifact.manifest.fraction_bits


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_centred_and_of_the_deviation_that_keeps_states_alive(
    tmp_path: Path, tokenizer: Path, form: str
) -> None:
    path = tmp_path / "model.gguf"
    make(path, small(tokenizer, form), tokenizer)
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    up = tensors["blk.0.ffn_up_exps.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType[form.upper()]
    assert up.shape.tolist() == [256, 64, 16]
    values = gguf.dequantize(up.data, up.tensor_type)
    step = values.std() / 4.6  # 16 codes
    assert abs(values.mean()) <= 0.6 * step  # those of Q4_0 run from -8 to 7
    assert values.std() == pytest.approx(1 / 16, rel=0.05)
    head = tensors["output.weight"]
    assert gguf.dequantize(head.data, head.tensor_type).std() == pytest.approx(2 / 16, rel=0.05)


def test_the_seed_decides(tmp_path: Path, tokenizer: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one.gguf", "two.gguf", "other.gguf"))
    shape = small(tokenizer)
    make(one, shape, tokenizer)
    make(two, shape, tokenizer)
    make(other, small(tokenizer, skew=1.0), tokenizer)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()


def test_the_model_of_the_benchmark_has_the_size_that_it_should(tokenizer: Path) -> None:
    shape = shape_of(tokenizer)
    assert shape.vocab == vocabulary(tokenizer) == len(TOKENS)
    expert = 3 * shape.hidden * shape.expert_ffn * 20 // 32
    assert 1_300_000 < expert < 1_400_000
    assert 4.0e9 < expert * shape.layers * shape.experts < 4.4e9
    assert set(SIZES) >= {"layers", "experts", "top_k"}
