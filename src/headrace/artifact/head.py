"""A head that drafts (multi-token prediction): a file beside an artifact's own, optional, and no part of its identity.

`mtp-head.safetensors` holds a decoder of one layer under the names of an artifact's (`layers.0.*`, `norm`), `fc.embed`
and `fc.hidden`, which join a token's embedding and the state before it, each with its norm, `ffn`, the layer's width,
and `identity`, the artifact that it belongs to. Embedding and output are the artifact's. It changes no answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from headrace.artifact.check import (
    check_shapes,
    check_values,
    head_array_shapes,
    head_shapes,
    weight_arrays,
)
from headrace.artifact.container import Artifact
from headrace.artifact.tensorfile import read_tensors
from headrace.errors import FileError, InputError
from headrace.models.config import DecoderConfig

HEAD_NAME = "mtp-head.safetensors"
MAX_WIDTH = 1 << 18
Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Head:
    """A head as a decoder: its configuration, and what the file holds with what it shares with the artifact."""

    config: DecoderConfig
    formats: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, NDArray[Any]]
    nbytes: int  # of the file


def read_head(artifact: Artifact) -> Head | None:
    """The head beside an artifact; None where there is none.

    Raises FileError for a file that is no head of this artifact: it changed, so it is not ignored.
    """
    path = artifact.path / HEAD_NAME
    if not os.path.lexists(path):
        return None
    try:
        return _read(path, artifact)
    except FileError as error:
        hint = "remove the file, or convert the model again"
        raise FileError(path, error.place, error.cause, hint=hint) from None


def head_size(folder: Path) -> tuple[int, int] | None:
    """Bytes of the file and the width of the layer of the head in an artifact's folder; None without one.

    Nothing else is read. Raises FileError.
    """
    path = folder / HEAD_NAME
    if not os.path.lexists(path):
        return None
    tensors = {name: stored.data for name, stored in read_tensors(path).items()}
    return path.stat().st_size, _width(path, tensors)


def _read(path: Path, artifact: Artifact) -> Head:
    tensors = {name: stored.data for name, stored in read_tensors(path).items()}
    config = _config(path, artifact, tensors)
    formats = {name: _format(path, name, shape, tensors) for name, shape in head_shapes(config)}
    shapes = {name: (kind, shape) for name, kind, shape in head_array_shapes(config)}
    for name, entry in formats.items():
        shapes |= weight_arrays(name, entry)
    check_shapes(path, shapes, tensors)
    if bytes(tensors["identity"]) != bytes.fromhex(artifact.identity):
        raise FileError(path, "identity", "belongs to another artifact")
    for name, array in tensors.items():
        check_values(path, name, array)
    shared = ("embed", "head", "rope", "table")
    ours = {n: a for n, a in artifact.tensors.items() if n.split(".")[0] in shared}
    described = {n: e for n, e in artifact.manifest.tensors.items() if n in shared}
    return Head(config, {**described, **formats}, {**ours, **tensors}, path.stat().st_size)


def _config(path: Path, artifact: Artifact, tensors: Tensors) -> DecoderConfig:
    """The artifact's, with one ordinary layer as wide as the head says."""
    ours = DecoderConfig.from_json(artifact.manifest.config)
    try:
        return replace(ours, num_layers=1, experts=None, ffn_size=_width(path, tensors))
    except InputError as error:
        raise FileError(path, "tensor 'ffn'", error.message) from None


def _width(path: Path, tensors: Tensors) -> int:
    width = tensors.get("ffn")
    if width is None or width.shape != (1,) or not 0 < width[0] <= MAX_WIDTH:
        raise FileError(path, "tensor 'ffn'", "is missing, or no width of a layer")
    return int(width[0])


def _format(path: Path, name: str, shape: tuple[int, int], tensors: Tensors) -> dict[str, Any]:
    """What a manifest would say of a packed weight, by its arrays."""
    codes, scales = (tensors.get(f"{name}.{part}") for part in ("codes", "scales"))
    if codes is None or scales is None or codes.ndim != 5 or scales.ndim != 3:
        raise FileError(path, f"tensor '{name}.codes'", "is missing, or no packed weight")
    bits, groups = codes.shape[2], scales.shape[1]
    if bits not in (4, 8) or groups not in (shape[1] // 32, shape[1] // 64):
        raise FileError(path, f"tensor '{name}.codes'", f"has {bits} bits, {groups} groups a row")
    mins = "m" if f"{name}.mins" in tensors else ""
    return {"format": f"q{bits}{mins}", "shape": list(shape), "group": shape[1] // groups}
