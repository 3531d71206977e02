"""safetensors files: a strict reader for untrusted ones and a writer that streams.

The reader maps the file and checks the whole header before a byte of data is used. The writer knows every
tensor's size first, so that data can be written in any order and in pieces.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.jsontext import parse_object
from headrace.errors import FileError

MAX_HEADER_BYTES = 32 << 20
ALIGNMENT = 64
_MADV_POPULATE_READ = 22  # of Linux; Python's mmap has no name for it

# BF16 has no NumPy type: it is read as raw 16-bit words.
DTYPES: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4",
    "I16": "<i2", "I8": "i1", "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "?",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """One tensor of a mapped file; `dtype` is the file's own name for it."""

    dtype: str
    data: NDArray[Any]


def map_file(path: Path) -> memoryview:
    """The whole file, mapped read-only. Raises FileError when it cannot be opened or is empty."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise FileError(path, "open", "is not a plain file")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise FileError(path, "open", error.strerror or str(error)) from None
    except ValueError:
        raise FileError(path, "size", "the file is empty") from None


def mappings(arrays: Iterable[NDArray[Any]]) -> tuple[mmap.mmap, ...]:
    """The mapped files that arrays lie in."""
    found: dict[int, mmap.mmap] = {}
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, memoryview) and isinstance(base.obj, mmap.mmap):
            found[id(base.obj)] = base.obj
    return tuple(found.values())


def load_pages(maps: Iterable[mmap.mmap]) -> None:
    """Read mapped files and map their pages, where the system can (Linux 5.14); elsewhere they come when used."""
    for mapped in maps:
        with suppress(OSError):
            mapped.madvise(_MADV_POPULATE_READ)


def forget_pages(maps: Iterable[mmap.mmap]) -> None:
    """Drop mapped pages from this process; a later read maps them again."""
    for mapped in maps:
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, mapped read-only. Raises FileError."""
    return parse_tensors(path, map_file(path))


def parse_tensors(path: Path, view: memoryview) -> dict[str, StoredTensor]:
    """Every tensor of the safetensors file whose bytes `view` holds; `path` is what errors name. Raises FileError."""
    places = _places(path, lambda begin, end: bytes(view[begin:end]), len(view))
    return {name: _tensor(view, place) for name, place in places.items()}


def read_places(path: Path) -> dict[str, Place]:
    """Where every tensor of a safetensors file lies; nothing but its header is read. Raises FileError."""
    try:
        with path.open("rb") as file:

            def read(begin: int, end: int) -> bytes:
                file.seek(begin)
                return file.read(end - begin)

            return _places(path, read, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise FileError(path, "open", error.strerror or str(error)) from None


def _places(path: Path, read: Callable[[int, int], bytes], size: int) -> dict[str, Place]:
    """The checked header of a file of `size` bytes; `read` gives bytes [begin, end)."""
    if size < 8:
        raise FileError(path, "header length", f"the file has only {size} bytes")
    length = int.from_bytes(read(0, 8), "little")
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise FileError(path, "header length", f"{length:,} bytes in a file of {size:,}")
    header = parse_object(path, "header", read(8, 8 + length), MAX_HEADER_BYTES)
    header.pop("__metadata__", None)
    start = 8 + length
    spans = {name: _span(path, name, entry, size - start) for name, entry in header.items()}
    _check_cover(path, spans, size - start)
    return {
        name: Place(header[name]["dtype"], tuple(header[name]["shape"]), start + begin, start + end)
        for name, (begin, end) in spans.items()
    }


def _span(path: Path, name: str, entry: object, size: int) -> tuple[int, int]:
    place = f"tensor {name!r:.120}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FileError(path, place, "needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FileError(path, place, f"dtype {dtype!r:.60} is not supported: {', '.join(DTYPES)}")
    if not _naturals(shape) or len(shape) > 8:
        raise FileError(path, place, f"shape {shape!r:.120} is not a list of natural numbers")
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise FileError(
            path, place, f"data_offsets {offsets!r:.120} do not lie in {size:,} bytes of data"
        )
    expected = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if expected != offsets[1] - offsets[0]:
        raise FileError(
            path,
            place,
            f"{dtype}{shape} is {expected:,} bytes, its offsets span {offsets[1] - offsets[0]:,}",
        )
    if math.prod(max(v, 1) for v in shape) >= 1 << 59:  # empty, and no array can be made of it
        raise FileError(path, place, f"shape {shape!r:.120} is too large")
    return offsets[0], offsets[1]


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _check_cover(path: Path, spans: Mapping[str, tuple[int, int]], size: int) -> None:
    """Tensors follow each other without gap or overlap and end where the file ends."""
    at = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != at:
            kind = "overlaps" if begin < at else "leaves a gap after"
            raise FileError(
                path, f"tensor {name!r:.120}", f"{kind} the tensor before it at byte {at:,}"
            )
        at = end
    if at != size:
        raise FileError(path, "end", f"{size - at:,} bytes belong to no tensor")


def _tensor(view: memoryview, place: Place) -> StoredTensor:
    flat = np.frombuffer(view[place.begin : place.end], dtype=DTYPES[place.dtype])
    return StoredTensor(place.dtype, flat.reshape(place.shape))


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


class TensorFileWriter:
    """Writes one safetensors file; tensors lie in the order of `specs`, data begins at a boundary of `alignment`."""

    def __init__(
        self, file: BinaryIO, specs: Sequence[TensorSpec], alignment: int = ALIGNMENT
    ) -> None:
        self._file = file
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {}
        at = 0
        for spec in specs:
            header[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            self._offsets[spec.name] = at
            at += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % alignment)
        self._start = 8 + len(text)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(self._start + at)

    def write(self, name: str, array: NDArray[Any], skip: int = 0) -> None:
        """Write `array` into a tensor, `skip` bytes after its begin."""
        self._file.seek(self._start + self._offsets[name] + skip)
        self._file.write(np.ascontiguousarray(array).data)
