"""The typed configuration of a decoder and its checks. Knows no file format and no kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal, InvalidOperation
from typing import TypeVar

from headrace.arith import numbers
from headrace.errors import InputError, UnsupportedError

MAX_LAYERS = 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rotary frequency scaling (config.json's rope_type "llama3")."""

    factor: str
    low_freq_factor: str
    high_freq_factor: str
    original_context: int

    def frequency_factors(self, frequencies: list[Decimal]) -> list[Decimal]:
        """What each angle is divided by: 1 for short waves, `factor` for long, a blend between."""
        factor, low, high = (
            Decimal(v) for v in (self.factor, self.low_freq_factor, self.high_freq_factor)
        )
        turn = Decimal("6.283185307179586476925286766559005768394338798750211641949889")
        out = []
        for f in frequencies:
            turns = self.original_context * f / turn  # how often the wave fits the old context
            if turns >= high:
                out.append(Decimal(1))
            elif turns <= low:
                out.append(factor)
            else:
                smooth = (turns - low) / (high - low)
                out.append(1 / ((1 - smooth) / factor + smooth))
        return out


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture-of-experts layers: all but `dense_layers`, which have an ordinary MLP of the decoder's ffn_size.

    ffn_size: of one expert. normalise: the weights of the chosen experts sum to one (otherwise they are shares of
    all experts). shared_ffn_size: of an expert that every token uses, times the sigmoid of its gate; 0: none.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    normalise: bool
    shared_ffn_size: int = 0
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        limits = {"num_experts": 4096, "top_k": 64, "ffn_size": 2**18}
        for name, limit in limits.items():
            if not 1 <= getattr(self, name) <= limit:
                raise InputError(
                    f"{name} is {getattr(self, name)}; it must be between 1 and {limit}"
                )
        if self.top_k > self.num_experts:
            raise InputError(f"top_k {self.top_k} is more than {self.num_experts} experts")
        if not 0 <= self.shared_ffn_size <= 2**18:
            raise InputError(f"shared_ffn_size is {self.shared_ffn_size}")

    @property
    def ffn_rows(self) -> int:
        return padded_rows(self.ffn_size)

    @property
    def ffn_width(self) -> int:
        return padded_width(self.ffn_size)


def padded_rows(ffn_size: int) -> int:
    """ffn_size padded so that `up` starts at a tile of the fused gate_up weight."""
    return -(-ffn_size // numbers.TILE) * numbers.TILE


def padded_width(ffn_size: int) -> int:
    """ffn_size padded to whole activation blocks: the K of `down`."""
    return -(-ffn_size // numbers.BLOCK) * numbers.BLOCK


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder of the llama kind. Decimal numbers are text, so that no float rounds them.

    `rope_factors` are explicit per-frequency divisors (a GGUF's rope_freqs), as decimal text.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    context: int
    norm_eps: str
    rope_theta: str
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Llama3Scaling | None = None
    rope_factors: tuple[str, ...] | None = None
    qk_norm_whole: bool = False  # the QK norm runs over all heads together (OLMoE)
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_shape()
        for name in ("norm_eps", "rope_theta"):
            if not _positive_decimal(getattr(self, name)):
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be a positive number")
        if self.experts and any(not 0 <= i < self.num_layers for i in self.experts.dense_layers):
            raise InputError(f"dense_layers {self.experts.dense_layers} are not all layers")
        if Decimal(self.norm_eps) >= 1:
            raise InputError(f"norm_eps is {self.norm_eps}; it must be below 1")
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise InputError(
                f"rope_factors holds {len(self.rope_factors)}, not head_dim / 2 values"
            )

    def _check_ranges(self) -> None:
        limits = {
            "vocab_size": 2**20, "hidden_size": 16384, "num_layers": MAX_LAYERS, "num_heads": 1024,
            "num_kv_heads": 1024, "head_dim": 512, "ffn_size": 2**18, "context": 2**24,
        }  # fmt: skip
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise InputError(f"{name} is {value}; it must be between 1 and {limit}")

    def _check_shape(self) -> None:
        if self.head_dim % numbers.BLOCK or self.hidden_size % numbers.BLOCK:
            raise UnsupportedError(
                f"head_dim {self.head_dim} and hidden_size {self.hidden_size} must be multiples of 32"
            )
        if self.qk_norm_whole and self.q_size > 16384:
            raise UnsupportedError(f"a norm over {self.q_size} query elements: at most 16384")
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"{self.num_heads} heads cannot share {self.num_kv_heads} kv heads")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def ffn_rows(self) -> int:
        return padded_rows(self.ffn_size)

    @property
    def ffn_width(self) -> int:
        return padded_width(self.ffn_size)

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    def frequencies(self) -> list[Decimal]:
        """Rotary angles of one position step, radians, with this model's scaling."""
        base = numbers.rope_frequencies(self.head_dim, Decimal(self.rope_theta))
        if self.rope_scaling is not None:
            factors = self.rope_scaling.frequency_factors(base)
        elif self.rope_factors is not None:
            factors = [Decimal(v) for v in self.rope_factors]
        else:
            return base
        return numbers.rope_frequencies(self.head_dim, Decimal(self.rope_theta), factors)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> DecoderConfig:
        """Typed reading: a missing, extra or mistyped key is refused by name."""
        fields = dict(data)
        scaling = fields.get("rope_scaling")
        if isinstance(scaling, Mapping):
            fields["rope_scaling"] = _build(Llama3Scaling, scaling)
        experts = fields.get("experts")
        if isinstance(experts, Mapping):
            inner = dict(experts)
            if isinstance(inner.get("dense_layers"), list):
                inner["dense_layers"] = tuple(inner["dense_layers"])
            fields["experts"] = _build(ExpertsConfig, inner)
        if isinstance(fields.get("rope_factors"), list):
            fields["rope_factors"] = tuple(fields["rope_factors"])  # type: ignore[arg-type]
        return _build(cls, fields)


def _positive_decimal(text: object) -> bool:
    try:
        value = Decimal(text) if isinstance(text, str) else Decimal("NaN")
    except InvalidOperation:
        return False
    return value.is_finite() and Decimal("1e-20") < value < Decimal("1e20")


_TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "str": str, "bool": bool}


def _build(cls: type[T], data: Mapping[str, object]) -> T:
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    unknown = set(data) - set(fields)
    if unknown:
        raise InputError(f"config key {sorted(unknown)[0]!r} is not known")
    for name, field in fields.items():
        wanted = _TYPES.get(field.type)
        if name in data and wanted and type(data[name]) is not wanted:
            raise InputError(f"config key {name!r} is {data[name]!r}, not of type {field.type}")
    try:
        return cls(**data)
    except TypeError as error:
        raise InputError(f"config: {error}") from None
