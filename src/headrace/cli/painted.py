"""Small models painted by formulas of period 251, for checking kernels against the definition.

Nothing is random and nothing is read: every machine paints the same weights. Sizes lie at the edges of
tiles, blocks and groups, and one beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import localcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import (
    BLOCK,
    FRACTION_BITS,
    SUPERGROUP,
    TILE,
    rope_tables,
    sigmoid_table,
)
from headrace.kernels.program import PAGE_TOKENS, Backend, Batch, Program
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program

PERIOD = 251
VOCAB = 259
CONTEXT = 300


@dataclass(frozen=True)
class Case:
    """A painted model: its name, configuration, and weight format."""

    name: str
    config: DecoderConfig
    format: str
    group: int


def _config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 32, "ffn_size": 200, "context": CONTEXT, "norm_eps": "1e-5",
        "rope_theta": "10000", "tied": True,
    }  # fmt: skip
    return DecoderConfig(**{**sizes, **changes})


CASES = (
    Case("q4", _config(), "q4", 32),
    Case("q4m", _config(tied=False, head_dim=64), "q4m", 32),
    Case("q8 group 64, bias", _config(qkv_bias=True, ffn_size=192), "q8", 64),
    Case("q8m, qk norm", _config(qk_norm=True, num_kv_heads=4, hidden_size=160), "q8m", 32),
    Case("q4m group 64", _config(num_kv_heads=1, ffn_size=256), "q4m", 64),
)


def program(case: Case) -> Program:
    """The program of a painted model."""
    painter = _Painter(case)
    return build_program(case.config, painter.formats, painter.tensors(), FRACTION_BITS)


class _Painter:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._seed = 1
        self.formats: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, NDArray[Any]] = {}

    def tensors(self) -> Mapping[str, NDArray[Any]]:
        c = self._case.config
        self._weight("embed", c.vocab_size, c.hidden_size)
        if not c.tied:
            self._weight("head", c.vocab_size, c.hidden_size)
        self._gain("norm", c.hidden_size)
        for layer in range(c.num_layers):
            self._layer(f"layers.{layer}")
        with localcontext() as context:
            context.prec = 60
            low, high = rope_tables(c.frequencies(), c.context)
        return {
            **self._tensors, "rope.low": low, "rope.high": high, "table.sigmoid": sigmoid_table(),
        }  # fmt: skip

    def _layer(self, to: str) -> None:
        c = self._case.config
        size = c.q_size + 2 * c.kv_size
        self._gain(f"{to}.attention_norm", c.hidden_size)
        self._weight(f"{to}.qkv", size, c.hidden_size)
        if c.qkv_bias:
            self._tensors[f"{to}.qkv.bias"] = self._wave((size,), -50_000, 50_000).astype(np.int32)
        if c.qk_norm:
            self._gain(f"{to}.q_norm", c.head_dim)
            self._gain(f"{to}.k_norm", c.head_dim)
        self._weight(f"{to}.out", c.hidden_size, c.q_size)
        self._gain(f"{to}.mlp_norm", c.hidden_size)
        self._weight(f"{to}.gate_up", 2 * c.ffn_rows, c.hidden_size)
        self._weight(f"{to}.down", c.hidden_size, c.ffn_width)

    def _weight(self, name: str, n: int, k: int) -> None:
        case, bits = self._case, int(self._case.format[1])
        tiles, groups = -(-n // TILE), -(-k // case.group)
        k = groups * case.group if name == "embed" else k
        self.formats[name] = {"format": case.format, "shape": [n, k], "group": case.group}
        put = self._tensors
        put[f"{name}.codes"] = self._wave((tiles, k // BLOCK, bits, TILE, 4), 0, 255).astype(
            np.uint8
        )
        put[f"{name}.scales"] = self._wave((tiles, groups, TILE), -700, 900).astype(np.int16)
        if case.format.endswith("m"):
            shape = (tiles, -(-groups // SUPERGROUP), TILE, SUPERGROUP)
            put[f"{name}.mins"] = self._mins(shape, groups)
        put[f"{name}.row"] = self._rows(tiles * TILE, bits)

    def _mins(self, shape: tuple[int, ...], groups: int) -> NDArray[np.int16]:
        mins = self._wave(shape, -9000, 9000).astype(np.int16)
        used = np.arange(shape[1] * SUPERGROUP).reshape(shape[1], 1, SUPERGROUP) < groups
        return np.where(used, mins, 0).astype(np.int16)

    def _rows(self, count: int, bits: int) -> NDArray[np.int32]:
        shift = (
            self._wave((count,), 0, 2)
            if self._case.format.endswith("m")
            else np.zeros(count, np.int64)
        )
        exponent = self._wave((count,), -3, 0) - (29 if bits == 4 else 33)
        mantissa = self._wave((count,), 1 << 14, (1 << 15) - 1)
        return np.stack([mantissa, exponent, shift]).astype(np.int32)

    def _gain(self, name: str, size: int) -> None:
        self._tensors[f"{name}.gain"] = self._wave((size,), -(1 << 21), (1 << 23) - 1).astype(
            np.int32
        )
        self._tensors[f"{name}.gain_exponent"] = np.array([-23], np.int32)

    def _wave(self, shape: tuple[int, ...], low: int, high: int) -> NDArray[np.int64]:
        """Integers within [low, high] by formula; each array starts elsewhere in the period."""
        self._seed += 1
        count = int(np.prod(shape))
        steps = (np.arange(count, dtype=np.int64) * 97 + self._seed * 31) % PERIOD
        return (low + steps * (high - low) // (PERIOD - 1)).reshape(shape)


@dataclass(frozen=True)
class Outcome:
    """What a backend computed: all logits and cache bytes of a few passes, and what was clipped."""

    logits: bytes
    cache: bytes
    clipped: tuple[tuple[str, int], ...]

    @property
    def parts(self) -> tuple[bytes, ...]:
        return self.logits, self.cache, repr(self.clipped).encode()


def outcome(painted: Program, backend: Backend) -> Outcome:
    """Two sequences side by side, read in a long and a short pass, then one row."""
    runner = backend.compile(painted, capacity=128, logit_capacity=128)
    cache = _aligned(8, painted.shape.page_bytes)
    logits: list[bytes] = []
    try:
        for first, second in ((66, 5), (1, 13), (1, 0)):
            batch = _batch(logits, first, second)
            runner.run(0, len(painted.ops), batch, cache)
            logits.append(runner.logits(len(batch.logit_rows)).tobytes())
        clipped = tuple(sorted(runner.saturations().items()))
    finally:
        runner.close()
    return Outcome(b"".join(logits), cache.tobytes(), clipped)


_STARTS = ((0, 0), (66, 5), (67, 18))  # where each pass begins in each sequence


def _batch(passes: list[bytes], first: int, second: int) -> Batch:
    starts = _STARTS[len(passes)]
    counts = [(s, n) for s, n in enumerate((first, second)) if n]
    positions = np.concatenate([np.arange(starts[s], starts[s] + n) for s, n in counts])
    sequences = np.concatenate([np.full(n, s) for s, n in counts])
    tokens = (positions * 193 + sequences * 61 + 7) % PERIOD
    pages = tuple(np.array(p, np.int32) for p in ([5, 0, 3], [1, 6, 2]))
    wanted = np.arange(len(tokens), dtype=np.int32)
    tokens, positions, sequences = (a.astype(np.int32) for a in (tokens, positions, sequences))
    return Batch(tokens, positions, sequences, pages, wanted)


def _aligned(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    raw = np.zeros(rows * row_bytes + PAGE_TOKENS, np.uint8)
    start = -raw.ctypes.data % PAGE_TOKENS
    return raw[start : start + rows * row_bytes].reshape(rows, row_bytes)
