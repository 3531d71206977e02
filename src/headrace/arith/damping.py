"""Damped greedy decoding: the definition, in NumPy integers (R17 of docs/arithmetic.md).

The likeliest candidates lose what repeats the generated history. A choice is a function of (logits, history,
parameters). Equal ones go to the larger logit, then to the lowest id; without damping it is the greedy choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import LOG2E_Q20

Int = NDArray[np.int64]
Logits = NDArray[np.int32] | NDArray[np.int64]

ALPHA_BITS = 15
MAX_ALPHA = 1 << 20  # and smaller
LOG_BITS = 16  # of distances and costs: log2 units
BLOCK = 2048  # tokens of the history that are looked at at once: temporary arrays have a fixed size


@dataclass(frozen=True)
class Damping:
    """alpha_q15: log2 units (Q15) that one unit of repetition costs. max_order: longest n-grams of the history that
    count; their first n - 1 tokens are what was generated last. top_k: candidates.

    Raises ValueError where a parameter is outside its bounds.
    """

    alpha_q15: int
    max_order: int
    top_k: int
    fraction_bits: int

    def __post_init__(self) -> None:
        _within("alpha_q15", self.alpha_q15, 0, MAX_ALPHA - 1)
        _within("max_order", self.max_order, 1, None)
        _within("top_k", self.top_k, 1, None)
        _within("fraction_bits", self.fraction_bits, 8, 24)


def _within(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} is {value}; it must be {bounds}")


def choose(
    logits: Logits,
    history: NDArray[np.int32],
    how: Damping,
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token that costs least, by logits [vocab] and the generated tokens.

    allowed: bool[vocab], what may be chosen, at least one; None: all.
    """
    ids = candidates(logits, how.top_k, allowed)
    values = logits[ids].astype(np.int64)
    below = (values[0] - values) * LOG2E_Q20 >> (how.fraction_bits + 20 - LOG_BITS)
    cost = below + (how.alpha_q15 * repetition(ids, history, how.max_order) >> ALPHA_BITS)
    return int(ids[cost.argmin()])


def candidates(logits: Logits, count: int, allowed: NDArray[np.bool_] | None) -> Int:
    """Ids of the `count` largest allowed logits, in order; equal ones by id."""
    ids = np.arange(len(logits)) if allowed is None else np.flatnonzero(allowed)
    values = logits if allowed is None else logits[ids]
    if count < len(ids):
        least = np.partition(values, len(ids) - count)[len(ids) - count]
        ids = ids[values >= least]
    order = np.argsort(-logits[ids].astype(np.int64), kind="stable")
    return ids[order[:count]]


def repetition(ids: Int, history: NDArray[np.int32], max_order: int) -> Int:
    """How far each token would repeat the history, Q16: share * log2(1 + count) of it among the followers."""
    order, total, count = 0, 0, np.zeros(len(ids), np.int64)
    for longer, found in _blocks(history, max_order):
        if longer > order:
            order, total = longer, 0
            count[:] = 0
        if longer == order:
            found.sort()
            total += len(found)
            count += found.searchsorted(ids, "right") - found.searchsorted(ids, "left")
    if not total:
        return count
    result: Int = count * log2_q16(1 + count) // total
    return result


def followers(history: NDArray[np.int32], max_order: int) -> NDArray[np.int32]:
    """What came each time after the last n - 1 tokens of the history, of the largest n <= max_order that came before.

    n = 1 is all of the history.
    """
    blocks = list(_blocks(history, max_order))
    order = max((n for n, _ in blocks), default=0)
    return np.concatenate([history[:0], *(found for n, found in blocks if n == order)])


def _blocks(history: NDArray[np.int32], max_order: int) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Of each block of the history, the largest n - 1 for which there are followers in it, and these (a copy)."""
    for begin in range(0, len(history), BLOCK):
        at = np.arange(begin, min(begin + BLOCK, len(history)))  # of the followers
        order = 0
        for back in range(1, min(max_order, len(history))):
            longer = at[at >= back]
            longer = longer[history[longer - back] == history[-back]]
            if not len(longer):
                break
            at, order = longer, back
        yield order, history[at]


def log2_q16(value: Int) -> Int:
    """floor of log2(value) * 2^16 for 1 <= value < 2^31, by 16 squarings of a Q30 mantissa that is cut each time."""
    whole = np.zeros_like(value)
    for bits in (16, 8, 4, 2, 1):
        whole += np.where(value >> whole >> bits, bits, 0)
    mantissa = (value << 30) >> whole
    out = whole
    for _ in range(LOG_BITS):
        mantissa = mantissa * mantissa >> 30
        carry = mantissa >> 31
        mantissa >>= carry
        out = (out << 1) + carry
    return out
