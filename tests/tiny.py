"""Tiny random checkpoints of every family, written as real files and converted by the real converter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.artifact.sources import ConvertOptions
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 272  # 256 bytes, the special tokens, and some that no text encodes to
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 112,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 258,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "attention_bias": False},
}


def config(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a variant."""
    return {**BASE, **VARIANTS[name], **changes}


def state(settings: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, ffn = settings["hidden_size"], settings["intermediate_size"]
    dim, heads, kv = (
        settings[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )

    def normal(*shape: int) -> NDArray[np.float32]:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def gain(size: int) -> NDArray[np.float32]:
        return (1 + 0.2 * rng.normal(size=size)).astype(np.float32)

    out = {"model.embed_tokens.weight": normal(settings["vocab_size"], hidden) * 8}
    for i in range(settings["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for part, rows in (("q", heads), ("k", kv), ("v", kv)):
            out[f"{at}.self_attn.{part}_proj.weight"] = normal(rows * dim, hidden) * 2
            if settings["model_type"] == "qwen2":
                out[f"{at}.self_attn.{part}_proj.bias"] = normal(rows * dim) * 4
        if settings["model_type"] == "qwen3":
            out[f"{at}.self_attn.q_norm.weight"] = gain(dim)
            out[f"{at}.self_attn.k_norm.weight"] = gain(dim)
        out[f"{at}.self_attn.o_proj.weight"] = normal(hidden, heads * dim)
        out[f"{at}.mlp.gate_proj.weight"] = normal(ffn, hidden) * 2
        out[f"{at}.mlp.up_proj.weight"] = normal(ffn, hidden)
        out[f"{at}.mlp.down_proj.weight"] = normal(hidden, ffn)
        out[f"{at}.input_layernorm.weight"] = gain(hidden)
        out[f"{at}.post_attention_layernorm.weight"] = gain(hidden)
    out["model.norm.weight"] = gain(hidden)
    if not settings["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(settings["vocab_size"], hidden) * 8
    return out


def write_tensors(
    path: Path, tensors: dict[str, NDArray[Any]], dtypes: dict[str, str] | None = None
) -> None:
    """A safetensors file of float32 (or the named types)."""
    names = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint16": "BF16"}
    specs = [
        TensorSpec(n, (dtypes or {}).get(n, names[str(a.dtype)]), a.shape)
        for n, a in tensors.items()
    ]
    with path.open("wb") as file:
        writer = TensorFileWriter(file, specs)
        for name, array in tensors.items():
            writer.write(name, array)


def tokenizer_json() -> str:
    """A byte-level tokenizer: every byte is its own token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    text: str = tokenizer.to_str()
    return text


def write_checkpoint(path: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face directory of a variant."""
    path.mkdir(parents=True, exist_ok=True)
    settings = config(name, **changes)
    (path / "config.json").write_text(json.dumps(settings))
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    write_tensors(path / "model.safetensors", state(settings, seed))
    return path


def make(
    path: Path, name: str = "llama", options: ConvertOptions | None = None, **changes: Any
) -> Artifact:
    """A converted artifact of a variant at `path`."""
    checkpoint = write_checkpoint(path.with_name(path.name + "-source"), name, **changes)
    return convert(checkpoint, path, options)
