"""An adapter as an artifact: a folder with a manifest and one file of packed weights, for one base.

Opening is a trust boundary: every field is checked and every byte is hashed, and what was hashed is what is used: the
weights are read into memory, so that a file that changes later changes no answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ARITHMETIC_VERSION, BLOCK, TILE
from headrace.artifact.adapter_places import MODULES, Place, place
from headrace.artifact.check import check_values, read_config, weight_arrays
from headrace.artifact.container import Artifact
from headrace.artifact.jsontext import read_object
from headrace.artifact.manifest import ADAPTER_KIND, FORMAT_VERSION, MANIFEST_NAME, Identified
from headrace.artifact.tensorfile import StoredTensor, parse_tensors
from headrace.errors import AdapterMismatchError, AdapterShapeError, FileError, UnsupportedError
from headrace.kernels.adapters import MAX_RANK
from headrace.kernels.program import LowRank, PackedWeight, Pairs
from headrace.models.config import DecoderConfig

WEIGHTS_NAME = "adapter.safetensors"
_KEYS = {"format", "kind", "arithmetic", "base", "targets", "source", "file", "identity"}
_TARGET = re.compile(r"layers\.(0|[1-9]\d{0,3})\.([a-z]{1,4})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DECIMAL = re.compile(r"-?\d{1,20}(\.\d{1,30})?(e[-+]?\d{1,3})?")


@dataclass(frozen=True)
class AdaptedModule:
    """One entry of a manifest: a module's rank, and its alpha and scale as decimal text, the scale being in b."""

    rank: int
    alpha: str
    scale: str

    @property
    def rows(self) -> int:
        """Of a: whole tiles."""
        return -(-self.rank // TILE) * TILE

    @property
    def columns(self) -> int:
        """Of b: whole blocks."""
        return -(-self.rank // BLOCK) * BLOCK


@dataclass(frozen=True)
class AdapterManifest(Identified):
    """Its identity is that of the weights with their scale, and of the base.

    base: the identity of the artifact that it is for. targets: by name, as "layers.0.q"."""

    base: str
    targets: Mapping[str, AdaptedModule]
    source: Mapping[str, str]
    nbytes: int
    sha256: str

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "kind": ADAPTER_KIND,
            "arithmetic": {"version": ARITHMETIC_VERSION},
            "base": self.base,
            "targets": {
                name: {"rank": t.rank, "alpha": t.alpha, "scale": t.scale}
                for name, t in self.targets.items()
            },
            "source": dict(self.source),
            "file": {"bytes": self.nbytes, "sha256": self.sha256},
        }


@dataclass(frozen=True, eq=False)
class Adapter:
    """An opened adapter, its weights in memory, ready for a runner of its base's program."""

    path: Path
    manifest: AdapterManifest
    pairs: Pairs

    @property
    def identity(self) -> str:
        return self.manifest.identity

    @property
    def salt(self) -> bytes:
        """What keys and values depend on besides the model and the tokens."""
        return bytes.fromhex(self.identity)

    @property
    def nbytes(self) -> int:
        """Of its weights in memory."""
        each = (pair for place in self.pairs.values() for pair in place)
        return sum(pair.a.nbytes + pair.b.nbytes for pair in each)


def is_adapter(path: Path) -> bool:
    """Whether a folder says that it is an adapter's artifact, whole or not."""
    return (path / WEIGHTS_NAME).exists()


def open_adapter(path: Path, base: Artifact) -> Adapter:
    """Open an adapter for its base. Raises FileError, UnsupportedError, AdapterMismatchError, AdapterShapeError."""
    manifest = read_adapter_manifest(path)
    if manifest.base != base.identity:
        raise AdapterMismatchError(path, manifest.base, base.identity)
    config = read_config(base.path, base.manifest)
    places = {name: _place(path, config, name) for name in manifest.targets}
    arrays = _arrays(path, manifest, places)
    pairs: dict[tuple[int, str], tuple[LowRank, ...]] = {}
    for name, at in places.items():
        a, b = (_weight(name, side, arrays, manifest.targets[name], at) for side in "ab")
        key = int(name.split(".")[1]), at.name
        pairs[key] = (*pairs.get(key, ()), LowRank(a, b, at.offset))
    return Adapter(path, manifest, pairs)


def read_adapter_manifest(path: Path) -> AdapterManifest:
    """Read and check the manifest of an adapter's folder. Raises FileError, UnsupportedError for another version."""
    if not (path / MANIFEST_NAME).is_file():
        raise FileError(path, MANIFEST_NAME, "is missing: this is no adapter")
    return _Reader(path / MANIFEST_NAME, read_object(path / MANIFEST_NAME)).manifest()


def pair_shapes(name: str, target: AdaptedModule, at: Place) -> dict[str, dict[str, Any]]:
    """The packed weights of a module: of a [rank, k] and of b [n, rank], ranks padded."""
    shapes = {"a": [target.rows, at.k], "b": [at.n, target.columns]}
    return {
        f"{name}.{side}": {"format": "q8", "shape": shape, "group": BLOCK}
        for side, shape in shapes.items()
    }


def _place(path: Path, config: DecoderConfig, name: str) -> Place:
    _, layer, module = name.split(".")
    at = place(config, int(layer), module) if int(layer) < config.num_layers else None
    if at is None:
        raise AdapterShapeError(path, f"module {name!r}", "is none of the base's")
    return at


def _arrays(
    path: Path, manifest: AdapterManifest, places: Mapping[str, Place]
) -> dict[str, NDArray[Any]]:
    """Every array of the file, checked."""
    file = path / WEIGHTS_NAME
    expected = {
        key: facts
        for name, at in places.items()
        for weight, entry in pair_shapes(name, manifest.targets[name], at).items()
        for key, facts in weight_arrays(weight, entry).items()
    }
    stored = parse_tensors(file, read_weights(file, manifest))
    for key in sorted(expected.keys() ^ stored.keys()):
        cause = "is missing" if key in expected else "belongs to no module of the manifest"
        raise FileError(file, f"tensor {key!r:.120}", cause)
    for key, (dtype, shape) in expected.items():
        _check_tensor(file, key, stored[key], dtype, shape)
    return {key: tensor.data for key, tensor in stored.items()}


def _check_tensor(
    file: Path, key: str, tensor: StoredTensor, dtype: str, shape: tuple[int, ...]
) -> None:
    if tensor.dtype != dtype or tensor.data.shape != shape:
        found = f"{tensor.dtype}{list(tensor.data.shape)}"
        raise AdapterShapeError(file, f"tensor {key!r}", f"is {found}, not {dtype}{list(shape)}")
    check_values(file, key, tensor.data)


def read_weights(file: Path, manifest: AdapterManifest) -> memoryview:
    """The bytes of the weights at a 64-byte boundary, which have the manifest's hash."""
    if file.is_symlink() or not file.is_file():
        raise FileError(file, "open", "is missing or not a plain file")
    raw = np.empty(manifest.nbytes + 64, np.uint8)
    view = memoryview(raw.data)[-raw.ctypes.data % 64 :][: manifest.nbytes]
    try:
        with file.open("rb", buffering=0) as opened:
            size = opened.seek(0, 2)
            if size != manifest.nbytes:
                cause = f"{size:,} bytes, the manifest says {manifest.nbytes:,}"
                raise FileError(file, "size", cause)
            opened.seek(0)
            at = 0
            while at < size and (count := opened.readinto(view[at:])):
                at += count
    except OSError as error:
        raise FileError(file, "read", error.strerror or str(error)) from None
    if at < size or hashlib.sha256(view).hexdigest() != manifest.sha256:
        cause = "the bytes are not those that the manifest names"
        raise FileError(file, "sha256", cause, hint="convert the adapter again")
    return view.toreadonly()


def _weight(
    name: str, side: str, arrays: Mapping[str, NDArray[Any]], target: AdaptedModule, at: Place
) -> PackedWeight:
    n, k = (target.rows, at.k) if side == "a" else (at.n, target.columns)
    codes, scales, row = (arrays[f"{name}.{side}.{part}"] for part in ("codes", "scales", "row"))
    return PackedWeight(codes, scales, None, row, n, k, 8, BLOCK)


class _Reader:
    """Checks a manifest key by key; every refusal names the key."""

    def __init__(self, path: Path, body: dict[str, Any]) -> None:
        self._path = path
        self._body = body

    def manifest(self) -> AdapterManifest:
        body = self._body
        if body.get("kind") != ADAPTER_KIND:
            raise self._fail("kind", "is not that of an adapter: this is a model")
        if body.get("format") != FORMAT_VERSION:
            raise self._version("format", body.get("format"), FORMAT_VERSION)
        if set(body) != _KEYS:
            odd = sorted(set(body) ^ _KEYS)[0]
            raise self._fail(odd, "is missing" if odd in _KEYS else "is not known")
        arithmetic = body["arithmetic"]
        if not isinstance(arithmetic, dict) or set(arithmetic) != {"version"}:
            raise self._fail("arithmetic", "needs exactly a version")
        if arithmetic["version"] != ARITHMETIC_VERSION:
            raise self._version("arithmetic", arithmetic["version"], ARITHMETIC_VERSION)
        manifest = AdapterManifest(
            self._hash(body, "base"), self._targets(), self._source(), *self._file()
        )
        if manifest.identity != body["identity"]:
            raise self._fail("identity", "does not match what the manifest says")
        return manifest

    def _targets(self) -> dict[str, AdaptedModule]:
        targets = self._body["targets"]
        if not isinstance(targets, dict) or not targets:
            raise self._fail("targets", "is not an object of modules")
        return {name: self._target(name, entry) for name, entry in targets.items()}

    def _target(self, name: str, entry: object) -> AdaptedModule:
        match = _TARGET.fullmatch(name)
        if match is None or match[2] not in MODULES:
            raise self._fail(f"target {name!r:.60}", "is not the name of a module")
        if not isinstance(entry, dict) or set(entry) != {"rank", "alpha", "scale"}:
            raise self._fail(f"target {name!r}", "needs exactly rank, alpha and scale")
        if type(entry["rank"]) is not int or not 1 <= entry["rank"] <= MAX_RANK:
            raise self._fail(f"target {name!r}", f"rank {entry['rank']!r:.20} is not possible")
        for key in ("alpha", "scale"):
            if not isinstance(entry[key], str) or _DECIMAL.fullmatch(entry[key]) is None:
                raise self._fail(
                    f"target {name!r}", f"{key} {entry[key]!r:.60} is not a number as text"
                )
        return AdaptedModule(entry["rank"], entry["alpha"], entry["scale"])

    def _source(self) -> dict[str, str]:
        source = self._body["source"]
        if (
            not isinstance(source, dict)
            or set(source) != {"kind", "sha256"}
            or source["kind"] != "peft"
        ):
            raise self._fail("source", "is not known")
        return {"kind": "peft", "sha256": self._hash(source, "sha256")}

    def _file(self) -> tuple[int, str]:
        file = self._body["file"]
        size = file.get("bytes") if isinstance(file, dict) and len(file) == 2 else None
        if type(size) is not int or not 0 < size < 1 << 40:
            raise self._fail("file", "needs bytes and sha256")
        return size, self._hash(file, "sha256")

    def _hash(self, where: Mapping[str, Any], key: str) -> str:
        if not isinstance(where.get(key), str) or _SHA256.fullmatch(where[key]) is None:
            raise self._fail(key, f"{where.get(key)!r:.80} is not a SHA-256")
        text: str = where[key]
        return text

    def _fail(self, place: str, cause: str) -> FileError:
        return FileError(self._path, place, cause)

    def _version(self, what: str, found: object, known: int) -> UnsupportedError:
        return UnsupportedError(
            f"{self._path}: {what} version {found!r:.20}; this headrace reads version {known}",
            hint="convert the adapter again",
        )
