"""The random mixture of experts that does not fit: its files in each engine's form, made where they are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench import make_checkpoint, make_gguf, model
from bench.settings import Settings
from headrace.artifact.convert import convert

BF16_EXPERT_FFN = 224  # makes an expert of the bf16 checkpoint about as large as one in Q4_1


def gguf(settings: Settings, form: str = "q4_1") -> Path:
    """The model in Q4_1, the one given or made; in Q4_0 for an engine that knows no Q4_1."""
    if settings.mixture is not None and form == "q4_1":
        return settings.mixture.resolve()
    path = settings.work / f"mixture-{form}.gguf"
    if not path.exists():
        tokenizer = model.gguf(settings)
        make_gguf.make(path, make_gguf.shape_of(tokenizer, form=form), tokenizer)
    return path


def artifact(settings: Settings) -> Path:
    """headrace's artifact of the Q4_1 file."""
    target = settings.work / "mixture"
    return target if target.exists() else convert(gguf(settings), target).path


def checkpoint(settings: Settings) -> Path:
    """A Hugging Face checkpoint in bf16 of about as many bytes, with narrower experts."""
    target = settings.work / "mixture-bf16"
    if not target.exists():
        tokenizer = artifact(settings)
        shape = make_gguf.shape_of(model.gguf(settings), expert_ffn=BF16_EXPERT_FFN)
        make_checkpoint.make(target, replace(shape, layout="bf16"), tokenizer)
        _name_classes(target)
    return target


def _name_classes(target: Path) -> None:
    """What a loader of transformers asks for besides the sizes."""
    path = target / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=1))
    words = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(words))
