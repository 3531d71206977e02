"""The fitted forecast of a mixture: a file beside an artifact's own, optional, and no part of its identity.

`forecast.safetensors` holds `layers.L.codes` i16[E, hidden] and `layers.L.exponents` i32[E] for layers that are
guessed, and `identity`, the artifact that it was fitted on. It changes which experts are read early, never a result.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.check import check_values
from headrace.artifact.container import Artifact
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec, read_tensors
from headrace.artifact.unfinished import replacing
from headrace.errors import FileError
from headrace.models.config import DecoderConfig

FORECAST_NAME = "forecast.safetensors"
_PARTS = ("codes", "exponents")
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.(?:codes|exponents)", re.ASCII)
Stored = Mapping[int, tuple[NDArray[np.int16], NDArray[np.int32]]]  # layer: codes, exponents


def read_forecast(artifact: Artifact) -> Stored:
    """The forecast of an artifact; empty where there is none, or where the artifact is opened to leave it out.

    Raises FileError for a file that is not a forecast of this artifact: it changed, so it is not ignored.
    """
    path = artifact.path / FORECAST_NAME
    if not artifact.records or not artifact.with_forecast or not os.path.lexists(path):
        return {}
    try:
        return _read(path, artifact)
    except FileError as error:
        hint = "remove the file, or make it again: headrace fit-forecast"
        raise FileError(path, error.place, error.cause, hint=f"{hint} {artifact.path}") from None


def _read(path: Path, artifact: Artifact) -> Stored:
    tensors = {name: stored.data for name, stored in read_tensors(path).items()}
    if bytes(tensors.pop("identity", np.zeros(0, np.uint8))) != bytes.fromhex(artifact.identity):
        raise FileError(path, "identity", "was fitted on another artifact")
    out = {}
    config = DecoderConfig.from_json(artifact.manifest.config)
    shape = (artifact.records[0].num_experts, config.hidden_size)
    for layer in {_layer(path, name, artifact) for name in tensors}:
        codes, exponents = (tensors.get(f"layers.{layer}.{part}") for part in _PARTS)
        if codes is None or codes.dtype != np.int16 or codes.shape != shape:
            raise FileError(path, f"tensor 'layers.{layer}.codes'", f"is not I16{list(shape)}")
        if exponents is None or exponents.dtype != np.int32 or exponents.shape != shape[:1]:
            raise FileError(path, f"tensor 'layers.{layer}.exponents'", f"is not I32[{shape[0]}]")
        check_values(path, f"layers.{layer}.router.codes", codes)
        check_values(path, f"layers.{layer}.router.exponents", exponents)
        out[layer] = (codes, exponents)
    return out


def _layer(path: Path, name: str, artifact: Artifact) -> int:
    """The layer that a tensor is of: one with experts, but not the first, for which nothing guesses."""
    found = _NAME.fullmatch(name)
    guessed = sorted(r.layer for r in artifact.records)[1:]
    if found is None or int(found[1]) not in guessed:
        raise FileError(path, f"tensor {name!r:.120}", "is not one of a forecast of this model")
    return int(found[1])


def keep_forecast(old: Path, new: Artifact) -> None:
    """Copy the forecast in the directory `old` to a new artifact, if it was fitted on that very artifact."""
    try:
        kept = read_forecast(replace(new, path=old))
    except FileError:
        return
    if kept:
        shutil.copyfile(old / FORECAST_NAME, new.path / FORECAST_NAME)


def write_forecast(artifact: Artifact, forecast: Stored) -> None:
    """Put a forecast beside an artifact's files, in place of an older one. Raises FileError."""
    path = artifact.path / FORECAST_NAME
    arrays: dict[str, NDArray[Any]] = {}
    for layer, (codes, exponents) in sorted(forecast.items()):
        arrays |= {f"layers.{layer}.codes": codes, f"layers.{layer}.exponents": exponents}
    arrays["identity"] = np.frombuffer(bytes.fromhex(artifact.identity), np.uint8)
    kinds = {"int16": "I16", "int32": "I32", "uint8": "U8"}
    specs = [TensorSpec(n, kinds[str(a.dtype)], a.shape) for n, a in arrays.items()]
    try:
        with replacing(path) as work, work.open("wb") as file:
            writer = TensorFileWriter(file, specs)
            for name, array in arrays.items():
                writer.write(name, array)
    except OSError as error:
        raise FileError(path, "write", error.strerror or str(error)) from None
