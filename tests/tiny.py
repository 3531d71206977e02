"""Tiny random checkpoints of every family, written as real files and converted by the real converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.artifact.sources import ConvertOptions
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.memory.machine import read_machine

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
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
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "router_aux_loss_coef": 0.02,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "num_hidden_layers": 3,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "olmoe": {
        "model_type": "olmoe",
        "hidden_size": 128,
        "head_dim": None,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
}


def beside(gigabytes: float) -> float:
    """A budget, in GB, of which this process, with all that tests have imported, leaves so much."""
    return round(read_machine().own_bytes / 1e9 + gigabytes, 2)


def config(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a variant; None takes a key out."""
    every = {**BASE, **VARIANTS[name], **changes}
    return {k: v for k, v in every.items() if v is not None or k in ("sliding_window", "clip_qkv")}


def state(settings: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, ffn = settings["hidden_size"], settings["intermediate_size"]
    heads, kv = (settings[k] for k in ("num_attention_heads", "num_key_value_heads"))
    dim = settings.get("head_dim", hidden // heads)
    kind = settings["model_type"]

    def normal(*shape: int) -> NDArray[np.float32]:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    def gain(size: int) -> NDArray[np.float32]:
        return (1 + 0.2 * rng.normal(size=size)).astype(np.float32)

    out = {"model.embed_tokens.weight": normal(settings["vocab_size"], hidden) * 8}
    for i in range(settings["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for part, rows in (("q", heads), ("k", kv), ("v", kv)):
            out[f"{at}.self_attn.{part}_proj.weight"] = normal(rows * dim, hidden) * 2
            if kind in ("qwen2", "qwen2_moe"):
                out[f"{at}.self_attn.{part}_proj.bias"] = normal(rows * dim) * 4
        if kind in ("qwen3", "qwen3_moe", "olmoe"):
            whole = kind == "olmoe"
            out[f"{at}.self_attn.q_norm.weight"] = gain(heads * dim if whole else dim)
            out[f"{at}.self_attn.k_norm.weight"] = gain(kv * dim if whole else dim)
        out[f"{at}.self_attn.o_proj.weight"] = normal(hidden, heads * dim)
        if kind not in MIXTURES or i in settings.get("mlp_only_layers", ()):
            out |= _mlp(f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), hidden, ffn, normal)
        else:
            out |= _mixture(at, settings, normal)
        out[f"{at}.input_layernorm.weight"] = gain(hidden)
        out[f"{at}.post_attention_layernorm.weight"] = gain(hidden)
    out["model.norm.weight"] = gain(hidden)
    if not settings["tie_word_embeddings"]:
        out["lm_head.weight"] = normal(settings["vocab_size"], hidden) * 8
    return out


Normal = Callable[..., NDArray[np.float32]]


def _mlp(
    at: str, names: tuple[str, str, str], hidden: int, ffn: int, normal: Normal
) -> dict[str, NDArray[np.float32]]:
    gate, up, down = names
    return {
        f"{at}.{gate}.weight": normal(ffn, hidden) * 2,
        f"{at}.{up}.weight": normal(ffn, hidden),
        f"{at}.{down}.weight": normal(hidden, ffn),
    }


def _mixture(at: str, settings: dict[str, Any], normal: Normal) -> dict[str, NDArray[np.float32]]:
    """Router, experts (a tensor each) and shared expert of one layer."""
    hidden, mixtral = settings["hidden_size"], settings["model_type"] == "mixtral"
    block = f"{at}.block_sparse_moe" if mixtral else f"{at}.mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    count = settings.get("num_experts") or settings["num_local_experts"]
    ffn = settings.get("moe_intermediate_size", settings["intermediate_size"])
    out = {f"{block}.gate.weight": normal(count, hidden) * 2}
    for e in range(count):
        out |= _mlp(f"{block}.experts.{e}", names, hidden, ffn, normal)
    if shared := settings.get("shared_expert_intermediate_size"):
        out |= _mlp(f"{block}.shared_expert", names, hidden, shared, normal)
        out[f"{block}.shared_expert_gate.weight"] = normal(1, hidden) * 2
    return out


def head_state(settings: dict[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random weights of a head that drafts, under their names; its layer is an ordinary one."""
    hidden, ffn = settings["hidden_size"], 96
    layer = {**settings, "num_hidden_layers": 1, "intermediate_size": ffn, "mlp_only_layers": (0,)}
    if settings["model_type"] == "mixtral":
        layer["model_type"] = "llama"
    out = {
        name.replace("model.", "mtp.", 1): array
        for name, array in state(layer, seed + 1000).items()
        if "embed" not in name and "lm_head" not in name
    }
    rng = np.random.default_rng(seed + 1000)
    out["mtp.fc.weight"] = (rng.normal(size=(hidden, 2 * hidden)) / 4).astype(np.float32)
    for name in ("embedding", "hidden"):
        gain = 1 + 0.2 * rng.normal(size=hidden)
        out[f"mtp.pre_fc_norm_{name}.weight"] = gain.astype(np.float32)
    return out


def write_head(checkpoint: Path, seed: int = 0) -> Path:
    """A head that drafts, beside the checkpoint's own files."""
    settings = json.loads((checkpoint / "config.json").read_text())
    write_tensors(checkpoint / "mtp.safetensors", head_state(settings, seed))
    return checkpoint


def write_tensors(
    path: Path, tensors: dict[str, NDArray[Any]], dtypes: dict[str, str] | None = None
) -> None:
    """A safetensors file of float32 (or the named types)."""
    names = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint16": "BF16", "uint8": "U8"}
    specs = [
        TensorSpec(n, (dtypes or {}).get(n) or names[str(a.dtype)], a.shape)
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
    path: Path,
    name: str = "llama",
    options: ConvertOptions | None = None,
    head: int | None = None,
    **changes: Any,
) -> Artifact:
    """A converted artifact of a variant at `path`. head: with a head that drafts, of that seed."""
    checkpoint = write_checkpoint(path.with_name(path.name + "-source"), name, **changes)
    if head is not None:
        write_head(checkpoint, head)
    return convert(checkpoint, path, options)
