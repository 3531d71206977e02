"""The model families: one declaration each. What a family does not declare, it refuses.

A declaration says how a family differs from the plain llama decoder; the layer itself is built by
`decoder.py`. Source tensor names belong to `artifact/`, kernels to `kernels/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import InputError, UnsupportedError
from headrace.models.config import DenseConfig


@dataclass(frozen=True)
class Family:
    """A dense family: its name and what its layers have besides llama's."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False

    def check(self, config: DenseConfig) -> None:
        """Refuse a configuration that this family does not have. Raises InputError."""
        for key in ("qkv_bias", "qk_norm"):
            if getattr(config, key) != getattr(self, key):
                raise InputError(f"family {self.name} has {key} = {getattr(self, key)}")


FAMILIES = {
    family.name: family
    for family in (
        Family("llama"),  # SmolLM2, Llama 2 and 3, Mistral
        Family("qwen2", qkv_bias=True),
        Family("qwen3", qk_norm=True),
    )
}


def family(name: str) -> Family:
    """Look a family up by name. Raises UnsupportedError that lists what is supported."""
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"model family {name!r} is not supported; supported: {supported}")
    return FAMILIES[name]
