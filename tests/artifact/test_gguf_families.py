"""A GGUF and a Hugging Face checkpoint of the same weights give the same artifact, in every family.

The GGUF is written by the `gguf` package under its own tensor names, so that ours are checked by another's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from artifact.test_convert import TOKENS
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.artifact.sources import ConvertOptions
from headrace.engine.engine import Engine
from headrace.errors import FileError, InputError
from headrace.values import SamplingParams

Weights = dict[str, NDArray[np.float32]]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(70)]
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def write_gguf(path: Path, family: str, settings: dict[str, Any], weights: Weights) -> Path:
    """Weights under Hugging Face names as a float32 GGUF of the `gguf` package."""
    writer = gguf.GGUFWriter(path, family)
    layers = settings["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_key_length(settings["head_dim"])
    writer.add_value_length(settings["head_dim"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_rope_freq_base(settings["rope_theta"])
    _write_tokenizer(writer)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], layers)
    for name, array in weights.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, _rotation_order(family, name, array, settings))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    control = [
        gguf.TokenType.CONTROL if t.startswith("<|") else gguf.TokenType.NORMAL for t in TOKENS
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*TOKENS[:-1], TOKENS[0] + TOKENS[1]])
    writer.add_token_types(control)
    writer.add_token_merges([f"{TOKENS[0]} {TOKENS[1]}"])  # the package writes no empty list
    writer.add_eos_token_id(258)
    writer.add_bos_token_id(256)
    writer.add_add_bos_token(False)


def _rotation_order(
    family: str, name: str, array: NDArray[np.float32], settings: dict[str, Any]
) -> NDArray[np.float32]:
    """Llama's GGUFs store query and key rows for interleaved rotation; the others as they are."""
    if family != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    dim = settings["head_dim"]
    rows = array.reshape(-1, 2, dim // 2, array.shape[1])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)


def checkpoint(path: Path, family: str, weights: Weights) -> Path:
    """The Hugging Face directory of the same weights."""
    made = tiny.write_checkpoint(path, family)
    tiny.write_tensors(made / "model.safetensors", weights)
    return made


def outcome(artifact: Artifact) -> tuple[bytes, tuple[int, ...], str]:
    """Logits of a prompt, and the tokens and fingerprint of an answer."""
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=12)
    with Engine(artifact, max_context=128, threads=2) as engine:
        logits = engine.logits(PROMPT).tobytes()
        tokens = tuple(t.id for t in engine.generate(PROMPT, params))
        assert engine.stats is not None
        return logits, tokens, engine.stats.fingerprint


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_is_its_checkpoint(tmp_path: Path, family: str, bits: int) -> None:
    settings = tiny.config(family)
    weights = tiny.state(settings, seed=4)
    options = ConvertOptions(bits=bits)
    ours = convert(
        write_gguf(tmp_path / "m.gguf", family, settings, weights), tmp_path / "a", options
    )
    right = convert(checkpoint(tmp_path / "hf", family, weights), tmp_path / "b", options)
    assert ours.manifest.family == right.manifest.family == family
    assert dict(ours.manifest.config) == dict(right.manifest.config)
    assert ours.manifest.tensors == right.manifest.tensors
    assert ours.tensors.keys() == right.tensors.keys()
    for name, array in right.tensors.items():
        assert np.array_equal(ours.tensors[name], array), name
    assert outcome(ours) == outcome(right)


@pytest.mark.parametrize(
    ("family", "part"),
    [("qwen2", f"self_attn.{p}_proj.bias") for p in "qkv"]
    + [("qwen3", f"self_attn.{p}_norm.weight") for p in "qk"],
)
def test_what_the_family_adds_counts_and_may_not_be_missing(
    tmp_path: Path, family: str, part: str
) -> None:
    settings = tiny.config(family)
    weights = tiny.state(settings, seed=4)
    name = f"model.layers.1.{part}"
    right = convert(write_gguf(tmp_path / "m.gguf", family, settings, weights), tmp_path / "a")
    other = {**weights, name: weights[name][::-1].copy()}
    changed = convert(write_gguf(tmp_path / "n.gguf", family, settings, other), tmp_path / "b")
    assert outcome(changed)[0] != outcome(right)[0]
    del other[name]
    with pytest.raises(FileError, match=r"tensor 'blk\.1\.attn_.*is missing"):
        convert(write_gguf(tmp_path / "o.gguf", family, settings, other), tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_bias_in_a_family_without_one_is_refused(tmp_path: Path, family: str) -> None:
    weights = tiny.state(tiny.config("qwen2"), seed=4) | tiny.state(tiny.config(family), seed=4)
    path = write_gguf(tmp_path / "m.gguf", family, tiny.config(family), weights)
    with pytest.raises(InputError, match=r"blk\.0\.attn_.\.bias' is not understood"):
        convert(path, tmp_path / "out")
