"""Small random models, built without files: a program, and every expert's record in slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import rope_tables, sigmoid_table
from headrace.artifact.packing import pack, pack_gain, quantize_rows
from headrace.artifact.records import expert_layout
from headrace.kernels import program as p
from headrace.kernels.layout import field_view
from headrace.models.config import DecoderConfig, ExpertsConfig
from headrace.models.decoder import build_program

ROUTED = ExpertsConfig(num_experts=6, top_k=3, ffn_size=40, normalise=True)
CONFIG = DecoderConfig(
    vocab_size=64, hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    ffn_size=40, context=512, norm_eps="1e-5", rope_theta="10000", tied=True, experts=ROUTED,
)  # fmt: skip
SHARED = replace(ROUTED, normalise=False, shared_ffn_size=80, dense_layers=(0,))
VARIANTS = {
    "mixtral": CONFIG,
    "shared": replace(CONFIG, experts=SHARED, ffn_size=112),
    "whole norm": replace(CONFIG, qk_norm_whole=True),
    "one of many": replace(CONFIG, experts=replace(ROUTED, num_experts=40, top_k=1)),
    "all": replace(CONFIG, experts=replace(ROUTED, top_k=6)),
}


DENSE = replace(CONFIG, experts=None)


class Model:
    """A random model: its program and every expert's record in slots. gain: of all weights; a large one clips."""

    def __init__(self, config: DecoderConfig, bits: int = 4, seed: int = 3, gain: int = 1) -> None:
        self.config, self._bits, self._loud = config, bits, gain
        self._rng = np.random.default_rng(seed)
        self._formats: dict[str, dict[str, Any]] = {}
        self._tensors: dict[str, NDArray[Any]] = {}
        layouts = self._fill()
        low, high = rope_tables(config.frequencies(), config.context)
        self._tensors |= {"rope.low": low, "rope.high": high, "table.sigmoid": sigmoid_table()}
        self.program = build_program(config, self._formats, self._tensors, 16, layouts)
        self.layouts = layouts

    def slots(self, order: NDArray[np.int64] | None = None) -> p.ExpertSlots:
        """All experts in slots, in an order of one's own."""
        c, total = self.config, self.config.num_layers * self._num_experts
        nbytes = max(layout.nbytes for layout in self.layouts.values())
        raw = np.zeros(total * nbytes + 64, np.uint8)
        memory = raw[-raw.ctypes.data % 64 :][: total * nbytes].reshape(total, nbytes)
        table = np.full((c.num_layers, self._num_experts), -1, np.int32)
        order = np.arange(total) if order is None else order
        for layer in self.layouts:
            for e in range(self._num_experts):
                slot = int(order[layer * self._num_experts + e])
                table[layer, e] = slot
                self.write(memory[slot], layer, e)
        return p.ExpertSlots(
            memory, table, np.full(total, p.READY, np.uint8), np.zeros(total, np.uint8)
        )

    def write(self, record: NDArray[np.uint8], layer: int, expert: int) -> None:
        rng = np.random.default_rng((layer, expert, 9))
        layout = self.layouts[layer]
        for spans in (layout.gate_up, layout.down):
            rows = pack(quantize_rows(self._normal(spans.n, spans.k, rng), spans.bits, spans.group))
            for name, span in spans.fields.items():
                field_view(record, span)[:] = getattr(rows, name)

    @property
    def _num_experts(self) -> int:
        assert self.config.experts
        return self.config.experts.num_experts

    def _normal(self, n: int, k: int, rng: np.random.Generator) -> NDArray[np.float64]:
        return rng.normal(size=(n, k)) * 3 * self._loud / np.sqrt(k)

    def _weight(self, name: str, n: int, k: int) -> None:
        more = 32 if self._loud > 1 and name == "embed" else 1
        packed = pack(quantize_rows(self._normal(n, k, self._rng) * more, self._bits, 32))
        for field in ("codes", "scales", "mins", "row"):
            self._tensors[f"{name}.{field}"] = getattr(packed, field)
        self._formats[name] = self._entry(n, k)

    def _entry(self, n: int, k: int) -> dict[str, Any]:
        return {"format": "q4m" if self._bits == 4 else "q8", "shape": [n, k], "group": 32}

    def _gain(self, name: str, size: int) -> None:
        heads = 4 * self._loud if self._loud > 1 and name.endswith(("q_norm", "k_norm")) else 1
        gain, exponent = pack_gain((1 + 0.2 * self._rng.normal(size=size)) * heads)
        self._tensors[f"{name}.gain"] = gain
        self._tensors[f"{name}.gain_exponent"] = np.array([exponent], np.int32)

    def _fill(self) -> dict[int, p.ExpertLayout]:
        c, layouts = self.config, {}
        self._weight("embed", c.vocab_size, c.hidden_size)
        self._gain("norm", c.hidden_size)
        for layer in range(c.num_layers):
            at = f"layers.{layer}"
            self._weight(f"{at}.qkv", c.q_size + 2 * c.kv_size, c.hidden_size)
            self._weight(f"{at}.out", c.hidden_size, c.q_size)
            for name, size in (("attention_norm", c.hidden_size), ("mlp_norm", c.hidden_size)):
                self._gain(f"{at}.{name}", size)
            if c.qk_norm_whole:
                self._gain(f"{at}.q_norm", c.q_size)
                self._gain(f"{at}.k_norm", c.kv_size)
            if c.has_experts(layer):
                layouts[layer] = self._experts(at)
            else:
                self._weight(f"{at}.gate_up", 2 * c.ffn_rows, c.hidden_size)
                self._weight(f"{at}.down", c.hidden_size, c.ffn_width)
        return layouts

    def _experts(self, at: str) -> p.ExpertLayout:
        c, experts = self.config, self.config.experts
        assert experts
        shared = experts.shared_ffn_size
        rows = experts.num_experts + (shared > 0)
        codes = self._rng.integers(-32767, 32768, (rows, c.hidden_size))
        self._tensors[f"{at}.router.codes"] = codes.astype(np.int16)
        self._tensors[f"{at}.router.exponents"] = np.full(
            rows, -17 + (20 if self._loud > 1 else 0), np.int32
        )
        if shared:
            self._weight(f"{at}.shared.gate_up", 2 * shared, c.hidden_size)
            self._weight(f"{at}.shared.down", c.hidden_size, -(-shared // 32) * 32)
        gate_up = self._entry(2 * experts.ffn_rows, c.hidden_size)
        return expert_layout(gate_up, self._entry(c.hidden_size, experts.ffn_width))


def batch(rows: int, start: int = 0) -> p.Batch:
    positions = np.arange(start, start + rows, dtype=np.int32)
    return p.Batch(
        tokens=(positions * 7 % 64).astype(np.int32),
        positions=positions,
        sequences=np.zeros(rows, np.int32),
        page_tables=(np.arange(8, dtype=np.int32),),
        logit_rows=np.arange(rows, dtype=np.int32),
    )
