"""The fitted forecast of a mixture: a file beside an artifact's own, optional, and no part of its identity.

`forecast.safetensors` holds `layers.L.codes` i16[E, hidden] and `layers.L.exponents` i32[E] for layers that are
guessed, and `identity`, the artifact that it was fitted on. It changes which experts are read early, never a result.
"""

from __future__ import annotations

from collections.abc import Mapping
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
Stored = Mapping[int, tuple[NDArray[np.int16], NDArray[np.int32]]]  # layer: codes, exponents


def read_forecast(artifact: Artifact) -> Stored:
    """The forecast of an artifact; empty where there is none. Raises FileError for one that is not its own."""
    path = artifact.path / FORECAST_NAME
    if not artifact.records or not path.is_file():
        return {}
    tensors = {name: stored.data for name, stored in read_tensors(path).items()}
    if bytes(tensors.pop("identity", np.zeros(0, np.uint8))) != bytes.fromhex(artifact.identity):
        raise FileError(
            path, "identity", "was fitted on another artifact; fit it again or remove it"
        )
    out = {}
    config = DecoderConfig.from_json(artifact.manifest.config)
    for layer in {int(name.split(".")[1]) for name in tensors if _is_name(name)}:
        codes, exponents = (tensors.pop(f"layers.{layer}.{part}", None) for part in _PARTS)
        shape = (artifact.records[0].num_experts, config.hidden_size)
        if codes is None or codes.dtype != np.int16 or codes.shape != shape:
            raise FileError(path, f"tensor 'layers.{layer}.codes'", f"is not I16{list(shape)}")
        if exponents is None or exponents.dtype != np.int32 or exponents.shape != shape[:1]:
            raise FileError(path, f"tensor 'layers.{layer}.exponents'", f"is not I32[{shape[0]}]")
        check_values(path, f"layers.{layer}.router.codes", codes)
        check_values(path, f"layers.{layer}.router.exponents", exponents)
        out[layer] = (codes, exponents)
    if tensors:
        raise FileError(path, f"tensor {sorted(tensors)[0]!r:.120}", "is not one of a forecast")
    return out


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


_PARTS = ("codes", "exponents")


def _is_name(name: str) -> bool:
    words = name.split(".")
    return len(words) == 3 and words[0] == "layers" and words[1].isdigit() and words[2] in _PARTS
