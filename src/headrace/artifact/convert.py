"""Converts a source checkpoint into an artifact: deterministic, streaming, all or nothing.

A plan says what is written where; rows are read, packed and written in slices, so that memory does not
grow with the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import localcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import FRACTION_BITS, TILE, rope_tables, sigmoid_table
from headrace.artifact.check import weight_arrays
from headrace.artifact.container import (
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    Artifact,
    building,
    file_sha256,
    open_artifact,
)
from headrace.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest
from headrace.artifact.packing import pack, pack_bias, pack_gain
from headrace.artifact.parts import Part, joined, padded, permuted
from headrace.artifact.sources import ConvertOptions, Source, open_source
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.errors import FileError, InputError
from headrace.models.families import family

Progress = Callable[[int, int], None]

MAX_FILE_BYTES = 4 << 30
SLICE_ELEMENTS = 1 << 21  # of a weight, read and packed at once: about 100 MB of working memory


@dataclass(frozen=True, eq=False)
class Plan:
    """What an artifact will hold: packed weights, and small arrays that are ready."""

    weights: dict[str, Part]
    arrays: dict[str, NDArray[np.int32]]

    def entries(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"format": p.layout.format, "shape": [p.n, p.k], "group": p.layout.group}
            for name, p in self.weights.items()
        }


def convert(
    source: Path,
    target: Path,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Convert `source` (a GGUF file or a model directory) into the artifact directory `target`.

    progress(done, total) counts rows. What stood at `target` is replaced only by a complete artifact.
    Raises InputError for a source that cannot be used, DiskFullError before anything is written.
    """
    opened = open_source(source)
    try:
        plan = make_plan(opened, options or ConvertOptions())
    except FileError:
        raise
    except OverflowError as error:
        raise FileError(source, "tensors", str(error)) from None
    files = _files(plan)
    needed = (
        sum(spec.nbytes for specs in files for spec in specs)
        + len(opened.tokenizer_json)
        + (1 << 20)
    )

    def report(done: int, total: int) -> None:
        opened.tensors.forget()  # what is packed is not needed any more
        if progress is not None:
            progress(done, total)

    with building(target, needed) as work:
        _write_tensors(work, files, plan, report)
        (work / TOKENIZER_NAME).write_bytes(opened.tokenizer_json)
        if opened.template is not None:
            (work / TEMPLATE_NAME).write_text(opened.template, encoding="utf-8")
        _write_manifest(work, opened, plan)
        open_artifact(work, verify=True)
    return open_artifact(target)


def make_plan(source: Source, options: ConvertOptions) -> Plan:
    """Which source tensor goes where. Raises FileError, InputError for what is left over or missing."""
    family(source.family).check(source.config)
    return _Planner(source, options).plan()


class _Planner:
    def __init__(self, source: Source, options: ConvertOptions) -> None:
        self._source = source
        self._options = options
        self._config = source.config
        self._used: set[str] = set(source.extra_names)
        self._weights: dict[str, Part] = {}
        self._arrays: dict[str, NDArray[np.int32]] = {}

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
        return Plan(self._weights, self._arrays)

    def _layer(self, i: int) -> None:
        c, names, to = self._config, self._source.names, f"layers.{i}"
        self._gain(f"{to}.attention_norm", names.attention_norm.format(i=i), c.hidden_size)
        self._qkv(i)
        out = self._part(names.out.format(i=i), c.hidden_size, c.q_size)
        self._weight(f"{to}.out", out)
        self._gain(f"{to}.mlp_norm", names.mlp_norm.format(i=i), c.hidden_size)
        halves = [
            padded(self._part(n.format(i=i), c.ffn_size, c.hidden_size), c.ffn_rows)
            for n in names.gate_up
        ]
        self._weight(f"{to}.gate_up", joined(f"{to}.gate_up", halves))
        self._weight(f"{to}.down", self._part(names.down.format(i=i), c.hidden_size, c.ffn_size))
        if c.qk_norm:
            self._gain(f"{to}.q_norm", names.q_norm.format(i=i), c.head_dim)
            self._gain(f"{to}.k_norm", names.k_norm.format(i=i), c.head_dim)

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
            raise FileError(
                self._source.path,
                f"tensor {name!r}",
                f"is [{part.n}, {part.columns}], not [{n}, {k}]",
            )
        return part

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


def _files(plan: Plan) -> list[list[TensorSpec]]:
    """The tensors of each file. Arrays of 64-byte multiples come first, so that they stay aligned."""
    specs = [
        TensorSpec(key, dtype, shape)
        for name, entry in plan.entries().items()
        for key, (dtype, shape) in weight_arrays(name, entry).items()
    ]
    specs += [TensorSpec(name, "I32", array.shape) for name, array in plan.arrays.items()]
    files: list[list[TensorSpec]] = [[]]
    for spec in sorted(specs, key=lambda s: s.nbytes % 64 != 0):
        if files[-1] and sum(s.nbytes for s in files[-1]) + spec.nbytes > MAX_FILE_BYTES:
            files.append([])
        files[-1].append(spec)
    return files


def _write_tensors(
    work: Path, files: list[list[TensorSpec]], plan: Plan, progress: Progress
) -> None:
    total = sum(part.n for part in plan.weights.values())
    done = 0
    with contextlib.ExitStack() as stack:
        where: dict[str, TensorFileWriter] = {}
        for number, specs in enumerate(files, start=1):
            file = stack.enter_context((work / f"dense-{number:05d}.safetensors").open("wb"))
            writer = TensorFileWriter(file, specs)
            where.update({spec.name: writer for spec in specs})
        for name, array in plan.arrays.items():
            where[name].write(name, array)
        for name, part in plan.weights.items():
            for rows in _write_weight(where, name, part):
                done += rows
                progress(done, total)


def _write_weight(where: dict[str, TensorFileWriter], name: str, part: Part) -> Iterator[int]:
    """Write a weight slice by slice; yields the rows of each."""
    step = max(1, SLICE_ELEMENTS // part.k // TILE) * TILE
    row = np.zeros((3, -(-part.n // TILE) * TILE), np.int32)
    for begin in range(0, part.n, step):
        end = min(part.n, begin + step)
        packed = pack(part.read(np.arange(begin, end)))
        tile = begin // TILE
        for field in ("codes", "scales", "mins"):
            array = getattr(packed, field)
            if array is not None:
                where[f"{name}.{field}"].write(f"{name}.{field}", array, tile * array[0].nbytes)
        row[:, begin : begin + packed.row.shape[1]] = packed.row
        yield end - begin
    where[f"{name}.row"].write(f"{name}.row", row)


def _source_digest(source: Source) -> str:
    """SHA-256 of a source that is one file; of its files' digests, in order, if there are several.

    No name is part of it: a renamed source gives the same bytes.
    """
    digests = [file_sha256(file) for file in source.files]
    return digests[0] if len(digests) == 1 else sha256("\n".join(digests).encode()).hexdigest()


def _write_manifest(work: Path, source: Source, plan: Plan) -> None:
    files = {
        file.name: FileEntry(file.stat().st_size, file_sha256(file))
        for file in sorted(work.iterdir())
    }
    manifest = Manifest(
        family=source.family,
        fraction_bits=FRACTION_BITS,
        config=source.config.to_json(),
        tensors=plan.entries(),
        tokenizer=source.tokenizer,
        source={"kind": source.kind, "sha256": _source_digest(source)},
        files=files,
    )
    (work / MANIFEST_NAME).write_bytes(manifest.to_bytes())
