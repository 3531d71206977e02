"""What an artifact's packed weights stand for, in float64: for comparisons, never for computing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.arith.ops import Weight
from headrace.artifact.container import Artifact
from headrace.kernels.layout import unpack, unpack_expert
from headrace.models.decoder import packed_weight


def dequantized(artifact: Artifact, name: str) -> NDArray[np.float64]:
    """A packed weight as float64 [n, k]."""
    return values(unpack(packed_weight(name, artifact.manifest.tensors, artifact.tensors)))


def values(w: Weight) -> NDArray[np.float64]:
    """A logical weight as float64 [n, k]."""
    value = np.repeat(w.scales, w.group, 1) * w.codes
    if w.mins is not None:
        value = value + np.repeat(w.mins << w.min_shift[:, None], w.group, 1)
    return np.ldexp((value * w.mantissa[:, None]).astype(np.float64), w.exponent[:, None])


def expert(artifact: Artifact, layer: int, index: int) -> tuple[NDArray[np.float64], ...]:
    """Gate, up [ffn, hidden] and down [hidden, ffn] of one expert, without padding."""
    where = next(r for r in artifact.records if r.layer == layer)
    offset = where.offset + index * where.layout.nbytes
    record = np.fromfile(where.path, np.uint8, where.layout.nbytes, offset=offset)
    gate_up, down = (values(w) for w in unpack_expert(record, where.layout))
    ffn = artifact.manifest.config["experts"]["ffn_size"]
    rows = len(gate_up) // 2
    return gate_up[:ffn], gate_up[rows : rows + ffn], down[:, :ffn]


def router(artifact: Artifact, layer: int) -> NDArray[np.float64]:
    """The router's rows [E (+ 1), hidden]; the last is the gate of a shared expert where there is one."""
    codes, exponents = (
        artifact.tensors[f"layers.{layer}.router.{n}"] for n in ("codes", "exponents")
    )
    return np.ldexp(codes.astype(np.float64), exponents[:, None])


def gain(artifact: Artifact, name: str) -> NDArray[np.float64]:
    exponent = int(artifact.tensors[f"{name}.gain_exponent"][0])
    return np.ldexp(artifact.tensors[f"{name}.gain"].astype(np.float64), exponent)
