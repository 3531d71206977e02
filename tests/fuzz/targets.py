"""What the fuzzers call: bytes in, read or refused. Any other exception is a finding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.artifact.adapter import read_adapter_manifest
from headrace.artifact.gguf import read_gguf
from headrace.artifact.manifest import read_manifest
from headrace.artifact.peft import read_peft
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


def _refused_in_folder(read: Callable[[Path], object], name: str, data: bytes) -> None:
    """As `_refused`, for what reads a folder; a refusal may name any file of it."""
    folder = Path(_FOLDER.name)
    (folder / name).write_bytes(data)
    try:
        read(folder)
    except HeadraceError as error:
        assert error.exit_code == 2, error
        assert str(folder) in error.message, error
        assert len(error.message) < 2000, error


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


def adapter(data: bytes) -> None:
    """An adapter's manifest; one that is read says the same when it is written again."""
    _refused(lambda path: read_adapter_manifest(path.parent), "manifest.json", data)
    path = Path(_FOLDER.name) / "manifest.json"
    try:
        found = read_adapter_manifest(path.parent)
    except HeadraceError:
        return
    path.write_bytes(found.to_bytes())
    assert read_adapter_manifest(path.parent) == found


def peft(data: bytes) -> None:
    """A PEFT folder: a configuration, a zero byte, and the header of its tensors, which have eight bytes of data."""
    settings, _, header = data.partition(b"\0")
    framed = len(header).to_bytes(8, "little") + header + bytes(8)
    (Path(_FOLDER.name) / "adapter_model.safetensors").write_bytes(framed)
    _refused_in_folder(read_peft, "adapter_config.json", settings)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "gguf": gguf,
    "safetensors": safetensors,
    "manifest": manifest,
    "adapter": adapter,
    "peft": peft,
}
