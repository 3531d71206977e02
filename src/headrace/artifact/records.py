"""Expert records: one expert of one layer as one piece of a file, read whole with O_DIRECT.

A record holds the expert's gate_up and down weights in kernel order, every field at a 64-byte boundary, padded to
4 KiB. All experts of a layer have the same formats, so one layout describes the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.artifact.check import weight_arrays
from headrace.kernels.program import ExpertLayout, FieldSpan, WeightSpans

RECORD_ALIGNMENT = 4096  # of a record, in the file and in memory
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
