"""Picks a token from integer logits, in integers alone (R11 of docs/arithmetic.md).

A pick is a function of (logits, history, parameters, seed, position). Ties go to the lowest id.
Order: repetition and presence penalty, temperature, top-k, top-p, min-p, draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.arith import philox
from headrace.arith.numbers import LOG2E_Q20
from headrace.arith.ops import exp2_negative_q30, shift_round
from headrace.values import UNIT, SamplingParams

Int = NDArray[np.int64]

_ID_BITS = 20  # a vocabulary is at most 2^20 (models/config.py)
_ID_MASK = (1 << _ID_BITS) - 1
_SPAN = 31 << 16  # a weight this far below the largest (log2, Q16) is zero


def to_q16(value: float) -> int:
    """A parameter as a Q16 integer: the only place where a float becomes a number of the path."""
    return round(value * UNIT)


class Sampler:
    """The picker of one generation; remembers which tokens it has seen."""

    def __init__(
        self, params: SamplingParams, seed: int, vocab_size: int, fraction_bits: int
    ) -> None:
        self._params = params
        self._seed = seed
        self._inverse_temperature = 0 if params.greedy else max(1, round(UNIT / params.temperature))
        self._presence = to_q16(params.presence_penalty) << fraction_bits >> 16
        self._repetition = to_q16(params.repetition_penalty)
        self._fraction_bits = fraction_bits
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._generated = np.zeros(vocab_size, dtype=np.bool_)

    def observe(self, prompt: list[int]) -> None:
        """Tokens of the prompt: the repetition penalty counts them, the presence penalty does not."""
        self._seen[prompt] = True

    def pick(self, logits: NDArray[np.int32], position: int) -> int:
        """The token for `position` from logits [vocab]; the pick becomes history."""
        adjusted = self._penalise(logits)
        token = int(adjusted.argmax()) if self._params.greedy else self._draw(adjusted, position)
        self._seen[token] = self._generated[token] = True
        return token

    def _penalise(self, logits: NDArray[np.int32]) -> NDArray[np.int32] | Int:
        if self._repetition == UNIT and self._presence == 0:
            return logits
        out = logits.astype(np.int64)
        if self._repetition != UNIT:
            seen = out[self._seen]
            less = (seen * UNIT + self._repetition // 2) // self._repetition
            out[self._seen] = np.where(seen > 0, less, shift_round(seen * self._repetition, 16))
        out[self._generated] -= self._presence
        return out

    def _draw(self, logits: NDArray[np.int32] | Int, position: int) -> int:
        keys = self._keys(logits)
        if self._params.top_k:
            keys = _smallest(keys, self._params.top_k)
        if self._params.top_p < 1.0:
            keys = _top_p(keys, to_q16(self._params.top_p))
        if self._params.min_p > 0.0:
            keys = keys[_weights(keys) * UNIT >= to_q16(self._params.min_p) << 30]
        return _choose(keys, self._seed, position)

    def _keys(self, logits: NDArray[np.int32] | Int) -> Int:
        """(distance below the largest, id) in one integer for every token of non-zero weight."""
        peak = int(logits.max())
        span = _SPAN << (20 + self._fraction_bits)
        reach = span // (LOG2E_Q20 * self._inverse_temperature) + 1
        ids = np.flatnonzero(logits >= peak - reach)
        below = (peak - logits[ids].astype(np.int64)) * self._inverse_temperature
        delta = (below >> self._fraction_bits) * LOG2E_Q20 >> 20
        keep = delta < _SPAN
        return (delta[keep] << _ID_BITS) | ids[keep]


def _weights(keys: Int) -> Int:
    """Integer probabilities, Q30, unnormalised."""
    return exp2_negative_q30(keys >> _ID_BITS)


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
        if int(sums[-1]) * UNIT >= need or len(prefix) == len(keys):
            break
        count *= 8
    size = int(np.searchsorted(sums, -(-need // UNIT), side="left")) + 1
    return prefix[:size]


def _choose(keys: Int, seed: int, position: int) -> int:
    """Draw one key by weight, in the order of ids."""
    order = keys[np.argsort(keys & _ID_MASK)]
    sums = np.cumsum(_weights(order))
    point = philox.draw(seed, position, int(sums[-1]))
    return int(order[np.searchsorted(sums, point, side="right")]) & _ID_MASK
