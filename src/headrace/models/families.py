"""The model families: one declaration each. What a family does not declare, it refuses.

A declaration says how a family differs from the plain llama decoder; the layer itself is built by
`decoder.py`. Source tensor names belong to `artifact/`, kernels to `kernels/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import InputError, UnsupportedError
from headrace.models.config import DecoderConfig


@dataclass(frozen=True)
class Family:
    """A family: its name and what its layers have besides llama's.

    qk_norm_whole: the QK norm runs over all heads together. experts: its layers are mixtures of experts;
    shared_expert: with one that every token uses; dense_layers: some may be ordinary; normalise: whether the
    weights of the chosen experts sum to one, None where the configuration says.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    experts: bool = False
    shared_expert: bool = False
    dense_layers: bool = False
    normalise: bool | None = None

    def check(self, config: DecoderConfig) -> None:
        """Refuse a configuration that this family does not have. Raises InputError."""
        for key in ("qkv_bias", "qk_norm", "qk_norm_whole"):
            if getattr(config, key) != getattr(self, key):
                raise InputError(f"family {self.name} has {key} = {getattr(self, key)}")
        experts = config.experts
        if (experts is not None) != self.experts:
            raise InputError(f"family {self.name} has {'' if self.experts else 'no '}experts")
        if experts is None:
            return
        if (experts.shared_ffn_size > 0) != self.shared_expert:
            kind = "a" if self.shared_expert else "no"
            raise InputError(f"family {self.name} has {kind} shared expert")
        if experts.dense_layers and not self.dense_layers:
            raise InputError(f"family {self.name} has experts in every layer")
        if self.normalise not in (None, experts.normalise):
            raise InputError(f"family {self.name} has normalise = {self.normalise}")


FAMILIES = {
    family.name: family
    for family in (
        Family("llama"),  # SmolLM2, Llama 2 and 3, Mistral
        Family("qwen2", qkv_bias=True),
        Family("qwen3", qk_norm=True),
        Family("mixtral", experts=True, normalise=True),
        Family("qwen2_moe", qkv_bias=True, experts=True, shared_expert=True, dense_layers=True),
        Family("qwen3_moe", qk_norm=True, experts=True, dense_layers=True),
        Family("olmoe", qk_norm_whole=True, experts=True),
    )
}


def family(name: str) -> Family:
    """Look a family up by name. Raises UnsupportedError that lists what is supported."""
    if name not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"model family {name!r} is not supported; supported: {supported}")
    return FAMILIES[name]
