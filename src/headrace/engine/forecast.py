"""Fits the forecast of a mixture: how a layer's experts are guessed from the state one layer earlier.

The guess is the layer's own router on the state that the layer before it sees after its attention. What that misses is
linear in the state to a good part, so a low-rank correction of the router is fitted by ridge regression on states of
the model itself, its strength chosen on states that were kept back. Floats are fine here: a guess changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.packing import pack_router
from headrace.engine.engine import Engine
from headrace.kernels import program as p

Float = NDArray[np.float64]
Stored = tuple[NDArray[np.int16], NDArray[np.int32]]

KEPT_BACK = 0.25  # share of the states, the last ones
RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the mean of the squared states
RANKS = (8, 16, 32, 64)


@dataclass(frozen=True)
class LayerFit:
    """The forecast of one layer: its router, and the share of its experts that is guessed without and with it.

    rank 0: no correction helped, and `router` is the layer's own.
    """

    layer: int
    router: Stored
    rank: int
    plain: float
    fitted: float


def fit(engine: Engine, texts: Sequence[Sequence[int]]) -> Iterator[LayerFit]:
    """Fit on the states of token sequences, each no longer than the context; one layer after the other.

    The engine holds experts.
    """
    collected = _Collector(engine)
    assert engine.mixture is not None
    with engine.mixture.observed(collected):
        for tokens in texts:
            sequence = engine.new_sequence()
            try:
                engine.read(sequence, tokens)
            finally:
                sequence.release()
    for ahead, states, wanted in collected.samples():
        yield _fit_layer(ahead, states, wanted, engine.shape.top_k, engine.shape.num_experts)


class _Collector:
    """States before each guessed layer and the logits that it then computed."""

    def __init__(self, engine: Engine) -> None:
        self._fraction_bits = engine.fraction_bits
        self._aheads: dict[int, p.Ahead] = {}
        self._states: dict[int, list[NDArray[np.float32]]] = {}
        self._logits: dict[int, list[NDArray[np.float32]]] = {}

    def __call__(self, route: p.Route, residual: NDArray[np.int32]) -> None:
        x = np.ldexp(residual.astype(np.float64), -self._fraction_bits)
        if route.layer in self._aheads:
            logits = _normed(x, route.gain) @ _weights(route.router).T
            self._logits.setdefault(route.layer, []).append(logits.astype(np.float32))
        if route.ahead is not None:
            self._aheads[route.ahead.layer] = route.ahead
            state = _normed(x, route.ahead.gain).astype(np.float32)
            self._states.setdefault(route.ahead.layer, []).append(state)

    def samples(self) -> Iterator[tuple[p.Ahead, Float, Float]]:
        for layer, ahead in sorted(self._aheads.items()):
            states = np.concatenate(self._states.pop(layer)).astype(np.float64)
            yield ahead, states, np.concatenate(self._logits.pop(layer)).astype(np.float64)


def _normed(x: Float, gain: p.Gain) -> Float:
    mean = (x * x).mean(axis=1, keepdims=True) + gain.eps[0] * 2.0 ** gain.eps[1]
    normed: Float = x / np.sqrt(mean) * np.ldexp(gain.values.astype(np.float64), gain.exponent)
    return normed


def _weights(router: p.Router) -> Float:
    return np.ldexp(router.codes.astype(np.float64), router.exponents[:, None])


def _fit_layer(
    ahead: p.Ahead, states: Float, wanted: Float, top_k: int, num_experts: int
) -> LayerFit:
    own, wanted = _weights(ahead.router)[:num_experts], wanted[:, :num_experts]
    split = len(states) - max(1, round(len(states) * KEPT_BACK))
    seen, kept = states[:split], states[split:]
    best_rank, best_weights = 0, own
    plain = best = agreement(kept @ own.T, wanted[split:], top_k)
    values, vectors = np.linalg.eigh(seen.T @ seen)
    projected = vectors.T @ (seen.T @ (wanted[:split] - seen @ own.T))
    for ridge in RIDGES:
        correction = vectors @ (projected / (values + ridge * values.mean())[:, None])
        for rank, weights in _truncated(correction):
            share = agreement(kept @ (own + weights).T, wanted[split:], top_k)
            if share > best:
                best, best_rank, best_weights = share, rank, own + weights
    return LayerFit(ahead.layer, pack_router(best_weights), best_rank, plain, best)


def _truncated(correction: Float) -> Iterator[tuple[int, Float]]:
    """The correction [hidden, E] as rows [E, hidden] of growing rank."""
    left, sizes, right = np.linalg.svd(correction, full_matrices=False)
    for rank in sorted({min(r, len(sizes)) for r in RANKS}):
        yield rank, ((left[:, :rank] * sizes[:rank]) @ right[:rank]).T


def agreement(guess: Float, wanted: Float, top_k: int) -> float:
    """The share of the chosen experts that are guessed, over all rows: logits [rows, E] of both."""
    guessed, chosen = (np.argsort(-a, axis=1, kind="stable")[:, :top_k] for a in (guess, wanted))
    return float((guessed[:, :, None] == chosen[:, None, :]).any(axis=1).mean())
