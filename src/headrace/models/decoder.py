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
from headrace.models.config import DenseConfig

Tensors = Mapping[str, NDArray[Any]]
Formats = Mapping[str, Mapping[str, Any]]


def build_program(
    config: DenseConfig, formats: Formats, tensors: Tensors, fraction_bits: int
) -> p.Program:
    """The program of one model.

    formats: the manifest's entry of each packed weight (format "q4" | "q4m" | "q8" | "q8m",
    shape [n, k], group). tensors: the artifact's arrays by name. Raises InputError that names a
    tensor that is missing or of the wrong shape.
    """
    return _Builder(config, formats, tensors, fraction_bits).program()


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
        self, config: DenseConfig, formats: Formats, tensors: Tensors, fraction_bits: int
    ) -> None:
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
        return p.Program(tuple(ops), self.shape(), *self._tables(), tuple(marks))

    def shape(self) -> p.ModelShape:
        c = self._config
        return p.ModelShape(
            hidden=c.hidden_size,
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            ffn_rows=c.ffn_rows,
            ffn_width=c.ffn_width,
            vocab=c.vocab_size,
            fraction_bits=self._fraction_bits,
        )

    def _layer(self, layer: int) -> list[p.Op]:
        return self._attention(layer) + self._mlp(layer)

    def _attention(self, layer: int) -> list[p.Op]:
        c, name = self._config, f"layers.{layer}"
        size = c.q_size + 2 * c.kv_size
        bias = self._array(f"{name}.qkv.bias", (size,)) if c.qkv_bias else None
        ops: list[p.Op] = [
            p.Norm(self._gain(f"{name}.attention_norm", c.hidden_size)),
            p.Project(self._weight(f"{name}.qkv", size, c.hidden_size), p.Buffer.QKV, bias),
        ]
        if c.qk_norm:
            q, k = (self._gain(f"{name}.{part}_norm", c.head_dim) for part in "qk")
            ops += [p.HeadNorm(q, 0, c.num_heads), p.HeadNorm(k, c.num_heads, c.num_kv_heads)]
        out = self._weight(f"{name}.out", c.hidden_size, c.q_size)
        ops += [p.Land(layer), p.Attend(layer), p.Quantize()]
        return [*ops, p.Project(out, p.Buffer.X, residual=True)]

    def _mlp(self, layer: int) -> list[p.Op]:
        c, name = self._config, f"layers.{layer}"
        gate_up = self._weight(f"{name}.gate_up", 2 * c.ffn_rows, c.hidden_size)
        down = self._weight(f"{name}.down", c.hidden_size, c.ffn_width)
        return [
            p.Norm(self._gain(f"{name}.mlp_norm", c.hidden_size)),
            p.Project(gate_up, p.Buffer.GATE_UP),
            p.SiluMul(),
            p.Project(down, p.Buffer.X, residual=True),
        ]

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
        if array.shape != shape or array.dtype != np.int32:
            raise InputError(
                f"tensor {name!r} is {array.dtype}{list(array.shape)}, not int32{list(shape)}"
            )
        return array
