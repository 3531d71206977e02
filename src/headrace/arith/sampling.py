"""From logits to a token: the definition of a draw, in NumPy integers (R11 of docs/arithmetic.md).

A draw is a function of (logits, parameters, a random word). Ties go to the lowest id. Order: temperature, top-k, top-p,
min-p, draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import LOG2E_Q20
from headrace.arith.ops import exp2_negative_q30

Int = NDArray[np.int64]
Logits = NDArray[np.int32] | NDArray[np.int64]

UNIT_BITS = 16  # parameters are Q16
ID_BITS = 20  # a vocabulary is at most 2^20 (models/config.py)
SPAN = 31 << 16  # a weight this far below the largest (log2, Q16) is zero


MAX_INVERSE_TEMPERATURE = 1 << 36  # a temperature of 2^-20


@dataclass(frozen=True)
class Draw:
    """Parameters in Q16. top_k 0, top_p of one and min_p 0 leave everything.

    Raises ValueError where a parameter is outside the bounds that keep every product in int64.
    """

    inverse_temperature: int
    top_k: int
    top_p: int
    min_p: int
    fraction_bits: int

    def __post_init__(self) -> None:
        _within("inverse_temperature", self.inverse_temperature, 1, MAX_INVERSE_TEMPERATURE)
        _within("top_k", self.top_k, 0, (1 << 31) - 1)
        _within("top_p", self.top_p, 0, 1 << UNIT_BITS)
        _within("min_p", self.min_p, 0, 1 << UNIT_BITS)
        _within("fraction_bits", self.fraction_bits, 8, 24)

    @property
    def reach(self) -> int:
        """How far below the largest a logit may be and still have a weight."""
        return (SPAN << (20 + self.fraction_bits)) // (LOG2E_Q20 * self.inverse_temperature) + 1


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low} and {high}")


def draw(logits: Logits, how: Draw, word: int) -> int:
    """The token that the 64-bit random `word` picks."""
    keys = _keys(logits, how)
    if how.top_k:
        keys = _smallest(keys, how.top_k)
    if how.top_p < 1 << UNIT_BITS:
        keys = _top_p(keys, how.top_p)
    if how.min_p > 0:
        keys = keys[_weights(keys) << UNIT_BITS >= how.min_p << 30]
    return _choose(keys, word)


def _keys(logits: Logits, how: Draw) -> Int:
    """(distance below the largest, id) in one integer for every token of non-zero weight."""
    peak = int(logits.max())
    ids = np.flatnonzero(logits >= peak - how.reach)
    # Within reach the product is below 2^45 + 2^36, and log2(e) times it, shifted, below 2^49.
    below = (peak - logits[ids].astype(np.int64)) * how.inverse_temperature
    delta = (below >> how.fraction_bits) * LOG2E_Q20 >> 20
    keep = delta < SPAN
    return (delta[keep] << ID_BITS) | ids[keep]


def _weights(keys: Int) -> Int:
    """Integer probabilities, Q30, unnormalised."""
    return exp2_negative_q30(keys >> ID_BITS)


def _smallest(keys: Int, count: int) -> Int:
    """The `count` likeliest; equal ones by lower id, since the id is the key's low part."""
    return keys if count >= len(keys) else np.partition(keys, count - 1)[:count]


def _top_p(keys: Int, share_q16: int) -> Int:
    """The shortest likeliest prefix whose weight reaches the share; at least one token."""
    need = int(_weights(keys).sum()) * share_q16
    count = 256
    while True:
        prefix = np.sort(_smallest(keys, count))
        sums = np.cumsum(_weights(prefix))
        if int(sums[-1]) << UNIT_BITS >= need or len(prefix) == len(keys):
            break
        count *= 8
    size = int(np.searchsorted(sums, -(-need >> UNIT_BITS), side="left")) + 1
    return prefix[:size]


def _choose(keys: Int, word: int) -> int:
    """The key at the word's share of the total weight, in the order of ids."""
    order = keys[np.argsort(keys & ((1 << ID_BITS) - 1))]
    sums = np.cumsum(_weights(order))
    point = word * int(sums[-1]) >> 64
    return int(order[np.searchsorted(sums, point, side="right")]) & ((1 << ID_BITS) - 1)
