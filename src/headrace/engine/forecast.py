"""Fits the forecast of a mixture: how a layer's experts are guessed from the state one layer earlier.

The guess is the layer's own router on the state that the layer before it sees after its attention. What that misses is
linear in the state to a good part, so a low-rank correction of the router is fitted by ridge regression on states of
the model itself, its strength chosen on states that were kept back. No state is kept: what regression needs are sums of
products, and the states that are kept back come last. Floats are fine here: a guess changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.packing import pack_router
from headrace.engine.engine import DEFAULT_CHUNK, Engine
from headrace.kernels import program as p
from headrace.models.config import DecoderConfig

Float = NDArray[np.float64]
Stored = tuple[NDArray[np.int16], NDArray[np.int32]]
Factors = tuple[NDArray[np.float32], NDArray[np.float32]]  # [hidden, r] and [r, E]

KEPT_BACK = 0.25  # share of the states, the last ones
RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0)  # of the mean of the squared states
RANKS = (8, 16, 32, 64)
_ROWS = 64  # states at once
_COLUMNS = 256  # of a sum of products at once


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


def guessed_layers(config: DecoderConfig) -> list[int]:
    """The layers that are guessed for: those with experts but the first."""
    return [i for i in range(config.num_layers) if config.has_experts(i)][1:]


def fit_bytes(config: DecoderConfig, layers_at_once: int) -> int:
    """What `fit` takes beside the engine, in bytes."""
    hidden, experts = config.hidden_size, config.experts.num_experts if config.experts else 0
    router = hidden * experts
    factors = 4 * len(RIDGES) * RANKS[-1] * (hidden + experts)
    a_layer = 4 * hidden * hidden + 8 * router + factors
    solving = 8 * (2 * hidden * hidden + 8 * router + 8 * experts * experts)
    rows = 3 * 4 * DEFAULT_CHUNK * hidden + 8 * hidden * (8 * _ROWS + 2 * _COLUMNS) + 4 * 8 * router
    done = len(guessed_layers(config)) * 2 * router
    return layers_at_once * a_layer + solving + rows + done


def fit(
    engine: Engine, texts: Sequence[Sequence[int]], *, layers_at_once: int | None = None
) -> Iterator[LayerFit]:
    """Fit on the states of token sequences, each no longer than the context; one layer after the other.

    layers_at_once: how many are fitted while the texts are read once; they are read again for the next ones, and the
    memory is that of `fit_bytes`. None: all. The engine holds experts, and guesses with the layers' own routers.
    """
    mixture, layers = engine.mixture, guessed_layers(engine.config)
    assert mixture is not None
    step = max(1, min(layers_at_once or len(layers), len(layers)))
    hidden, num_experts = engine.shape.hidden, engine.shape.num_experts
    squares = np.empty((step, hidden, hidden), np.float32)
    products = np.empty((step, hidden, num_experts))
    count = sum(map(len, texts))
    seen = count - max(1, round(count * KEPT_BACK))
    for begin in range(0, len(layers), step):
        fits = {
            layer: _Fitting(layer, squares[i], products[i], seen, engine.shape.top_k)
            for i, layer in enumerate(layers[begin : begin + step])
        }
        with mixture.observed(_Observer(fits, engine.fraction_bits)):
            _read(engine, texts)
        for fitting in fits.values():
            yield fitting.result()


def _read(engine: Engine, texts: Sequence[Sequence[int]]) -> None:
    for tokens in texts:
        sequence = engine.new_sequence()
        try:
            engine.read(sequence, tokens)
        finally:
            sequence.release()


class _Observer:
    """Gives each layer the states before it, and the logits that it then computed."""

    def __init__(self, fits: dict[int, _Fitting], fraction_bits: int) -> None:
        self._fits = fits
        self._fraction_bits = fraction_bits
        self._before: tuple[p.Ahead, NDArray[np.int32]] | None = None  # from the layer before

    def __call__(self, route: p.Route, residual: NDArray[np.int32]) -> None:
        fitting = self._fits.get(route.layer)
        if fitting is not None and self._before is not None:
            ahead, earlier = self._before
            fitting.own = _weights(ahead.router)[: fitting.num_experts]
            router = _weights(route.router)[: fitting.num_experts]
            for at in range(0, len(residual), _ROWS):
                states = self._state(earlier[at : at + _ROWS], ahead.gain)
                fitting.add(states, self._state(residual[at : at + _ROWS], route.gain) @ router.T)
        wanted = route.ahead is not None and route.ahead.layer in self._fits
        self._before = (route.ahead, residual.copy()) if wanted and route.ahead else None

    def _state(self, residual: NDArray[np.int32], gain: p.Gain) -> Float:
        return _normed(np.ldexp(residual.astype(np.float64), -self._fraction_bits), gain)


class _Fitting:
    """One layer while it is fitted: sums over the states that are fitted on, then hits over those kept back.

    squares f32[hidden, hidden] and products f64[hidden, E] are the caller's memory; the smallest ridge is far
    above what rounds off in squares.
    """

    def __init__(
        self,
        layer: int,
        squares: NDArray[np.float32],
        products: Float,
        num_seen: int,
        top_k: int,
    ) -> None:
        self.own: Float = np.zeros((products.shape[1], products.shape[0]))  # router [E, hidden]
        self._layer = layer
        self._squares, self._products = squares, products
        squares[:] = 0
        products[:] = 0
        self._left = num_seen
        self._top_k = top_k
        self._factors: list[Factors] | None = None  # of a correction, by ridge
        self._plain = self._judged = 0
        self._hits: dict[tuple[int, int], int] = {}  # by ridge's index and rank, in the order tried

    @property
    def num_experts(self) -> int:
        return int(self._products.shape[1])

    def add(self, states: Float, wanted: Float) -> None:
        """states [rows, hidden] before the layer, wanted [rows, E]: the logits that it computed."""
        seen = min(self._left, len(states))
        self._left -= seen
        if seen:
            self._sum(states[:seen], wanted[:seen])
        if seen < len(states):
            if self._factors is None:
                self._factors = self._solved()
            self._judge(states[seen:], wanted[seen:], self._factors)

    def result(self) -> LayerFit:
        rank, weights, best = 0, self.own, self._plain
        for (index, tried), hits in self._hits.items():
            if hits > best and self._factors is not None:
                left, right = self._factors[index]
                best, rank = hits, tried
                weights = self.own + (left[:, :tried].astype(np.float64) @ right[:tried]).T
        total = max(1, self._judged * self._top_k)
        return LayerFit(self._layer, pack_router(weights), rank, self._plain / total, best / total)

    def _sum(self, states: Float, wanted: Float) -> None:
        for begin in range(0, states.shape[1], _COLUMNS):  # the rest mirrors it
            columns = slice(begin, begin + _COLUMNS)
            until = slice(0, begin + _COLUMNS)
            self._squares[until, columns] += states[:, until].T @ states[:, columns]
        self._products += states.T @ (wanted - states @ self.own.T)

    def _solved(self) -> list[Factors]:
        squares, out = self._squares.astype(np.float64), []
        for begin in range(0, len(squares), _COLUMNS):
            end = begin + _COLUMNS
            squares[end:, begin:end] = squares[begin:end, end:].T
        diagonal = squares.diagonal().copy()
        if not diagonal.any():
            return []
        for ridge in RIDGES:
            np.fill_diagonal(squares, diagonal + ridge * diagonal.mean())
            left, sizes, right = np.linalg.svd(
                np.linalg.solve(squares, self._products), full_matrices=False
            )
            most = RANKS[-1]
            out.append(
                (
                    (left[:, :most] * sizes[:most]).astype(np.float32),
                    right[:most].astype(np.float32),
                )
            )
        return out

    def _judge(self, states: Float, wanted: Float, factors: list[Factors]) -> None:
        chosen = _largest(wanted, self._top_k)
        guess = states @ self.own.T
        self._plain += _hits(guess, chosen)
        self._judged += len(states)
        for index, (left, right) in enumerate(factors):
            parts = states @ left
            for rank in sorted({min(r, len(right)) for r in RANKS}):
                hits = _hits(guess + parts[:, :rank] @ right[:rank], chosen)
                self._hits[index, rank] = self._hits.get((index, rank), 0) + hits


def _normed(x: Float, gain: p.Gain) -> Float:
    mean = (x * x).mean(axis=1, keepdims=True) + gain.eps[0] * 2.0 ** gain.eps[1]
    normed: Float = x / np.sqrt(mean) * np.ldexp(gain.values.astype(np.float64), gain.exponent)
    return normed


def _weights(router: p.Router) -> Float:
    return np.ldexp(router.codes.astype(np.float64), router.exponents[:, None])


def _largest(logits: Float, top_k: int) -> NDArray[np.intp]:
    """Indices of the largest of every row, [rows, top_k]; of equal ones the first."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :top_k]


def _hits(guess: Float, chosen: NDArray[np.intp]) -> int:
    guessed = _largest(guess, chosen.shape[1])
    return int((guessed[:, :, None] == chosen[:, None, :]).any(axis=1).sum())


def agreement(guess: Float, wanted: Float, top_k: int) -> float:
    """The share of the chosen experts that are guessed, over all rows: logits [rows, E] of both."""
    return _hits(guess, _largest(wanted, top_k)) / (len(wanted) * top_k)
