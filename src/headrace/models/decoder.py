"""Builds the program of a dense decoder from its configuration and packed tensors.

One layer is ten operations over named buffers; what a family adds (a bias, a QK norm) is an operand or
an operation more. Knows operations and tensor names; knows no kernel, file or sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers
from headrace.errors import InputError
from headrace.kernels import program as p
from headrace.models.config import DecoderConfig, ExpertsConfig, padded_rows, padded_width

Layouts = Mapping[int, p.ExpertLayout]
Tensors = Mapping[str, NDArray[Any]]
Formats = Mapping[str, Mapping[str, Any]]


def build_program(
    config: DecoderConfig,
    formats: Formats,
    tensors: Tensors,
    fraction_bits: int,
    layouts: Layouts | None = None,
    forecasts: Mapping[int, p.Router] | None = None,
) -> p.Program:
    """The program of one model. layouts: of the expert records of each layer that has experts. forecasts: what guesses
    the experts of a layer early in place of its own router.

    formats: the manifest's entry of each packed weight (format "q4" | "q4m" | "q8" | "q8m",
    shape [n, k], group). tensors: the artifact's arrays by name. Raises InputError that names a
    tensor that is missing or of the wrong shape.
    """
    return _Builder(
        config, formats, tensors, fraction_bits, layouts or {}, forecasts or {}
    ).program()


def model_shape(c: DecoderConfig, fraction_bits: int) -> p.ModelShape:
    """The sizes of a configuration."""
    widest = max(c.ffn_size, c.experts.shared_ffn_size if c.experts else 0)
    return p.ModelShape(
        hidden=c.hidden_size,
        num_layers=c.num_layers,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        ffn_rows=padded_rows(widest),
        ffn_width=padded_width(widest),
        vocab=c.vocab_size,
        fraction_bits=fraction_bits,
        num_experts=c.experts.num_experts if c.experts else 0,
        top_k=c.experts.top_k if c.experts else 0,
        expert_rows=c.experts.ffn_rows if c.experts else 0,
        expert_width=c.experts.ffn_width if c.experts else 0,
    )


def packed_weight(name: str, formats: Formats, tensors: Tensors) -> p.PackedWeight:
    """One packed weight of an artifact, its arrays borrowed."""
    entry = formats[name]
    return p.PackedWeight(
        codes=tensors[f"{name}.codes"],
        scales=tensors[f"{name}.scales"],
        mins=tensors[f"{name}.mins"] if entry["format"].endswith("m") else None,
        row=tensors[f"{name}.row"],
        n=entry["shape"][0],
        k=entry["shape"][1],
        bits=int(entry["format"][1]),
        group=entry["group"],
    )


def _epsilon(text: str, fraction_bits: int) -> tuple[int, int]:
    """A norm's epsilon, where the sum of R4 that it enters stays below 2^62."""
    most = Fraction(1 << 61, 4 ** (fraction_bits + numbers.NORM_UP))
    if Fraction(text) >= most:
        raise InputError(
            f"norm_eps is {text}; with {fraction_bits} fraction bits it must be below {float(most):g}"
        )
    return numbers.epsilon(text)


class _Builder:
    def __init__(
        self,
        config: DecoderConfig,
        formats: Formats,
        tensors: Tensors,
        fraction_bits: int,
        layouts: Layouts,
        forecasts: Mapping[int, p.Router],
    ) -> None:
        self._layouts = layouts
        self._forecasts = forecasts
        self._config = config
        self._formats = formats
        self._tensors = tensors
        self._fraction_bits = fraction_bits
        self._eps = _epsilon(config.norm_eps, fraction_bits)

    def program(self) -> p.Program:
        c = self._config
        embedding = self._weight("embed", c.vocab_size, c.hidden_size)
        head = embedding if c.tied else self._weight("head", c.vocab_size, c.hidden_size)
        ops: list[p.Op] = [p.Embed(embedding)]
        marks = []
        for layer in range(c.num_layers):
            marks.append(len(ops))
            ops += self._layer(layer)
        marks.append(len(ops))
        ops += [p.Select(), p.Norm(self._gain("norm", c.hidden_size))]
        ops += [p.Project(head, p.Buffer.LOGITS)]
        shape = model_shape(c, self._fraction_bits)
        return p.Program(tuple(ops), shape, *self._tables(), tuple(marks))

    def _layer(self, layer: int) -> list[p.Op]:
        experts = self._config.experts
        if experts is None or layer in experts.dense_layers:
            return self._attention(layer) + self._mlp(layer)
        return self._attention(layer) + self._experts(layer, experts)

    def _attention(self, layer: int) -> list[p.Op]:
        c, name = self._config, f"layers.{layer}"
        size = c.q_size + 2 * c.kv_size
        bias = self._array(f"{name}.qkv.bias", (size,)) if c.qkv_bias else None
        ops: list[p.Op] = [
            p.Norm(self._gain(f"{name}.attention_norm", c.hidden_size)),
            p.Project(self._weight(f"{name}.qkv", size, c.hidden_size), p.Buffer.QKV, bias),
            p.Adapt(layer, "qkv", p.Buffer.QKV),
        ]
        if c.qk_norm_whole:
            q = self._gain(f"{name}.q_norm", c.q_size)
            k = self._gain(f"{name}.k_norm", c.kv_size)
            ops += [
                p.HeadNorm(q, 0, 1, c.num_heads),
                p.HeadNorm(k, c.num_heads, 1, c.num_kv_heads),
            ]
        elif c.qk_norm:
            q, k = (self._gain(f"{name}.{part}_norm", c.head_dim) for part in "qk")
            ops += [p.HeadNorm(q, 0, c.num_heads), p.HeadNorm(k, c.num_heads, c.num_kv_heads)]
        out = self._weight(f"{name}.out", c.hidden_size, c.q_size)
        ops += [p.Land(layer), p.Attend(layer), p.Quantize()]
        return [*ops, p.Project(out, p.Buffer.X, residual=True), p.Adapt(layer, "out", p.Buffer.X)]

    def _mlp(self, layer: int) -> list[p.Op]:
        norm = p.Norm(self._gain(f"layers.{layer}.mlp_norm", self._config.hidden_size))
        both, silu, down = self._gated(f"layers.{layer}", self._config.ffn_size, p.Buffer.X)
        adapt_both = p.Adapt(layer, "gate_up", p.Buffer.GATE_UP)
        return [norm, both, adapt_both, silu, down, p.Adapt(layer, "down", p.Buffer.X)]

    def _gated(self, name: str, ffn_size: int, target: p.Buffer) -> list[p.Op]:
        """A gated MLP of the activation, added to X or written to SHARED."""
        hidden, rows = self._config.hidden_size, padded_rows(ffn_size)
        down = self._weight(f"{name}.down", hidden, padded_width(ffn_size))
        return [
            p.Project(self._weight(f"{name}.gate_up", 2 * rows, hidden), p.Buffer.GATE_UP),
            p.SiluMul(rows),
            p.Project(down, target, residual=target == p.Buffer.X),
        ]

    def _experts(self, layer: int, experts: ExpertsConfig) -> list[p.Op]:
        """Route first, so that missing experts are read while the shared expert computes."""
        c, name = self._config, f"layers.{layer}"
        gain = self._gain(f"{name}.mlp_norm", c.hidden_size)
        shared = experts.shared_ffn_size
        router = self._router(name, experts.num_experts + (shared > 0))
        ahead = self._ahead(layer, experts)
        route = p.Route(layer, gain, router, experts.top_k, experts.normalise, shared > 0, ahead)
        mix: list[p.Op] = [p.Norm(gain), p.Experts(layer, self._layouts[layer])]
        if not shared:
            return [route, *mix]
        return [
            route,
            p.Norm(gain),
            *self._gated(f"{name}.shared", shared, p.Buffer.SHARED),
            *mix,
            p.AddShared(),
        ]

    def _ahead(self, layer: int, experts: ExpertsConfig) -> p.Ahead | None:
        """What guesses for the next layer that has experts: its own router, unless a better one was fitted."""
        later = (
            i for i in range(layer + 1, self._config.num_layers) if self._config.has_experts(i)
        )
        if (at := next(later, None)) is None:
            return None
        name, gated = f"layers.{at}", experts.shared_ffn_size > 0
        gain = self._gain(f"{name}.mlp_norm", self._config.hidden_size)
        router = self._forecasts.get(at)
        return p.Ahead(at, gain, router or self._router(name, experts.num_experts + gated))

    def _router(self, name: str, rows: int) -> p.Router:
        shapes = {"codes": (rows, self._config.hidden_size), "exponents": (rows,)}
        codes, exponents = (self._array(f"{name}.router.{k}", s) for k, s in shapes.items())
        return p.Router(codes, exponents)

    def _tables(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        c = self._config
        half, rows = c.head_dim // 2, -(-c.context // numbers.ROPE_LOW)
        return (
            self._array("rope.low", (numbers.ROPE_LOW, half, 2)),
            self._array("rope.high", (rows, half, 2)),
            self._array("table.sigmoid", (2 * numbers.SIGMOID_RANGE * numbers.SIGMOID_STEPS + 1,)),
        )

    def _weight(self, name: str, n: int, k: int) -> p.PackedWeight:
        if name not in self._formats:
            raise InputError(f"tensor {name!r} is missing")
        entry = self._formats[name]
        if list(entry["shape"]) != [n, k]:
            raise InputError(
                f"tensor {name!r} is {entry['shape']}, the configuration needs {[n, k]}"
            )
        return packed_weight(name, self._formats, self._tensors)

    def _gain(self, name: str, size: int) -> p.Gain:
        exponent = int(self._array(f"{name}.gain_exponent", (1,))[0])
        return p.Gain(self._array(f"{name}.gain", (size,)), exponent, self._eps)

    def _array(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        if name not in self._tensors:
            raise InputError(f"tensor {name!r} is missing")
        array = self._tensors[name]
        kind = np.int16 if name.endswith(".router.codes") else np.int32
        if array.shape != shape or array.dtype != kind:
            wanted = f"{np.dtype(kind)}{list(shape)}"
            raise InputError(f"tensor {name!r} is {array.dtype}{list(array.shape)}, not {wanted}")
        return array
