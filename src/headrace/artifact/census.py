"""What an artifact's weights are, in numbers: how many, in which formats, how large. Reads no weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.artifact.check import weight_arrays
from headrace.artifact.container import Artifact


def num_parameters(artifact: Artifact) -> int:
    """Weights of all packed matrices, those of every expert counted."""
    return sum(_parameters(artifact, name) for name in artifact.manifest.tensors)


def _copies(artifact: Artifact, name: str) -> int:
    """How often a weight is there: one of an expert is described once for its layer."""
    return artifact.records[0].num_experts if ".experts." in name else 1


def _parameters(artifact: Artifact, name: str) -> int:
    rows, columns = artifact.manifest.tensors[name]["shape"]
    return int(rows * columns * _copies(artifact, name))


def tensor_facts(artifact: Artifact, name: str) -> dict[str, Any]:
    """Format, group, shape [n, k] and bytes of a packed weight; of one of an expert, those of its whole layer."""
    if ".experts." in name:
        return {**artifact.manifest.tensors[name], "bytes": _expert_bytes(artifact, name)}
    parts = (artifact.tensors.get(f"{name}.{p}") for p in ("codes", "scales", "mins", "row"))
    nbytes = sum(array.nbytes for array in parts if array is not None)
    return {**artifact.manifest.tensors[name], "bytes": nbytes}


def _expert_bytes(artifact: Artifact, name: str) -> int:
    """Bytes of one weight of all experts of a layer, without padding of their records."""
    entry = artifact.manifest.tensors[name]
    arrays = weight_arrays(name, entry).values()
    width = {"U8": 1, "I16": 2, "I32": 4}
    return _copies(artifact, name) * sum(width[kind] * math.prod(shape) for kind, shape in arrays)


def format_bytes(tensors: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Bytes by format and group, of tensors as `tensor_facts` has them."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[format_name(tensor)] += tensor["bytes"]
    return sizes


def format_name(tensor: Mapping[str, Any]) -> str:
    """Format and group of a tensor: "q4/32"."""
    return f"{tensor['format']}/{tensor['group']}"
