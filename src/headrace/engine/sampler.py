"""Picks the tokens of a generation from integer logits, in integers alone (R11 of docs/arithmetic.md).

A pick is a function of (logits, history, parameters, seed, position). Penalties are applied here; the draw itself is
the backend's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.arith import philox
from headrace.arith.ops import shift_round
from headrace.arith.sampling import Draw
from headrace.engine.constraint import Choices
from headrace.engine.damped import Damped, DampedParams, check_greedy
from headrace.kernels.program import Backend
from headrace.values import UNIT, SamplingParams

Int = NDArray[np.int64]
Allowed = NDArray[np.bool_] | Choices  # bool[vocab]


def to_q16(value: float) -> int:
    """A parameter as a Q16 integer: the only place where a float becomes a number of the path."""
    return round(value * UNIT)


class Sampler:
    """The picker of one generation; remembers which tokens it has seen."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        fraction_bits: int,
        backend: Backend,
        damped: DampedParams | None = None,
    ) -> None:
        """damped: see `DampedParams`; of greedy decoding alone. Raises SettingError."""
        if damped is not None:
            check_greedy(params)
        self._damped = None if damped is None else Damped(damped, vocab_size, fraction_bits)
        self._backend = backend
        self._seed = seed
        self._how = None if params.greedy else _parameters(params, fraction_bits)
        self._presence = to_q16(params.presence_penalty) << fraction_bits >> 16
        self._repetition = to_q16(params.repetition_penalty)
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._generated = np.zeros(vocab_size, dtype=np.bool_)

    def observe(self, prompt: list[int]) -> None:
        """Tokens of the prompt: the repetition penalty counts them, the presence penalty does not."""
        self._seen[prompt] = True

    def note(self, token: int) -> None:
        """A generated token that was not picked becomes history."""
        self._seen[token] = self._generated[token] = True
        if self._damped is not None:
            self._damped.note(token)

    def pick(self, logits: NDArray[np.int32], position: int, allowed: Allowed | None = None) -> int:
        """The token for `position` from logits [vocab]; the pick becomes history.

        allowed: what may be picked, at least one; None: all. The others have no weight at all: filters
        and draw are those of a vocabulary that lacks them.
        """
        token = self._picked(self._penalise(logits), position, allowed)
        self.note(token)
        return token

    def _picked(
        self, logits: NDArray[np.int32] | Int, position: int, allowed: Allowed | None
    ) -> int:
        if self._damped is not None:
            return self._damped.pick(logits, None if allowed is None else np.asarray(allowed))
        if self._how is None:
            token = int(logits.argmax())
            if allowed is None or allowed[token]:  # the lowest of the likeliest of all
                return token
            ids = np.flatnonzero(np.asarray(allowed))
            return int(ids[logits[ids].argmax()])
        word = philox.philox((position, 0, 0, 0), (self._seed, 0))[0]
        if allowed is None:
            return self._backend.draw(logits, self._how, word)
        ids = np.flatnonzero(np.asarray(allowed))
        return int(ids[self._backend.draw(logits[ids], self._how, word)])

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


def _parameters(params: SamplingParams, fraction_bits: int) -> Draw:
    return Draw(
        inverse_temperature=max(1, round(UNIT / params.temperature)),
        top_k=params.top_k,
        top_p=to_q16(params.top_p),
        min_p=to_q16(params.min_p),
        fraction_bits=fraction_bits,
    )
