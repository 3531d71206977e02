"""Random LoRA adapters for the tiny models, as PEFT writes them, and the float model that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tiny
from headrace.artifact.adapter import Adapter
from headrace.artifact.adapter_convert import convert_adapter
from headrace.artifact.adapter_places import MODULES, place
from headrace.artifact.container import Artifact
from headrace.models.config import DecoderConfig

ATTENTION = ("q", "k", "v", "o")
PREFIX = "base_model.model.model."


def config(rank: int = 4, alpha: float = 8, **changes: Any) -> dict[str, Any]:
    """adapter_config.json as PEFT writes it; None takes a key out."""
    every = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "fan_in_fan_out": False,
        "use_dora": False, "use_rslora": False, "lora_dropout": 0.05, "modules_to_save": None,
        "init_lora_weights": True, "target_modules": ["q_proj"], "rank_pattern": {}, "alpha_pattern": {},
        "task_type": "CAUSAL_LM", "base_model_name_or_path": "somewhere/else", "inference_mode": True,
        "layer_replication": None, "megatron_config": None, "loftq_config": {}, **changes,
    }  # fmt: skip
    return {k: v for k, v in every.items() if v != "absent"}


def state(
    c: DecoderConfig,
    modules: Iterable[str] = MODULES,
    rank: int = 4,
    seed: int = 0,
    prefix: str = PREFIX,
    middle: str = "",
) -> dict[str, NDArray[np.float32]]:
    """Pairs whose product is about as large as a fifth of a weight of the tiny models."""
    rng = np.random.default_rng(seed)
    out: dict[str, NDArray[np.float32]] = {}
    for layer in range(c.num_layers):
        for module in modules:
            at = place(c, layer, module)
            if at is None:
                continue
            name = f"{prefix}layers.{layer}.{MODULES[module]}"
            a = rng.uniform(-1, 1, (rank, at.columns)) / np.sqrt(at.columns)
            b = rng.normal(size=(at.n, rank)) * 0.2
            out[f"{name}.lora_A{middle}.weight"] = a.astype(np.float32)
            out[f"{name}.lora_B{middle}.weight"] = b.astype(np.float32)
    return out


def write(
    path: Path, tensors: dict[str, NDArray[Any]], settings: dict[str, Any] | None = None
) -> Path:
    """A PEFT folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(settings or config()))
    tiny.write_tensors(path / "adapter_model.safetensors", tensors)
    return path


def make(
    path: Path, base: Artifact, modules: Iterable[str] = MODULES, seed: int = 0, alpha: float = 8
) -> Adapter:
    """A converted adapter at `path`."""
    c = DecoderConfig.from_json(base.manifest.config)
    source = path.with_name(path.name + "-peft")
    write(source, state(c, modules, seed=seed), config(alpha=alpha))
    return convert_adapter(source, path, base)
