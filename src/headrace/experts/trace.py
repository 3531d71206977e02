"""Recorded routes: which experts every position of every layer chose, for the simulator in bench/.

A file is one line of JSON (version, num_layers, num_experts, top_k) and after it records of little-endian integers:
position u32, layer u16, experts u16[top_k], in the order in which layers ran.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.container import TOKENIZER_NAME
from headrace.artifact.manifest import MANIFEST_NAME
from headrace.errors import FileError

VERSION = 1
_MAX_HEADER = 4096


@dataclass(frozen=True)
class RouteHeader:
    """What the records of a file mean."""

    num_layers: int
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype([("position", "<u4"), ("layer", "<u2"), ("experts", "<u2", (self.top_k,))])


class RouteRecorder:
    """Writes a file of routes.

    Only a new or empty file, or an older recording in its place; never a file of a model. The first thing that cannot
    be written ends the recording, not the passes that are recorded: `close` raises it. Raises FileError.
    """

    def __init__(self, path: Path, header: RouteHeader) -> None:
        self._dtype = header.dtype
        self._path = path
        self._error: FileError | None = None
        _check_place(path)
        try:
            self._file = path.open("wb")
            line = json.dumps({"version": VERSION, **asdict(header)}).encode() + b"\n"
            try:
                self._file.write(line)
                self._file.flush()  # whatever ends the process, what follows can be read
            except OSError:
                self._abandon()
                raise
        except OSError as error:
            raise _failed(path, error) from None

    def add(
        self, layer: int, positions: NDArray[np.integer[Any]], experts: NDArray[np.integer[Any]]
    ) -> None:
        """What a layer chose: positions i32[rows], experts i32[rows, top_k]."""
        if self._error is not None:
            return
        rows = np.empty(len(positions), self._dtype)
        rows["position"], rows["layer"], rows["experts"] = positions, layer, experts
        try:
            self._file.write(rows.tobytes())
        except OSError as error:
            self._error = _failed(self._path, error)

    def close(self) -> None:
        """Finish the file. Raises FileError, once, for what could not be written."""
        try:
            self._file.close()
        except OSError as error:
            self._error = self._error or _failed(self._path, error)
        failed, self._error = self._error, None
        if failed is not None:
            raise failed

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _failed(path: Path, error: OSError) -> FileError:
    return FileError(path, "routes", error.strerror or str(error))


def _check_place(path: Path) -> None:
    """Raises FileError for a place where something else is, or that belongs to a model."""
    try:
        if all((path.resolve().parent / name).exists() for name in (MANIFEST_NAME, TOKENIZER_NAME)):
            raise FileError(path, "routes", "lies in a model's directory; give another place")
        if not path.exists():
            return
        if not path.is_file():
            raise FileError(path, "routes", "is not a plain file")
        with path.open("rb") as file:
            begin = file.read(_MAX_HEADER + 1)
    except OSError as error:
        raise _failed(path, error) from None
    if begin:
        try:
            _split(path, begin)
        except FileError:
            cause = "exists and is no recording of routes; it is not replaced"
            raise FileError(path, "routes", cause) from None


def read_routes(path: Path) -> tuple[RouteHeader, NDArray[np.void]]:
    """The header and the whole records of a file (fields position, layer, experts); a torn last one is left out.

    Raises FileError for a file that is no such recording.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(path, "routes", error.strerror or str(error)) from None
    header, body = _split(path, data)
    size = header.dtype.itemsize
    routes = np.frombuffer(body, header.dtype, len(body) // size)
    if len(routes) and (
        routes["layer"].max() >= header.num_layers or routes["experts"].max() >= header.num_experts
    ):
        raise FileError(path, "records", "a layer or an expert beyond those of the header")
    return header, routes


def _split(path: Path, data: bytes) -> tuple[RouteHeader, bytes]:
    """The header and what follows it. Raises FileError."""
    line, newline, body = data.partition(b"\n")
    try:
        if not newline or len(line) > _MAX_HEADER:
            raise ValueError("it does not begin with a header")
        return _header(json.loads(line)), body
    except (ValueError, RecursionError) as error:
        raise FileError(path, "header", f"not a recording of routes: {error}") from None


def _header(value: Any) -> RouteHeader:
    wanted = {"version", "num_layers", "num_experts", "top_k"}
    if not isinstance(value, dict) or set(value) != wanted:
        raise ValueError(f"its header has not the keys {', '.join(sorted(wanted))}")
    if value.pop("version") != VERSION:
        raise ValueError(f"its version is not {VERSION}")
    if not all(type(n) is int and 0 < n < 1 << 16 for n in value.values()):
        raise ValueError("a size is out of range")
    return RouteHeader(**value)
