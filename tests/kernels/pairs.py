"""Adapters made of painted or random weights, for programs of tiny models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from headrace.artifact.adapter_places import MODULES, place
from headrace.kernels.program import LowRank, PackedWeight, Pairs
from headrace.models.config import DecoderConfig
from kernels import cases


def _weight(n: int, k: int, exponent: int, seed: int, fill: str) -> PackedWeight:
    """A weight whose rows have exponents near `exponent`."""
    weight = cases.weight(n, k, 8, 32, False, fill, seed)
    row = weight.row.copy()
    row[1, :n] = exponent + np.arange(n) % 3
    return replace(weight, row=row)


def pairs(
    c: DecoderConfig,
    layers: Iterable[int],
    ranks: Mapping[str, int],
    seed: int,
    fill: str = "random",
    louder: int = 0,
) -> Pairs:
    """Pairs of the modules that `ranks` names. louder: places that both are shifted up by."""
    out: dict[tuple[int, str], tuple[LowRank, ...]] = {}
    for layer in layers:
        for number, module in enumerate(MODULES):
            at = place(c, layer, module)
            if module not in ranks or at is None:
                continue
            start = seed + 100 * layer + 2 * number
            a = _weight(ranks[module], at.k, -39 + louder, start, fill)
            b = _weight(at.n, ranks[module], -41 + louder, start + 1, fill)
            key = (layer, at.name)
            out[key] = (*out.get(key, ()), LowRank(a, b, at.offset))
    return out
