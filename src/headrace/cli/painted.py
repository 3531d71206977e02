"""Small models painted by formulas of period 251, for checking kernels against the definition.

Nothing is random and nothing is read: every machine paints the same weights. Sizes lie at the edges of
tiles, blocks and groups, and one beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import localcontext
from functools import partial
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
from headrace.artifact.records import expert_layout, record_fields
from headrace.kernels.program import PAGE_TOKENS, Backend, Batch, ExpertLayout, Program, Runner
from headrace.models.config import DecoderConfig, ExpertsConfig, padded_rows, padded_width
from headrace.models.decoder import build_program

PERIOD = 251
VOCAB = 259
CONTEXT = 300
LOUDER = 5  # powers of two


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


_ROUTED = ExpertsConfig(num_experts=9, top_k=3, ffn_size=40, normalise=True)
_SHARED = ExpertsConfig(8, 2, 48, normalise=False, shared_ffn_size=72, dense_layers=(0,))
MIXTURES = (
    Case("mixture, q4m", _config(hidden_size=96, head_dim=32, experts=_ROUTED), "q4m", 32),
    Case(
        "mixture, q8, shared expert",
        _config(hidden_size=64, num_heads=2, num_layers=3, ffn_size=80, experts=_SHARED),
        "q8",
        32,
    ),
)


@dataclass(frozen=True, eq=False)
class Painted:
    """A painted model: its program, and the records u8[E, nbytes] of every layer that has experts."""

    program: Program
    layouts: Mapping[int, ExpertLayout]
    records: Mapping[int, NDArray[np.uint8]]


def paint(case: Case) -> Painted:
    """A painted model."""
    painter = _Painter(case)
    tensors = painter.tensors()
    layouts = painter.layouts
    program = build_program(case.config, painter.formats, tensors, FRACTION_BITS, layouts)
    return Painted(program, layouts, painter.records)


class _Painter:
    def __init__(self, case: Case) -> None:
        self._case = case
        self._seed = 1
        self.formats: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, NDArray[Any]] = {}
        self.layouts: dict[int, ExpertLayout] = {}
        self.records: dict[int, NDArray[np.uint8]] = {}

    def tensors(self) -> Mapping[str, NDArray[Any]]:
        c = self._case.config
        self._weight("embed", c.vocab_size, c.hidden_size)
        if not c.tied:
            self._weight("head", c.vocab_size, c.hidden_size)
        self._gain("norm", c.hidden_size)
        for layer in range(c.num_layers):
            self._attention(f"layers.{layer}")
            if c.experts and c.has_experts(layer):
                self._experts(layer, c.experts)
            else:
                self._mlp(f"layers.{layer}", c.ffn_rows, c.ffn_width)
        with localcontext() as context:
            context.prec = 60
            low, high = rope_tables(c.frequencies(), c.context)
        return {
            **self._tensors, "rope.low": low, "rope.high": high, "table.sigmoid": sigmoid_table(),
        }  # fmt: skip

    def _attention(self, to: str) -> None:
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

    def _mlp(self, to: str, rows: int, width: int) -> None:
        hidden = self._case.config.hidden_size
        self._weight(f"{to}.gate_up", 2 * rows, hidden)
        self._weight(f"{to}.down", hidden, width)

    def _experts(self, layer: int, experts: ExpertsConfig) -> None:
        hidden, to = self._case.config.hidden_size, f"layers.{layer}"
        shared = experts.shared_ffn_size
        rows = experts.num_experts + (shared > 0)
        # The period leaves every row of a router a multiple of the same wave: its begin tells rows apart.
        codes = [self._wave((hidden,), -30_000, 30_000) for _ in range(rows)]
        self._tensors[f"{to}.router.codes"] = np.stack(codes).astype(np.int16)
        self._tensors[f"{to}.router.exponents"] = (self._wave((rows,), 0, 1) - 17).astype(np.int32)
        if shared:
            self._mlp(f"{to}.shared", padded_rows(shared), padded_width(shared))
        gate_up = self._entry(2 * experts.ffn_rows, hidden)
        layout = expert_layout(gate_up, self._entry(hidden, experts.ffn_width))
        self.layouts[layer] = layout
        self.records[layer] = np.zeros((experts.num_experts, layout.nbytes), np.uint8)
        for record in self.records[layer]:
            fields = dict(record_fields(record, layout))
            for weight, spans in (("gate_up", layout.gate_up), ("down", layout.down)):
                for field, array in self._packed(spans.n, spans.k).items():
                    fields[f"{weight}.{field}"][:] = array
            # A step of any weight is to be heard in the logits, though one of several experts has it.
            fields["down.row"][1] += LOUDER

    def _entry(self, n: int, k: int) -> dict[str, Any]:
        return {"format": self._case.format, "shape": [n, k], "group": self._case.group}

    def _weight(self, name: str, n: int, k: int) -> None:
        k = -(-k // self._case.group) * self._case.group if name == "embed" else k
        self.formats[name] = self._entry(n, k)
        self._tensors |= {f"{name}.{field}": a for field, a in self._packed(n, k).items()}

    def _packed(self, n: int, k: int) -> dict[str, NDArray[Any]]:
        """The arrays of a packed weight."""
        bits, tiles, groups = int(self._case.format[1]), -(-n // TILE), -(-k // self._case.group)
        out: dict[str, NDArray[Any]] = {
            "codes": self._wave((tiles, k // BLOCK, bits, TILE, 4), 0, 255).astype(np.uint8),
            "scales": self._wave((tiles, groups, TILE), -700, 900).astype(np.int16),
        }
        if self._case.format.endswith("m"):
            shape = (tiles, -(-groups // SUPERGROUP), TILE, SUPERGROUP)
            out["mins"] = self._mins(shape, groups)
        out["row"] = self._rows(tiles * TILE, bits)
        return out

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


Passes = tuple[tuple[int, int], ...]  # rows of two sequences side by side
Run = Callable[[Batch, NDArray[np.uint8]], object]  # one pass over a cache

PASSES: Passes = ((66, 5), (1, 13), (1, 0))  # a long and a short one, then one row


def outcome(
    program: Program,
    backend: Backend,
    passes: Passes = PASSES,
    bind: Callable[[Runner], Run] | None = None,
) -> Outcome:
    """What a backend computes in these passes; without `bind` a pass is one run of the program."""
    runner = backend.compile(program, capacity=128, logit_capacity=128)
    cache = _aligned(8, program.shape.page_bytes)
    logits: list[bytes] = []
    starts = [0, 0]
    try:
        run = partial(runner.run, 0, len(program.ops)) if bind is None else bind(runner)
        for counts in passes:
            batch = _batch(starts, counts)
            run(batch, cache)
            logits.append(runner.logits(len(batch.logit_rows)).tobytes())
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
        clipped = tuple(sorted(runner.saturations().items()))
    finally:
        runner.close()
    return Outcome(b"".join(logits), cache.tobytes(), clipped)


def _batch(starts: list[int], rows: tuple[int, int]) -> Batch:
    counts = [(s, n) for s, n in enumerate(rows) if n]
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
