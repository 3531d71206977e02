"""The store: files of records, opened once, and the lanes that read them into slots.

Files are opened with O_DIRECT, so that reads land in slots without a copy and without growing the page cache. Where
a file system does not do that, they are read plainly and the page cache is told to let go.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.artifact.records import RECORD_ALIGNMENT, LayerRecords
from headrace.errors import ExpertReadError, FileError
from headrace.experts.lanes import open_lanes
from headrace.kernels.program import ExpertSlots

NUM_LANES = 4
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class _File:
    fd: int
    direct: bool


class ExpertStore:
    """Reads experts of `records` into `slots`.

    native: the module `_native`, or None for Python's own threads. direct: whether to try O_DIRECT.
    Raises FileError for a file that is missing or too short for its records.
    """

    def __init__(
        self,
        records: Sequence[LayerRecords],
        slots: ExpertSlots,
        *,
        num_lanes: int = NUM_LANES,
        piece_bytes: int = PIECE_BYTES,
        native: Any = None,
        direct: bool = True,
    ) -> None:
        self._records = {r.layer: r for r in records}
        self._slots = slots
        self._files: dict[Path, _File] = {}
        try:
            for path in sorted({r.path for r in records}):
                self._files[path] = _open(path, direct)
            for one in records:
                _check(one, self._files[one.path].fd)
            self.lanes = open_lanes(slots, num_lanes, piece_bytes=piece_bytes, native=native)
        except BaseException:
            self._close_files()
            raise

    @property
    def direct(self) -> bool:
        """Whether every file is read with O_DIRECT."""
        return all(file.direct for file in self._files.values())

    def read(
        self, layer: int, placed: Sequence[tuple[int, int]], *, prefetch: bool = False
    ) -> None:
        """Begin to read experts into their slots, [(expert, slot)], each as a read of its own."""
        self._submit(layer, [(expert, [slot]) for expert, slot in placed], prefetch)

    def read_runs(self, layer: int, placed: Sequence[tuple[int, int]]) -> None:
        """Like `read` with experts in rising order; neighbours in the file are one read."""
        runs: list[tuple[int, list[int]]] = []
        for expert, slot in placed:
            if runs and expert == runs[-1][0] + len(runs[-1][1]):
                runs[-1][1].append(slot)
            else:
                runs.append((expert, [slot]))
        self._submit(layer, runs, False)

    def error(self, layer: int, expert: int, slot: int) -> ExpertReadError:
        """Why this expert could not be read into this slot."""
        number, offset = self.lanes.failure(slot)
        path = self._records[layer].path
        if number == 0:
            return ExpertReadError(layer, expert, f"{path} ends at byte {offset}, inside it")
        return ExpertReadError(layer, expert, f"{path}, offset {offset}: {os.strerror(number)}")

    def close(self) -> None:
        """End the lanes and close the files."""
        self.lanes.close()
        self._close_files()

    def _submit(self, layer: int, runs: list[tuple[int, list[int]]], prefetch: bool) -> None:
        """Runs of neighbouring experts: the first one, a slot for each."""
        record = self._records[layer]
        file, nbytes = self._files[record.path], record.layout.nbytes
        for expert, slots in runs:
            if not 0 <= expert <= record.num_experts - len(slots):
                raise ValueError(f"layer {layer} has no expert {expert + len(slots) - 1}")
        begun = [(record.offset + expert * nbytes, slots) for expert, slots in runs]
        self.lanes.submit(file.fd, nbytes, begun, not file.direct, prefetch)

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()


def _open(path: Path, direct: bool) -> _File:
    try:
        if direct and hasattr(os, "O_DIRECT"):
            fd = _open_direct(path)
            if fd is not None:
                return _File(fd, True)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(path, "experts", error.strerror or str(error)) from None
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return _File(fd, False)


def _open_direct(path: Path) -> int | None:
    """A descriptor that has really read with O_DIRECT; None where that is not supported."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    try:
        with mmap.mmap(-1, RECORD_ALIGNMENT) as block:
            os.preadv(fd, [block], 0)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return None
        raise
    return fd


def _check(record: LayerRecords, fd: int) -> None:
    place = f"experts of layer {record.layer}"
    if record.offset % RECORD_ALIGNMENT or record.layout.nbytes % RECORD_ALIGNMENT:
        raise FileError(record.path, place, f"records are not at multiples of {RECORD_ALIGNMENT}")
    end = record.offset + record.num_experts * record.layout.nbytes
    size = os.fstat(fd).st_size
    if size < end:
        raise FileError(record.path, place, f"needs {end} bytes, the file has {size}")
