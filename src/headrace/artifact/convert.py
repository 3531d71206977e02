"""Converts a source checkpoint into an artifact: deterministic, streaming, all or nothing.

A plan says what is written where; rows are read, packed and written in slices, so that memory does not
grow with the model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import FRACTION_BITS, TILE
from headrace.artifact.check import weight_arrays
from headrace.artifact.container import (
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    Artifact,
    building,
    file_sha256,
    open_artifact,
)
from headrace.artifact.forecast import keep_forecast
from headrace.artifact.head import HEAD_NAME, read_head
from headrace.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest
from headrace.artifact.packing import pack
from headrace.artifact.parts import Part
from headrace.artifact.plan import Plan, make_head_plan, make_plan
from headrace.artifact.records import (
    EXPERTS_PREFIX,
    RECORD_ALIGNMENT,
    expert_layout,
    record_fields,
)
from headrace.artifact.sources import ConvertOptions, Source, open_source
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.errors import FileError, InputError
from headrace.kernels.program import ExpertLayout

_KINDS = {"int16": "I16", "int32": "I32", "uint8": "U8"}
Files = list[list[TensorSpec]]
Progress = Callable[[str, int, int], None]

MAX_FILE_BYTES = 4 << 30
SLICE_ELEMENTS = 1 << 21  # of a weight, read and packed at once: about 100 MB of working memory


def convert(
    source: Path,
    target: Path,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Convert `source` (a GGUF file or a model directory) into the artifact directory `target`.

    progress(step, done, total): "convert" counts rows; "verify" counts bytes of the source and of what was written
    that are hashed and checked. What stood at `target` is replaced only by a complete artifact; a forecast that was
    fitted on the same artifact stays.
    Raises InputError for a source that cannot be used, DiskFullError before anything is written.
    """
    opened = open_source(source)
    try:
        plan = make_plan(opened, options or ConvertOptions())
    except FileError:
        raise
    except OverflowError as error:
        raise FileError(source, "tensors", str(error)) from None
    head = _head_plan(opened, options or ConvertOptions())
    dense, experts = _dense_files(plan), _expert_files(plan)
    beside = [] if head is None else _dense_files(head)
    sizes = [spec.nbytes for specs in dense + experts + beside for spec in specs]
    needed = sum(sizes) + len(opened.tokenizer_json) + (1 << 20)
    rows = _Step("convert", plan.rows + (0 if head is None else head.rows), progress)

    def written(count: int) -> None:
        opened.tensors.forget()  # what is packed is not needed any more
        rows.add(count)

    with building(target, needed) as work:
        _write_dense(work, dense, plan, written)
        _write_experts(work, experts, plan, written)
        (work / TOKENIZER_NAME).write_bytes(opened.tokenizer_json)
        if opened.template is not None:
            (work / TEMPLATE_NAME).write_text(opened.template, encoding="utf-8")
        nbytes = sum(spec.nbytes for specs in experts for spec in specs)
        nbytes += 2 * _size(work.iterdir()) + _size(opened.files)
        read = _Step("verify", nbytes, progress).add
        _write_manifest(work, opened, plan, read)
        artifact = open_artifact(work, verify=True, read=read)
        if head is not None:
            _write_head(artifact, head, written)
        keep_forecast(target, artifact)
    return open_artifact(target)


def _head_plan(source: Source, options: ConvertOptions) -> Plan | None:
    """What is written of a head that drafts. One that is not understood is left out: it changes no answer."""
    try:
        return make_head_plan(source, options)
    except (InputError, OverflowError) as error:
        warnings.warn(f"the draft head is left out: {error}", RuntimeWarning, stacklevel=3)
        return None


def _write_head(artifact: Artifact, head: Plan, written: Callable[[int], None]) -> None:
    """A file beside the artifact's own, bound to its identity and no part of it."""
    identity = np.frombuffer(bytes.fromhex(artifact.identity), np.uint8)
    bound = Plan(head.weights, {**head.arrays, "identity": identity}, {})
    [specs] = _dense_files(bound)
    _write_dense(artifact.path, [specs], bound, written, HEAD_NAME)
    read_head(artifact)  # refuses values out of bounds


class _Step:
    """Tells what is done of one step."""

    def __init__(self, name: str, total: int, progress: Progress | None) -> None:
        self._name, self._total, self._progress = name, total, progress
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._name, self._done, self._total)


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _dense_files(plan: Plan) -> Files:
    """The tensors of each dense file. Arrays of 64-byte multiples come first, so that they stay aligned."""
    specs = [
        TensorSpec(key, dtype, shape)
        for name, entry in plan.entries().items()
        if name in plan.weights
        for key, (dtype, shape) in weight_arrays(name, entry).items()
    ]
    specs += [
        TensorSpec(name, _KINDS[str(array.dtype)], array.shape)
        for name, array in plan.arrays.items()
    ]
    return _split(sorted(specs, key=lambda s: s.nbytes % 64 != 0))


def _expert_files(plan: Plan) -> Files:
    """The records of each expert file; those of a layer are never split."""
    entries = plan.entries()
    specs = []
    for layer, experts in plan.experts.items():
        name = f"layers.{layer}.experts"
        layout = expert_layout(entries[f"{name}.gate_up"], entries[f"{name}.down"])
        specs.append(TensorSpec(name, "U8", (len(experts.down), layout.nbytes)))
    return _split(specs)


def _split(specs: list[TensorSpec]) -> Files:
    files: Files = []
    room = 0
    for spec in specs:
        if not files or room < spec.nbytes:
            files.append([])
            room = max(MAX_FILE_BYTES, spec.nbytes)
        files[-1].append(spec)
        room -= spec.nbytes
    return files


def _write_dense(
    work: Path,
    files: Files,
    plan: Plan,
    written: Callable[[int], None],
    name: str = "dense-{:05d}.safetensors",
) -> None:
    with contextlib.ExitStack() as stack:
        where: dict[str, TensorFileWriter] = {}
        for number, specs in enumerate(files, start=1):
            file = stack.enter_context((work / name.format(number)).open("wb"))
            writer = TensorFileWriter(file, specs)
            where.update({spec.name: writer for spec in specs})
        for key, array in plan.arrays.items():
            where[key].write(key, array)
        for weight, part in plan.weights.items():

            def write(field: str, array: NDArray[Any], tile: int, weight: str = weight) -> None:
                key = f"{weight}.{field}"
                where[key].write(key, array, tile * array[0].nbytes)

            _pack_slices(part, write, written)


def _write_experts(work: Path, files: Files, plan: Plan, written: Callable[[int], None]) -> None:
    entries = plan.entries()
    for number, specs in enumerate(files, start=1):
        with (work / f"{EXPERTS_PREFIX}{number:05d}.safetensors").open("wb") as file:
            writer = TensorFileWriter(file, specs, RECORD_ALIGNMENT)
            for spec in specs:
                experts = plan.experts[int(spec.name.split(".")[1])]
                layout = expert_layout(
                    entries[f"{spec.name}.gate_up"], entries[f"{spec.name}.down"]
                )
                for expert, parts in enumerate(zip(experts.gate_up, experts.down, strict=True)):
                    record = _record(layout, parts, written)
                    writer.write(spec.name, record, expert * layout.nbytes)


def _record(
    layout: ExpertLayout, parts: tuple[Part, Part], written: Callable[[int], None]
) -> NDArray[np.uint8]:
    """One expert's record u8[nbytes]."""
    record = np.zeros(layout.nbytes, np.uint8)
    fields = dict(record_fields(record, layout))
    for weight, part in zip(("gate_up", "down"), parts, strict=True):

        def write(field: str, array: NDArray[Any], tile: int, weight: str = weight) -> None:
            fields[f"{weight}.{field}"][tile : tile + len(array)] = array

        _pack_slices(part, write, written)
    return record


def _pack_slices(
    part: Part,
    write: Callable[[str, NDArray[Any], int], None],
    written: Callable[[int], None],
) -> None:
    """Pack a weight slice by slice: write(field, array, first tile), then written(rows)."""
    step = max(1, SLICE_ELEMENTS // part.k // TILE) * TILE
    row = np.zeros((3, -(-part.n // TILE) * TILE), np.int32)
    for begin in range(0, part.n, step):
        end = min(part.n, begin + step)
        packed = pack(part.read(np.arange(begin, end)))
        for field in ("codes", "scales", "mins"):
            array = getattr(packed, field)
            if array is not None:
                write(field, array, begin // TILE)
        row[:, begin : begin + packed.row.shape[1]] = packed.row
        written(end - begin)
    write("row", row, 0)


def _source_digest(source: Source, read: Callable[[int], None]) -> str:
    """SHA-256 of a source that is one file; of its files' digests, in order, if there are several.

    No name is part of it: a renamed source gives the same bytes.
    """
    digests = [file_sha256(file, read) for file in source.files]
    return digests[0] if len(digests) == 1 else sha256("\n".join(digests).encode()).hexdigest()


def _source_entry(source: Source, read: Callable[[int], None]) -> dict[str, Any]:
    """What the manifest says of the source; files of tensors that belong to something else are named."""
    entry: dict[str, Any] = {"kind": source.kind, "sha256": _source_digest(source, read)}
    return entry | ({"unread": list(source.unread)} if source.unread else {})


def _write_manifest(work: Path, source: Source, plan: Plan, read: Callable[[int], None]) -> None:
    files = {
        file.name: FileEntry(file.stat().st_size, file_sha256(file, read))
        for file in sorted(work.iterdir())
    }
    manifest = Manifest(
        family=source.family,
        fraction_bits=FRACTION_BITS,
        config=source.config.to_json(),
        tensors=plan.entries(),
        tokenizer=source.tokenizer,
        source=_source_entry(source, read),
        files=files,
    )
    (work / MANIFEST_NAME).write_bytes(manifest.to_bytes())
