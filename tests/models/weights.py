"""What an artifact's packed weights stand for, in float64: for comparisons, never for computing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.container import Artifact
from headrace.kernels.layout import unpack
from headrace.models.decoder import packed_weight


def dequantized(artifact: Artifact, name: str) -> NDArray[np.float64]:
    """A packed weight as float64 [n, k]."""
    w = unpack(packed_weight(name, artifact.manifest.tensors, artifact.tensors))
    value = np.repeat(w.scales, w.group, 1) * w.codes
    if w.mins is not None:
        value = value + np.repeat(w.mins << w.min_shift[:, None], w.group, 1)
    return np.ldexp((value * w.mantissa[:, None]).astype(np.float64), w.exponent[:, None])


def gain(artifact: Artifact, name: str) -> NDArray[np.float64]:
    exponent = int(artifact.tensors[f"{name}.gain_exponent"][0])
    return np.ldexp(artifact.tensors[f"{name}.gain"].astype(np.float64), exponent)
