"""The float32 forward pass of a dense artifact with its dequantised weights, and of a PEFT adapter merged into it.

NumPy alone, so that it runs wherever the benchmark does; rotary angles are float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.adapter_places import MODULES
from headrace.artifact.container import Artifact
from headrace.artifact.peft import read_peft, values
from headrace.kernels.layout import unpack
from headrace.models.config import DecoderConfig, padded_rows
from headrace.models.decoder import packed_weight

Floats = NDArray[np.float32]


class FloatModel:
    """One dense model; `merge` adds an adapter to its weights."""

    def __init__(self, artifact: Artifact) -> None:
        self.config = DecoderConfig.from_json(artifact.manifest.config)
        assert self.config.experts is None, "dense models alone"
        self._artifact = artifact
        self._embed = self._dense("embed")
        self._head = self._embed if self.config.tied else self._dense("head")
        self._layers = [self._layer(i) for i in range(self.config.num_layers)]

    def merge(self, peft: Path) -> None:
        """W += scale * b @ a for every module of a PEFT folder."""
        adapter = read_peft(peft)
        for pair in adapter.pairs:
            a, b = (
                values(adapter.files[1], name, tensor)
                for name, tensor in ((pair.a_name, pair.a), (pair.b_name, pair.b))
            )
            self._layers[pair.layer][pair.module] += (pair.scale * (b @ a)).astype(np.float32)

    def weights(self, layer: int) -> dict[str, Floats]:
        """Of the modules of a layer, [n, k] each, by their short names."""
        return {module: self._layers[layer][module] for module in MODULES}

    def logits(self, tokens: list[int]) -> Floats:
        """After each token, [len, vocab]."""
        x = self._embed[tokens]
        cos, sin = self._rotary(len(tokens))
        for layer in self._layers:
            x = x + self._attention(layer, self._norm(x, layer["attention_norm"]), cos, sin)
            y = self._norm(x, layer["mlp_norm"])
            gate = y @ layer["gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["up"].T)) @ layer["down"].T
        out: Floats = self._norm(x, self._gain("norm")) @ self._head.T
        return out

    def _attention(self, layer: dict[str, Any], y: Floats, cos: Any, sin: Any) -> Floats:
        c, n = self.config, len(y)
        sizes = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        heads = {
            m: (y @ layer[m].T + layer[f"{m}.bias"]).reshape(n, size, c.head_dim)
            for m, size in sizes.items()
        }
        for m in "qk":
            if c.qk_norm:
                heads[m] = self._norm(heads[m], layer[f"{m}_norm"])
            left, right = np.split(heads[m], 2, axis=-1)
            turned = (left * cos - right * sin, right * cos + left * sin)
            heads[m] = np.concatenate(turned, axis=-1).astype(np.float32)
        shared = c.num_heads // c.num_kv_heads
        k, v = (np.repeat(heads[m], shared, axis=1) for m in "kv")
        scores = np.einsum("qhd,khd->hqk", heads["q"], k) / np.float32(np.sqrt(c.head_dim))
        scores[:, np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -np.inf
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        out: Floats = np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1) @ layer["o"].T
        return out

    def _norm(self, x: Floats, gain: Floats) -> Floats:
        mean = (x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True)
        return (x / np.sqrt(mean + float(self.config.norm_eps)) * gain).astype(np.float32)

    def _rotary(self, count: int) -> tuple[Any, Any]:
        frequencies = np.array([float(f) for f in self.config.frequencies()])
        angles = np.arange(count)[:, None, None] * frequencies
        return np.cos(angles), np.sin(angles)

    def _layer(self, i: int) -> dict[str, Any]:
        c, name = self.config, f"layers.{i}"
        cuts = np.cumsum([c.q_size, c.kv_size])
        out: dict[str, Any] = dict(
            zip("qkv", np.split(self._dense(f"{name}.qkv"), cuts), strict=True)
        )
        bias = np.zeros(c.q_size + 2 * c.kv_size, np.float32)
        if c.qkv_bias:
            stored = self._artifact.tensors[f"{name}.qkv.bias"]
            bias = (stored / 2.0**self._artifact.manifest.fraction_bits).astype(np.float32)
        parts = zip("qkv", np.split(bias, cuts), strict=True)
        out |= {f"{m}.bias": part for m, part in parts}
        if c.qk_norm:
            out |= {f"{m}_norm": self._gain(f"{name}.{m}_norm") for m in "qk"}
        both, rows = self._dense(f"{name}.gate_up"), padded_rows(c.ffn_size)
        out |= {"gate": both[: c.ffn_size], "up": both[rows : rows + c.ffn_size]}
        out |= {
            "o": self._dense(f"{name}.out"),
            "down": self._dense(f"{name}.down")[:, : c.ffn_size],
        }
        return out | {n: self._gain(f"{name}.{n}") for n in ("attention_norm", "mlp_norm")}

    def _dense(self, name: str) -> Floats:
        """A packed weight, in slices of tiles."""
        w = packed_weight(name, self._artifact.manifest.tensors, self._artifact.tensors)
        logical = unpack(w)
        groups = np.arange(w.k) // w.group
        out = np.empty((w.n, w.k), np.float32)
        for at in range(0, w.n, 4096):
            rows = slice(at, at + 4096)
            part = logical.scales[rows][:, groups] * logical.codes[rows]
            if logical.mins is not None:
                part += (logical.mins[rows] << logical.min_shift[rows, None])[:, groups]
            unit = np.ldexp(logical.mantissa[rows].astype(np.float64), logical.exponent[rows])
            out[rows] = part * unit[:, None]
        return out

    def _gain(self, name: str) -> Floats:
        exponent = int(self._artifact.tensors[f"{name}.gain_exponent"][0])
        gain: Floats = np.ldexp(
            self._artifact.tensors[f"{name}.gain"].astype(np.float64), exponent
        ).astype(np.float32)
        return gain
