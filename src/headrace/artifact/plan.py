"""Which tensor of a source becomes what of an artifact: a plan of parts, nothing is read but small arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import localcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import FRACTION_BITS, rope_tables, sigmoid_table
from headrace.artifact.naming import MTP, ExpertNames
from headrace.artifact.packing import pack_bias, pack_gain, pack_router
from headrace.artifact.parts import Part, band, columns, in_layout, joined, padded, permuted, widest
from headrace.artifact.sources import ConvertOptions, Source
from headrace.errors import FileError, InputError
from headrace.models.config import ExpertsConfig, padded_rows
from headrace.models.families import family

Entry = dict[str, Any]


@dataclass(frozen=True, eq=False)
class LayerExperts:
    """The experts of a layer, all in one layout a weight: gate over up, and down."""

    gate_up: list[Part]
    down: list[Part]

    @property
    def rows(self) -> int:
        return sum(part.n for part in (*self.gate_up, *self.down))


@dataclass(frozen=True, eq=False)
class Plan:
    """What an artifact will hold: packed weights, small arrays that are ready, experts by layer."""

    weights: dict[str, Part]
    arrays: dict[str, NDArray[Any]]
    experts: dict[int, LayerExperts]

    def entries(self) -> dict[str, Entry]:
        """What the manifest says of every packed weight; of one expert for all of its layer."""
        one = {name: _entry(part) for name, part in self.weights.items()}
        for layer, experts in self.experts.items():
            one[f"layers.{layer}.experts.gate_up"] = _entry(experts.gate_up[0])
            one[f"layers.{layer}.experts.down"] = _entry(experts.down[0])
        return one

    @property
    def rows(self) -> int:
        dense = sum(part.n for part in self.weights.values())
        return dense + sum(experts.rows for experts in self.experts.values())


def _entry(part: Part) -> Entry:
    return {"format": part.layout.format, "shape": [part.n, part.k], "group": part.layout.group}


def make_plan(source: Source, options: ConvertOptions) -> Plan:
    """Which source tensor goes where. Raises FileError, InputError for what is left over or missing."""
    family(source.family).check(source.config)
    return _Planner(source, options).plan()


def make_head_plan(source: Source, options: ConvertOptions) -> Plan | None:
    """The same for the head that drafts, as a decoder of one layer; None without one. See `read_head`.

    Raises FileError, InputError for one that is not understood.
    """
    if source.head is None:
        return None
    width = source.head.part(MTP.names.gate_up[0].format(i=0), options).n
    config = replace(source.config, num_layers=1, ffn_size=width, experts=None)
    beside = replace(source, config=config, tensors=source.head, names=MTP.names)
    return _Planner(replace(beside, extra_names=frozenset()), options).head_plan(width)


class _Planner:
    def __init__(self, source: Source, options: ConvertOptions) -> None:
        self._source = source
        self._options = options
        self._config = source.config
        self._used: set[str] = set(source.extra_names)
        self._weights: dict[str, Part] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._experts: dict[int, LayerExperts] = {}

    def plan(self) -> Plan:
        c, names = self._config, self._source.names
        self._weight("embed", self._part(names.embed, c.vocab_size, c.hidden_size))
        if not c.tied:
            self._weight("head", self._part(names.head, c.vocab_size, c.hidden_size))
        elif f"{names.head}.weight" in self._source.tensors.names():
            self._used.add(f"{names.head}.weight")  # a copy of the embedding
        self._gain("norm", names.norm, c.hidden_size)
        for layer in range(c.num_layers):
            self._layer(layer)
        self._tables()
        self._refuse_unused()
        return Plan(self._weights, self._arrays, self._experts)

    def head_plan(self, ffn_size: int) -> Plan:
        hidden = self._config.hidden_size
        fc = self._part(MTP.fc, hidden, 2 * hidden)
        self._weight("fc.embed", columns(fc, 0, hidden))
        self._weight("fc.hidden", columns(fc, hidden, 2 * hidden))
        self._gain("fc.embed_norm", MTP.embed_norm, hidden)
        self._gain("fc.hidden_norm", MTP.hidden_norm, hidden)
        self._layer(0)
        self._gain("norm", self._source.names.norm, hidden)
        self._arrays["ffn"] = np.array([ffn_size], np.int32)
        self._refuse_unused()
        return Plan(self._weights, self._arrays, self._experts)

    def _layer(self, i: int) -> None:
        c, names, to = self._config, self._source.names, f"layers.{i}"
        self._gain(f"{to}.attention_norm", names.attention_norm.format(i=i), c.hidden_size)
        self._qkv(i)
        out = self._part(names.out.format(i=i), c.hidden_size, c.q_size)
        self._weight(f"{to}.out", out)
        self._gain(f"{to}.mlp_norm", names.mlp_norm.format(i=i), c.hidden_size)
        if c.experts and c.has_experts(i):
            self._mixture(i, c.experts)
        else:
            gate, up = (name.format(i=i) for name in names.gate_up)
            self._mlp(to, gate, up, names.down.format(i=i), c.ffn_size)
        if c.qk_norm or c.qk_norm_whole:
            whole = c.qk_norm_whole
            q_size, k_size = (c.q_size, c.kv_size) if whole else (c.head_dim, c.head_dim)
            self._gain(f"{to}.q_norm", names.q_norm.format(i=i), q_size)
            self._gain(f"{to}.k_norm", names.k_norm.format(i=i), k_size)

    def _mlp(self, to: str, gate: str, up: str, down: str, ffn_size: int) -> None:
        hidden, rows = self._config.hidden_size, padded_rows(ffn_size)
        halves = [padded(self._part(n, ffn_size, hidden), rows) for n in (gate, up)]
        self._weight(f"{to}.gate_up", joined(f"{to}.gate_up", halves))
        self._weight(f"{to}.down", self._part(down, hidden, ffn_size))

    def _mixture(self, i: int, experts: ExpertsConfig) -> None:
        """Router, shared expert and experts of a layer."""
        there = self._source.tensors.names()
        forms = self._source.names.experts
        # Where none is there, the first names what is missing.
        names = next((f for f in forms if f.gate.format(i=i, e=0) in there), forms[0])
        rows = [self._router(names.router.format(i=i), experts.num_experts)]
        if experts.shared_ffn_size:
            shared = self._source.names.shared
            rows.append(self._router(shared.router.format(i=i), 1))
            gate, up = (name.format(i=i) for name in shared.gate_up)
            down = shared.down.format(i=i)
            self._mlp(f"layers.{i}.shared", gate, up, down, experts.shared_ffn_size)
        codes, exponents = pack_router(np.concatenate(rows))
        self._arrays[f"layers.{i}.router.codes"] = codes
        self._arrays[f"layers.{i}.router.exponents"] = exponents
        self._experts[i] = self._records(i, experts, names)

    def _router(self, full_name: str, count: int) -> NDArray[np.float64]:
        rows = self._source.tensors.matrix(full_name)
        self._used.add(full_name)
        wanted = (count, self._config.hidden_size)
        if rows.shape != wanted:
            raise self._wrong(full_name, rows.shape, wanted)
        return rows

    def _records(self, i: int, experts: ExpertsConfig, names: ExpertNames) -> LayerExperts:
        count, ffn, hidden = experts.num_experts, experts.ffn_size, self._config.hidden_size
        if names.gate == names.up:
            both = self._stack(names.gate, i, count, 2 * ffn, hidden)
            gates = [band(part, 0, ffn) for part in both]
            ups = [band(part, ffn, 2 * ffn) for part in both]
        else:
            gates, ups = (self._stack(n, i, count, ffn, hidden) for n in (names.gate, names.up))
        downs = self._stack(names.down, i, count, hidden, ffn)
        rows = experts.ffn_rows
        gate_up = [
            joined(f"layers.{i}.experts.{e}", [padded(gate, rows), padded(up, rows)])
            for e, (gate, up) in enumerate(zip(gates, ups, strict=True))
        ]
        return LayerExperts(_in_one_layout(gate_up), _in_one_layout(downs))

    def _stack(self, name: str, i: int, count: int, n: int, k: int) -> list[Part]:
        """One weight of every expert of a layer, from one tensor or one an expert."""
        if "{e}" in name:
            each = (name.format(i=i, e=e).removesuffix(".weight") for e in range(count))
            return [self._part(one, n, k) for one in each]
        full_name = name.format(i=i)
        parts = self._source.tensors.stack(full_name, count, self._options)
        self._used.add(full_name)
        if (parts[0].n, parts[0].columns) != (n, k):
            raise self._wrong(full_name, (count, parts[0].n, parts[0].columns), (count, n, k))
        return parts

    def _qkv(self, i: int) -> None:
        c, names = self._config, [n.format(i=i) for n in self._source.names.qkv]
        heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
        parts = [
            self._part(n, h * c.head_dim, c.hidden_size) for n, h in zip(names, heads, strict=True)
        ]
        orders = [self._order(h) for h in heads[:2]]
        if self._source.interleaved:
            parts[:2] = [permuted(p, o) for p, o in zip(parts, orders, strict=False)]
        self._weight(f"layers.{i}.qkv", joined(f"layers.{i}.qkv", parts))
        if c.qkv_bias:
            vectors = [self._vector(f"{n}.bias", p.n) for n, p in zip(names, parts, strict=True)]
            if self._source.interleaved:
                vectors[:2] = [v[o] for v, o in zip(vectors, orders, strict=False)]
            self._arrays[f"layers.{i}.qkv.bias"] = pack_bias(np.concatenate(vectors), FRACTION_BITS)

    def _order(self, heads: int) -> NDArray[np.int64]:
        """Row of the interleaved source (pairs 2i, 2i + 1) for each half-split row."""
        rows = np.arange(heads * self._config.head_dim).reshape(heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    def _part(self, name: str, n: int, k: int) -> Part:
        part = self._source.tensors.part(name, self._options)
        self._used.add(f"{name}.weight")
        if (part.n, part.columns) != (n, k):
            raise self._wrong(name, (part.n, part.columns), (n, k))
        return part

    def _wrong(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> FileError:
        cause = f"is {list(found)}, not {list(wanted)}"
        return FileError(self._source.path, f"tensor {name!r}", cause)

    def _weight(self, name: str, part: Part) -> None:
        self._weights[name] = part

    def _vector(self, full_name: str, size: int) -> NDArray[np.float64]:
        values = self._source.tensors.vector(full_name)
        self._used.add(full_name)
        if len(values) != size:
            raise FileError(
                self._source.path, f"tensor {full_name!r}", f"has {len(values)} values, not {size}"
            )
        return values

    def _gain(self, name: str, source_name: str, size: int) -> None:
        gain, exponent = pack_gain(self._vector(f"{source_name}.weight", size))
        self._arrays[f"{name}.gain"] = gain
        self._arrays[f"{name}.gain_exponent"] = np.array([exponent], np.int32)

    def _tables(self) -> None:
        with localcontext() as context:
            context.prec = 60
            low, high = rope_tables(self._config.frequencies(), self._config.context)
        self._arrays["rope.low"], self._arrays["rope.high"] = low, high
        self._arrays["table.sigmoid"] = sigmoid_table()

    def _refuse_unused(self) -> None:
        ignored = {
            n.format(i=i)
            for n in self._source.names.ignored
            for i in range(self._config.num_layers)
        }
        left = sorted(self._source.tensors.names() - self._used - ignored)
        if left:
            raise InputError(
                f"{self._source.path}: tensor {left[0]!r} is not understood: a variant of {self._source.family}?"
            )


def _in_one_layout(parts: list[Part]) -> list[Part]:
    layout = widest(part.layout for part in parts)
    return [in_layout(part, layout) for part in parts]
