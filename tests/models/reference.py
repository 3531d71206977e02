"""The same model in transformers, float32, with the artifact's own dequantised weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.artifact.container import Artifact
from headrace.models.config import DecoderConfig, ExpertsConfig, padded_rows
from models.weights import dequantized, expert, gain, router


def state_dict(artifact: Artifact) -> dict[str, torch.Tensor]:
    """The artifact's weights under their Hugging Face names."""
    c = DecoderConfig.from_json(artifact.manifest.config)
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
        if c.qk_norm or c.qk_norm_whole:
            out[f"{at}.self_attn.q_norm.weight"] = gain(artifact, f"{to}.q_norm")
            out[f"{at}.self_attn.k_norm.weight"] = gain(artifact, f"{to}.k_norm")
        if c.experts and c.has_experts(i):
            out |= mixture(artifact, i, c.experts)
        else:
            out |= mlp(artifact, to, f"{at}.mlp", c.ffn_size)
        out[f"{at}.self_attn.o_proj.weight"] = dequantized(artifact, f"{to}.out")
        out[f"{at}.input_layernorm.weight"] = gain(artifact, f"{to}.attention_norm")
        out[f"{at}.post_attention_layernorm.weight"] = gain(artifact, f"{to}.mlp_norm")
    return {k: torch.tensor(v, dtype=torch.float32) for k, v in out.items()}


def mlp(artifact: Artifact, to: str, at: str, ffn_size: int) -> dict[str, NDArray[np.float64]]:
    gate_up, rows = dequantized(artifact, f"{to}.gate_up"), padded_rows(ffn_size)
    return {
        f"{at}.gate_proj.weight": gate_up[:ffn_size],
        f"{at}.up_proj.weight": gate_up[rows : rows + ffn_size],
        f"{at}.down_proj.weight": dequantized(artifact, f"{to}.down")[:, :ffn_size],
    }


def mixture(artifact: Artifact, layer: int, c: ExpertsConfig) -> dict[str, NDArray[np.float64]]:
    """Router, experts and shared expert of one layer as transformers holds them: stacked, gate over up."""
    at, rows = f"model.layers.{layer}.mlp", router(artifact, layer)
    every = [expert(artifact, layer, e) for e in range(c.num_experts)]
    out = {
        f"{at}.gate.weight": rows[: c.num_experts],
        f"{at}.experts.gate_up_proj": np.stack([np.concatenate(e[:2]) for e in every]),
        f"{at}.experts.down_proj": np.stack([e[2] for e in every]),
    }
    if c.shared_ffn_size:
        out[f"{at}.shared_expert_gate.weight"] = rows[c.num_experts :]
        out |= mlp(artifact, f"layers.{layer}.shared", f"{at}.shared_expert", c.shared_ffn_size)
    return out


def load(artifact: Artifact, settings: dict[str, Any]) -> Any:
    """transformers' model with the artifact's weights; every weight must find its place."""
    kind = settings["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in settings.items() if k != "model_type"})
    config._experts_implementation = "eager"  # through functional.linear, see rounded_experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state_dict(artifact), strict=True)
    return model.eval()


def log_probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    """float64 [len, vocab]."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1)


@contextlib.contextmanager
def forced_experts(
    model: Any, routes: torch.Tensor, normalise: bool
) -> Iterator[list[torch.Tensor]]:
    """Make routers choose `routes` [layers, len, top_k], by their own weights; collects what they would choose."""
    gates = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    own: list[torch.Tensor] = []

    def force(chosen: torch.Tensor) -> Callable[..., tuple[torch.Tensor, ...]]:
        def hook(_: Any, __: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            own.append(out[2].sort(-1).values)
            shares = torch.softmax(out[0], -1).gather(-1, chosen)
            return out[0], shares / shares.sum(-1, keepdim=True) if normalise else shares, chosen

        return hook

    handles = [m.register_forward_hook(force(r)) for m, r in zip(gates, routes, strict=True)]
    try:
        yield own
    finally:
        for handle in handles:
            handle.remove()


def _rounded(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -width % 32)).unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((blocks / scale).round() * scale).flatten(-2)[..., :width].contiguous()


def quantize_inputs(model: Any) -> Any:
    """Round every Linear's input to int8 codes with one scale for 32 elements, as R2 does."""

    def hook(_: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (_rounded(args[0]),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook)
    return model


@contextlib.contextmanager
def rounded_experts(model: Any) -> Iterator[None]:
    """Round the inputs of experts too, which are no Linear. Routers and shared gates keep theirs, as in R12."""
    linear = torch.nn.functional.linear
    keep = {
        id(p)
        for n, p in model.named_parameters()
        if n.endswith(("gate.weight", "expert_gate.weight"))
    }

    def rounded(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        return linear(x if id(weight) in keep else _rounded(x), weight, *rest)

    torch.nn.functional.linear = rounded
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Mean KL(wanted || got), and the share of positions with the same likeliest token."""
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean().item()
    return kl, (wanted.argmax(-1) == got.argmax(-1)).double().mean().item()
