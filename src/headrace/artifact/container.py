"""The artifact as a directory: opening is a trust boundary, writing is atomic.

A directory that opens is complete: it is written under a temporary name beside its place, hashed,
flushed to disk, and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import BLOCK, SUPERGROUP, TILE
from headrace.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from headrace.artifact.tensorfile import read_tensors
from headrace.errors import DiskFullError, FileError

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20
_HASH_CHUNK = 8 << 20


@dataclass(frozen=True, eq=False)
class Artifact:
    """An opened artifact: its manifest and its arrays, mapped read-only."""

    path: Path
    manifest: Manifest
    tensors: Mapping[str, NDArray[Any]]
    template: str | None

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_NAME

    @property
    def identity(self) -> str:
        return self.manifest.identity


def open_artifact(path: Path, *, verify: bool = False) -> Artifact:
    """Open an artifact; `verify` also reads and hashes every byte.

    Every field is checked against bounds before a byte of a tensor is used. Raises FileError or
    UnsupportedError.
    """
    if not path.is_dir():
        raise FileError(path, "open", "this is not an artifact directory")
    manifest = read_manifest(path / MANIFEST_NAME)
    for name, entry in manifest.files.items():
        _check_file(path / name, entry, verify)
    if TOKENIZER_NAME not in manifest.files:
        raise FileError(path, TOKENIZER_NAME, "is missing")
    tensors: dict[str, NDArray[Any]] = {}
    for name in sorted(n for n in manifest.files if n.endswith(".safetensors")):
        for key, stored in read_tensors(path / name).items():
            if key in tensors:
                raise FileError(path / name, f"tensor {key!r}", "occurs in two files")
            tensors[key] = stored.data
    _check_weights(path, manifest, tensors)
    return Artifact(path, manifest, tensors, _template(path, manifest))


def _check_file(path: Path, entry: FileEntry, verify: bool) -> None:
    if path.is_symlink() or not path.is_file():
        raise FileError(path, "open", "is missing or not a plain file")
    if path.stat().st_size != entry.nbytes:
        raise FileError(
            path, "size", f"{path.stat().st_size:,} bytes, the manifest says {entry.nbytes:,}"
        )
    if verify and file_sha256(path) != entry.sha256:
        raise FileError(path, "sha256", "the bytes are not those that the manifest names")


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _template(path: Path, manifest: Manifest) -> str | None:
    if TEMPLATE_NAME not in manifest.files:
        return None
    if manifest.files[TEMPLATE_NAME].nbytes > MAX_TEMPLATE_BYTES:
        raise FileError(path / TEMPLATE_NAME, "size", f"is more than {MAX_TEMPLATE_BYTES:,} bytes")
    try:
        return (path / TEMPLATE_NAME).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FileError(path / TEMPLATE_NAME, "text", "is not valid UTF-8") from None


def weight_arrays(name: str, entry: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The stored arrays of a packed weight: name -> (safetensors dtype, shape)."""
    n, k = entry["shape"]
    tiles, blocks, groups = -(-n // TILE), k // BLOCK, k // entry["group"]
    bits = int(entry["format"][1])
    out: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{name}.codes": ("U8", (tiles, blocks, bits, TILE, 4)),
        f"{name}.scales": ("I16", (tiles, groups, TILE)),
        f"{name}.row": ("I32", (3, tiles * TILE)),
    }
    if entry["format"].endswith("m"):
        out[f"{name}.mins"] = ("I16", (tiles, -(-groups // SUPERGROUP), TILE, SUPERGROUP))
    return out


_NUMPY = {"U8": np.uint8, "I16": np.int16, "I32": np.int32}


def _check_weights(path: Path, manifest: Manifest, tensors: Mapping[str, NDArray[Any]]) -> None:
    known: set[str] = set()
    for name, entry in manifest.tensors.items():
        for key, (dtype, shape) in weight_arrays(name, entry).items():
            known.add(key)
            if key not in tensors:
                raise FileError(path, f"tensor {key!r}", "is missing")
            if tensors[key].dtype != _NUMPY[dtype] or tensors[key].shape != shape:
                raise FileError(
                    path,
                    f"tensor {key!r}",
                    f"is {tensors[key].dtype}{tensors[key].shape}, not {dtype}{shape}",
                )
        _check_rows(path, name, tensors)
    for key, array in tensors.items():
        if key not in known and array.dtype != np.int32:
            raise FileError(path, f"tensor {key!r}", "is not described by the manifest")


def _check_rows(path: Path, name: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """The bounds that rule R3 relies on."""
    mantissa, exponent, shift = tensors[f"{name}.row"]
    if mantissa.min() < 0 or mantissa.max() >= 1 << 15:
        raise FileError(path, f"tensor {name + '.row'!r}", "a mantissa is not within 15 bits")
    if exponent.min() < -256 or exponent.max() > 128 or shift.min() < 0 or shift.max() > 14:
        raise FileError(path, f"tensor {name + '.row'!r}", "an exponent or shift is out of range")
    for part in ("scales", "mins"):
        array = tensors.get(f"{name}.{part}")
        if array is not None and array.min() == -32768:
            raise FileError(path, f"tensor {f'{name}.{part}'!r}", "holds -32768")


@contextlib.contextmanager
def building(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary directory beside `target` that becomes it when the block ends without an error.

    What stood at `target` before stays until then. Raises DiskFullError before anything is written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed_bytes:
        raise DiskFullError(target, needed_bytes, free)
    _remove_stale(target)
    work = Path(
        tempfile.mkdtemp(prefix=f".{target.name}.partial-{os.getpid()}-", dir=target.parent)
    )
    try:
        yield work
        _publish(work, target)
    except OSError as error:
        if error.errno == 28:  # ENOSPC: somebody else took the room meanwhile
            free = shutil.disk_usage(target.parent).free
            raise DiskFullError(target, needed_bytes, free) from None
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove what an interrupted conversion left, unless its process still lives."""
    for stale in target.parent.glob(f".{target.name}.partial-*"):
        owner = stale.name.split("-")[-2]
        if not owner.isdigit() or not Path(f"/proc/{owner}").exists():
            shutil.rmtree(stale, ignore_errors=True)


def _publish(work: Path, target: Path) -> None:
    for file in [*work.iterdir(), work]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    work.chmod(0o755)
    if target.exists():
        old = target.with_name(f".{target.name}.partial-{os.getpid()}-old")
        os.rename(target, old)
        os.rename(work, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(work, target)
