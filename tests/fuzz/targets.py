"""What the fuzzers call: bytes in, read or refused. Any other exception is a finding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.artifact.gguf import read_gguf
from headrace.artifact.manifest import read_manifest
from headrace.artifact.sources import open_source
from headrace.artifact.tensorfile import read_tensors
from headrace.errors import FileError, HeadraceError

_FOLDER = tempfile.TemporaryDirectory(prefix="headrace-fuzz-")


def _refused(read: Callable[[Path], object], name: str, data: bytes) -> None:
    path = Path(_FOLDER.name) / name
    path.write_bytes(data)
    try:
        read(path)
    except HeadraceError as error:
        assert error.exit_code == 2, error
        assert str(path) in error.message, error
        assert len(error.message) < 2000, error
        assert "\n" not in error.message, error


def gguf(data: bytes) -> None:
    """A GGUF file, up to its configuration and vocabulary."""
    _refused(read_gguf, "fuzz.gguf", data)
    _refused(open_source, "fuzz.gguf", data)


def safetensors(data: bytes) -> None:
    """A safetensors file: a header of any bytes, and eight bytes of data."""
    _refused(read_tensors, "fuzz.safetensors", data)
    framed = len(data).to_bytes(8, "little") + data + bytes(8)
    _refused(read_tensors, "fuzz.safetensors", framed)


def manifest(data: bytes) -> None:
    """An artifact's manifest; one that is read says the same when it is written again."""
    _refused(read_manifest, "manifest.json", data)
    path = Path(_FOLDER.name) / "manifest.json"
    try:
        found = read_manifest(path)
    except HeadraceError as error:
        assert isinstance(error, FileError) or error.exit_code == 2
        return
    path.write_bytes(found.to_bytes())
    assert read_manifest(path) == found


TARGETS: dict[str, Callable[[bytes], None]] = {
    "gguf": gguf,
    "safetensors": safetensors,
    "manifest": manifest,
}
