"""The same model in transformers, float32, with the artifact's own dequantised weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.artifact.container import Artifact
from headrace.models.config import DenseConfig
from models.weights import dequantized, gain


def state_dict(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The artifact's weights under their Hugging Face names."""
    c = DenseConfig.from_json(artifact.manifest.config)
    out = {
        "model.embed_tokens.weight": dequantized(artifact, "embed"),
        "model.norm.weight": gain(artifact, "norm"),
    }
    out["lm_head.weight"] = dequantized(artifact, "embed" if c.tied else "head")
    for i in range(c.num_layers):
        to, at = f"layers.{i}", f"model.layers.{i}"
        cuts = np.cumsum([c.q_size, c.kv_size])
        for part, rows in zip(
            "qkv", np.split(dequantized(artifact, f"{to}.qkv"), cuts), strict=True
        ):
            out[f"{at}.self_attn.{part}_proj.weight"] = rows
        if c.qkv_bias:
            bias = artifact.tensors[f"{to}.qkv.bias"] / 2.0**artifact.manifest.fraction_bits
            for part, rows in zip("qkv", np.split(bias, cuts), strict=True):
                out[f"{at}.self_attn.{part}_proj.bias"] = rows
        if c.qk_norm:
            out[f"{at}.self_attn.q_norm.weight"] = gain(artifact, f"{to}.q_norm")
            out[f"{at}.self_attn.k_norm.weight"] = gain(artifact, f"{to}.k_norm")
        gate_up = dequantized(artifact, f"{to}.gate_up")
        out[f"{at}.mlp.gate_proj.weight"] = gate_up[: c.ffn_size]
        out[f"{at}.mlp.up_proj.weight"] = gate_up[c.ffn_rows : c.ffn_rows + c.ffn_size]
        out[f"{at}.mlp.down_proj.weight"] = dequantized(artifact, f"{to}.down")[:, : c.ffn_size]
        out[f"{at}.self_attn.o_proj.weight"] = dequantized(artifact, f"{to}.out")
        out[f"{at}.input_layernorm.weight"] = gain(artifact, f"{to}.attention_norm")
        out[f"{at}.post_attention_layernorm.weight"] = gain(artifact, f"{to}.mlp_norm")
    return {k: torch.tensor(v, dtype=torch.float32) for k, v in out.items()}


def load(artifact: Artifact, settings: dict[str, Any]) -> Any:
    """transformers' model with the artifact's weights; every weight must find its place."""
    kind = settings["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in settings.items() if k != "model_type"})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state_dict(artifact), strict=True)
    return model.eval()


def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """float64 [len, vocab]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1)


def quantize_inputs(model: Any) -> Any:
    """Round every Linear's input to int8 codes with one scale for 32 elements, as R2 does."""

    def hook(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = args[0]
        width = x.shape[-1]
        blocks = torch.nn.functional.pad(x, (0, -width % 32)).unflatten(-1, (-1, 32))
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (((blocks / scale).round() * scale).flatten(-2)[..., :width].contiguous(),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook)
    return model


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Mean KL(wanted || got), and the share of positions with the same likeliest token."""
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean().item()
    return kl, (wanted.argmax(-1) == got.argmax(-1)).double().mean().item()
