"""Expert records: one expert of one layer as one piece of a file, read whole with O_DIRECT.

A record holds the expert's gate_up and down weights in kernel order, every field at a 64-byte boundary, padded to
4 KiB. All experts of a layer have the same formats, so one layout describes the layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.check import check_values, weight_arrays
from headrace.artifact.manifest import Manifest
from headrace.artifact.tensorfile import Place
from headrace.errors import FileError
from headrace.kernels.layout import field_view
from headrace.kernels.program import ExpertLayout, FieldSpan, WeightSpans
from headrace.models.config import DecoderConfig

RECORD_ALIGNMENT = 4096  # of a record, in the file and in memory
EXPERTS_PREFIX = "experts-"  # of the names of files that hold records and nothing else
_FIELD_ALIGNMENT = 64
_NUMPY = {"U8": "|u1", "I16": "<i2", "I32": "<i4"}

Entry = Mapping[str, Any]  # of the manifest: format, shape [n, k], group


@dataclass(frozen=True)
class LayerRecords:
    """Where a layer's records lie: expert e at offset + e * layout.nbytes of the file."""

    layer: int
    path: Path
    offset: int
    num_experts: int
    layout: ExpertLayout


def expert_layout(gate_up: Entry, down: Entry) -> ExpertLayout:
    """The layout of records with these weights: the fields of gate_up, then those of down."""
    at = 0
    spans = []
    for entry in (gate_up, down):
        fields: dict[str, FieldSpan] = {}
        for key, (dtype, shape) in weight_arrays("w", entry).items():
            size = math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize
            fields[key.removeprefix("w.")] = FieldSpan(_NUMPY[dtype], tuple(shape), at)
            at += -(-size // _FIELD_ALIGNMENT) * _FIELD_ALIGNMENT
        n, k = entry["shape"]
        spans.append(WeightSpans(fields, n, k, int(entry["format"][1]), entry["group"]))
    return ExpertLayout(spans[0], spans[1], -(-at // RECORD_ALIGNMENT) * RECORD_ALIGNMENT)


def layer_layout(manifest: Manifest, layer: int) -> ExpertLayout:
    """The layout of a layer's records, from the manifest's entries."""
    name = f"layers.{layer}.experts"
    return expert_layout(manifest.tensors[f"{name}.gate_up"], manifest.tensors[f"{name}.down"])


def find_records(
    path: Path, manifest: Manifest, config: DecoderConfig, places: Mapping[str, tuple[Path, Place]]
) -> tuple[LayerRecords, ...]:
    """The records of every layer that has experts; only places are looked at. Raises FileError.

    places: of every tensor of the expert files.
    """
    layers = [i for i in range(config.num_layers) if config.has_experts(i)]
    wanted = {f"layers.{i}.experts" for i in layers}
    for name in sorted(wanted ^ places.keys()):
        if name in wanted:
            raise FileError(path, f"tensor {name!r}", "is missing")
        raise FileError(places[name][0], f"tensor {name!r:.120}", "is not one of this model's")
    num_experts = config.experts.num_experts if config.experts else 0
    return tuple(
        _records(manifest, layer, num_experts, *places[f"layers.{layer}.experts"])
        for layer in layers
    )


def _records(
    manifest: Manifest, layer: int, num_experts: int, file: Path, place: Place
) -> LayerRecords:
    layout = layer_layout(manifest, layer)
    tensor = f"tensor 'layers.{layer}.experts'"
    if (place.dtype, place.shape) != ("U8", (num_experts, layout.nbytes)):
        found, wanted = list(place.shape), [num_experts, layout.nbytes]
        raise FileError(file, tensor, f"is {place.dtype}{found}, not U8{wanted}")
    if place.begin % RECORD_ALIGNMENT:
        cause = f"begins at byte {place.begin:,}, no multiple of {RECORD_ALIGNMENT}"
        raise FileError(file, tensor, cause)
    return LayerRecords(layer, file, place.begin, num_experts, layout)


def check_records(records: LayerRecords, read: Callable[[int], None] | None = None) -> None:
    """Read every record of a layer and check its value ranges. Raises FileError that names the expert.

    read: is told the bytes of each record that was checked.
    """
    with records.path.open("rb", buffering=0) as file:
        file.seek(records.offset)
        for expert in range(records.num_experts):
            record = np.fromfile(file, np.uint8, records.layout.nbytes)
            if len(record) != records.layout.nbytes:
                place = f"layer {records.layer}, expert {expert}"
                raise FileError(records.path, place, "the file ends inside its record")
            for name, array in record_fields(record, records.layout):
                check_values(records.path, f"layers.{records.layer}.experts.{expert}.{name}", array)
            if read is not None:
                read(len(record))


def record_fields(
    record: NDArray[np.uint8], layout: ExpertLayout
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of a record, writable views where it is: `gate_up.codes`, ... `down.row`."""
    for weight, spans in (("gate_up", layout.gate_up), ("down", layout.down)):
        for field, span in spans.fields.items():
            yield f"{weight}.{field}", field_view(record, span)
