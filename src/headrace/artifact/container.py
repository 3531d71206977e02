"""The artifact as a directory: opening is a trust boundary, writing is atomic.

A directory that opens is complete: it is written under a temporary name beside its place, hashed,
flushed to disk, and renamed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from headrace.artifact.check import check_tensors, read_config
from headrace.artifact.jsontext import read_bytes
from headrace.artifact.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from headrace.artifact.records import EXPERTS_PREFIX, LayerRecords, check_records, find_records
from headrace.artifact.room import check_room, full_disk_told
from headrace.artifact.tensorfile import read_places, read_tensors
from headrace.artifact.unfinished import leftovers, working_name
from headrace.artifact.verified import Record, Watch, hashed_facts
from headrace.errors import FileError

T = TypeVar("T")

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20
_OLD = "old"  # the end of the name of what is being replaced


@dataclass(frozen=True, eq=False)
class Artifact:
    """An opened artifact: its manifest, its arrays, mapped read-only, and where its experts lie, not mapped."""

    path: Path
    manifest: Manifest
    tensors: Mapping[str, NDArray[Any]]
    template: str | None
    records: tuple[LayerRecords, ...] = ()  # of the layers that have experts
    with_forecast: bool = True  # whether a fitted forecast beside its files is used

    @property
    def tokenizer_path(self) -> Path:
        return self.path / TOKENIZER_NAME

    @property
    def identity(self) -> str:
        return self.manifest.identity


def open_artifact(
    path: Path, *, verify: bool = False, read: Callable[[int], None] | None = None
) -> Artifact:
    """Open an artifact; `verify` also reads and hashes every byte of it again.

    A file that was not hashed before, or has changed since, is hashed in any case (see verified.py). Every field is
    checked against bounds before a byte of a tensor is used. read(nbytes) is told what was hashed and what was
    checked of records. Raises FileError or UnsupportedError.
    """
    if not path.is_dir():
        raise FileError(path, "open", "this is not an artifact directory")
    manifest = read_manifest(path / MANIFEST_NAME)
    _check_files(path, manifest, verify, read)
    if TOKENIZER_NAME not in manifest.files:
        raise FileError(path, TOKENIZER_NAME, "is missing")
    names = sorted(n for n in manifest.files if n.endswith(".safetensors"))
    of_experts = [path / n for n in names if n.startswith(EXPERTS_PREFIX)]
    tensors = _joined(
        (f, read_tensors(f)) for f in (path / n for n in names) if f not in of_experts
    )
    places = _joined((f, read_places(f)) for f in of_experts)
    arrays = {name: stored.data for name, (_, stored) in tensors.items()}
    check_tensors(path, manifest, arrays, release=verify)
    records = find_records(path, manifest, read_config(path, manifest), places)
    if verify:
        for layer in records:
            check_records(layer, read)
    return Artifact(path, manifest, arrays, _template(path, manifest), records)


def _joined(files: Iterable[tuple[Path, Mapping[str, T]]]) -> dict[str, tuple[Path, T]]:
    """The tensors of several files, each with its file. Raises FileError where two have one name."""
    out: dict[str, tuple[Path, T]] = {}
    for path, tensors in files:
        for key, tensor in tensors.items():
            if key in out:
                raise FileError(path, f"tensor {key!r:.120}", "occurs in two files")
            out[key] = path, tensor
    return out


def _check_files(
    path: Path, manifest: Manifest, verify: bool, read: Callable[[int], None] | None
) -> None:
    """Every file is there, has its size, and has or had its hash."""
    for name, entry in manifest.files.items():
        _check_size(path / name, entry)
    record = Record(path, manifest.identity)
    for name, entry in manifest.files.items():
        weights = name.endswith(".safetensors")
        if not weights or verify or not record.holds(path / name, entry.sha256):
            # Experts are read past the page cache; hashing them must not fill it.
            release = name.startswith(EXPERTS_PREFIX)
            digest, facts = hashed_facts(path / name, release=release, read=read)
            if digest != entry.sha256:
                cause = "the bytes are not those that the manifest names"
                raise FileError(
                    path / name, "sha256", cause, hint="convert or pull the model again"
                )
            if weights:
                record.add(path / name, digest, facts)
    record.save()


def watch(artifact: Artifact) -> Watch:
    """A watch over the files that weights lie in. Raises FileError."""
    files = artifact.manifest.files.items()
    try:
        return Watch({artifact.path / n: f.sha256 for n, f in files if n.endswith(".safetensors")})
    except OSError as error:
        raise FileError(artifact.path, "open", str(error)) from None


def _check_size(path: Path, entry: FileEntry) -> None:
    if path.is_symlink() or not path.is_file():
        raise FileError(path, "open", "is missing or not a plain file")
    if path.stat().st_size != entry.nbytes:
        raise FileError(
            path, "size", f"{path.stat().st_size:,} bytes, the manifest says {entry.nbytes:,}"
        )


def file_sha256(path: Path, read: Callable[[int], None] | None = None) -> str:
    return hashed_facts(path, read=read)[0]


def _template(path: Path, manifest: Manifest) -> str | None:
    if TEMPLATE_NAME not in manifest.files:
        return None
    try:
        return read_bytes(path / TEMPLATE_NAME, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise FileError(path / TEMPLATE_NAME, "text", "is not valid UTF-8") from None


@contextlib.contextmanager
def building(target: Path, needed_bytes: int, sign: str = TOKENIZER_NAME) -> Iterator[Path]:
    """A temporary directory beside `target` that becomes it when the block ends without an error.

    sign: the file, besides the manifest, by which what may be replaced is known. What stood at `target` before stays
    until then. Raises DiskFullError before anything is written,
    FileError where something that is no artifact would be replaced or nothing can be written.
    """
    try:
        with full_disk_told(target, needed_bytes):
            work = _begin(target, needed_bytes, sign)
            try:
                yield work
                _publish(work, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise FileError(target, "write", error.strerror or str(error)) from None


def _begin(target: Path, needed_bytes: int, sign: str) -> Path:
    if target.is_symlink() or (target.exists() and not _replaceable(target, sign)):
        raise FileError(target, "write", "exists and is no artifact; it is not replaced")
    if target.parent.is_dir():
        _remove_stale(target)  # it may be what fills the disk
    check_room(target, needed_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{working_name(target)}-", dir=target.parent))


def _replaceable(target: Path, sign: str) -> bool:
    """Whether `target` is an artifact of the same kind, or an empty directory."""
    if not target.is_dir():
        return False
    names = {entry.name for entry in target.iterdir()}
    return not names or {MANIFEST_NAME, sign} <= names


def _remove_stale(target: Path) -> None:
    """Remove what an interrupted conversion left, unless its process still lives.

    Where it was interrupted between two renames, what stood at `target` is put back.
    """
    for left in leftovers(target.parent):
        if left.target != target.name:
            continue
        if left.kind == _OLD and not target.exists():
            os.rename(left.path, target)
        else:
            shutil.rmtree(left.path, ignore_errors=True)


def _publish(work: Path, target: Path) -> None:
    work.chmod(0o755)
    for path in [*work.iterdir(), work]:
        _flush(path)
    if target.exists():
        old = target.with_name(f"{working_name(target)}-{_OLD}")
        os.rename(target, old)
        os.rename(work, target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(work, target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
