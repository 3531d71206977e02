"""Reads GGUF files, which may be hostile: every count, length, offset and type is checked before use.

Returns mapped bytes; what tensors and metadata mean is for others to say.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.blocks import BLOCK_FORMATS, FLOAT_TYPES
from headrace.artifact.tensorfile import map_file
from headrace.errors import FileError, UnsupportedError

MAGIC = b"GGUF"
MAX_KEYS = 65536
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 16
MAX_ELEMENTS = 1 << 40
MAX_HEADER_BYTES = 64 << 20  # everything before the data
MAX_ARRAY = 1 << 22
MAX_SPLITS = 1024

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_FLOAT_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """A tensor as it lies in the file. shape [rows, k] (or [k]), outermost first.

    data: quantised, u8 [rows, blocks, block bytes]; otherwise the floats (BF16 as u16) in `shape`.
    """

    name: str
    type_code: int
    shape: tuple[int, ...]
    data: NDArray[Any]

    @property
    def type_name(self) -> str:
        return FLOAT_TYPES.get(self.type_code) or BLOCK_FORMATS[self.type_code].name


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """Metadata and tensors of a GGUF file (all parts of a split one)."""

    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @property
    def path(self) -> Path:
        return self.parts[0]


class _Cursor:
    """Reads values from a mapped file and refuses to leave it."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.at = 0

    def fail(self, place: str, cause: str) -> FileError:
        return FileError(self.path, f"{place} (byte {self.at:,})", cause)

    def take(self, count: int, place: str) -> memoryview:
        left = len(self.view) - self.at
        if count > left:
            raise self.fail(
                place, f"needs {count:,} bytes, {left:,} are left: the file is truncated"
            )
        if count > MAX_HEADER_BYTES - self.at:
            raise self.fail(place, f"the header is larger than {MAX_HEADER_BYTES:,} bytes")
        self.at += count
        return self.view[self.at - count : self.at]

    def number(self, code: str, place: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code), place))[0]

    def text(self, place: str) -> str:
        length = self.number("<Q", place)
        try:
            return str(self.take(length, place), "utf-8")
        except UnicodeDecodeError:
            raise self.fail(place, "text is not valid UTF-8") from None


def read_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file and, if it says that it is split, its other parts. Raises FileError."""
    first = _read_part(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    if count > MAX_SPLITS:
        raise FileError(path, "split.count", f"{count} parts; at most {MAX_SPLITS} are read")
    return _join(path, [_read_part(p) for p in _part_paths(path, count)])


def _part_paths(path: Path, count: int) -> list[Path]:
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or int(match[3]) != count or int(match[2]) != 1:
        raise FileError(
            path, "split.count", f"is {count}; name the first part, NAME-00001-of-{count:05d}.gguf"
        )
    return [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _join(path: Path, parts: list[GGUFFile]) -> GGUFFile:
    tensors: dict[str, GGUFTensor] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number:
            raise FileError(
                part.path, "split.no", f"is {part.metadata.get('split.no')}, not {number}"
            )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise FileError(part.path, f"tensor {name!r}", "occurs in two parts")
            tensors[name] = tensor
    wanted = parts[0].metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise FileError(path, "split.tensors.count", f"is {wanted}, the parts hold {len(tensors)}")
    return GGUFFile(tuple(p.path for p in parts), parts[0].metadata, tensors)


def _read_part(path: Path) -> GGUFFile:
    cursor = _Cursor(path, map_file(path))
    if cursor.take(4, "magic") != MAGIC:
        raise FileError(path, "magic", "this is not a GGUF file")
    version = cursor.number("<I", "version")
    if version not in (2, 3):
        raise FileError(path, "version", f"{version} is not supported: 2, 3")
    num_tensors = cursor.number("<Q", "tensor count")
    num_keys = cursor.number("<Q", "key count")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise FileError(
            path, "counts", f"{num_tensors:,} tensors and {num_keys:,} keys are too many"
        )
    metadata = _read_metadata(cursor, num_keys)
    infos = [_read_info(cursor, i) for i in range(num_tensors)]
    return GGUFFile((path,), metadata, _map_tensors(cursor, infos, _alignment(path, metadata)))


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for index in range(count):
        key = cursor.text(f"key {index}")
        place = f"key {key!r:.120}"
        if key in out:
            raise cursor.fail(place, "occurs twice")
        out[key] = _read_value(cursor, cursor.number("<I", place), place)
    return out


def _read_value(cursor: _Cursor, kind: int, place: str) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], place)
    if kind == _STRING:
        return cursor.text(place)
    if kind == _ARRAY:
        return _read_array(cursor, place)
    raise cursor.fail(place, f"value type {kind} is not known")


def _read_array(cursor: _Cursor, place: str) -> list[Any]:
    kind, count = cursor.number("<I", place), cursor.number("<Q", place)
    if kind == _ARRAY:
        raise cursor.fail(place, "arrays of arrays are not supported")
    left = len(cursor.view) - cursor.at
    if kind == _STRING:
        if count > left // 8:
            raise cursor.fail(
                place, f"{count:,} strings do not fit the {left:,} bytes that are left"
            )
        if count > MAX_ARRAY:
            raise cursor.fail(place, f"{count:,} elements are more than {MAX_ARRAY:,}")
        return [cursor.text(place) for _ in range(count)]
    if kind not in _SCALARS:
        raise cursor.fail(place, f"element type {kind} is not known")
    size = struct.calcsize(_SCALARS[kind])
    if count > left // size:
        raise cursor.fail(place, f"{count:,} elements do not fit the {left:,} bytes that are left")
    if count > MAX_ARRAY:
        raise cursor.fail(place, f"{count:,} elements are more than {MAX_ARRAY:,}")
    values: list[Any] = np.frombuffer(cursor.take(count * size, place), _SCALARS[kind]).tolist()
    return values


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    type_code: int
    offset: int
    nbytes: int


def _read_info(cursor: _Cursor, index: int) -> _Info:
    name = cursor.text(f"tensor {index}")
    place = f"tensor {name!r:.120}"
    num_dims = cursor.number("<I", place)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(place, f"{num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = [cursor.number("<Q", place) for _ in range(num_dims)]
    if any(d == 0 for d in dims) or math.prod(dims) > MAX_ELEMENTS:
        raise cursor.fail(place, f"shape {dims} is empty or too large")
    type_code, offset = cursor.number("<I", place), cursor.number("<Q", place)
    nbytes = _tensor_bytes(cursor, place, dims, type_code)
    return _Info(name, tuple(reversed(dims)), type_code, offset, nbytes)


def _tensor_bytes(cursor: _Cursor, place: str, dims: list[int], type_code: int) -> int:
    if type_code in FLOAT_TYPES:
        return math.prod(dims) * _FLOAT_BYTES[FLOAT_TYPES[type_code]]
    if type_code not in BLOCK_FORMATS:
        known = [*FLOAT_TYPES.values(), *(f.name for f in BLOCK_FORMATS.values())]
        raise UnsupportedError(
            f"{cursor.path}: {place}: tensor type {type_code} is not supported: {', '.join(known)}"
        )
    block = BLOCK_FORMATS[type_code]
    if dims[0] % block.elements:
        raise cursor.fail(place, f"rows of {dims[0]} are no whole {block.name} blocks")
    return math.prod(dims) // block.elements * block.nbytes


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise FileError(
            path, "general.alignment", f"{value!r} is not a power of two up to {MAX_ALIGNMENT}"
        )
    return value


def _map_tensors(cursor: _Cursor, infos: list[_Info], alignment: int) -> dict[str, GGUFTensor]:
    start = -(-cursor.at // alignment) * alignment
    size = len(cursor.view) - start
    end = 0
    out: dict[str, GGUFTensor] = {}
    for info in sorted(infos, key=lambda i: i.offset):
        place = f"tensor {info.name!r:.120}"
        if info.name in out:
            raise FileError(cursor.path, place, "occurs twice")
        if info.offset % alignment:
            raise FileError(
                cursor.path, place, f"offset {info.offset:,} is not a multiple of {alignment}"
            )
        if info.offset < end:
            raise FileError(
                cursor.path, place, f"offset {info.offset:,} overlaps the tensor before it"
            )
        if end + alignment <= info.offset <= size:
            raise FileError(
                cursor.path, place, f"{info.offset - end:,} bytes before it belong to no tensor"
            )
        end = info.offset + info.nbytes
        if end > size:
            raise FileError(
                cursor.path,
                place,
                f"ends at byte {start + end:,} of a file of {len(cursor.view):,}",
            )
        out[info.name] = _tensor(info, cursor.view[start + info.offset : start + end])
    if size - end >= alignment:
        raise FileError(cursor.path, "end", f"{size - end:,} bytes belong to no tensor")
    return out


def _tensor(info: _Info, raw: memoryview) -> GGUFTensor:
    if info.type_code in FLOAT_TYPES:
        data = np.frombuffer(raw, _FLOAT_DTYPES[FLOAT_TYPES[info.type_code]]).reshape(info.shape)
    else:
        block = BLOCK_FORMATS[info.type_code]
        rows = math.prod(info.shape[:-1])
        data = np.frombuffer(raw, np.uint8).reshape(rows, -1, block.nbytes)
    return GGUFTensor(info.name, info.type_code, info.shape, data)
