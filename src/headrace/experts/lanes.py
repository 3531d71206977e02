"""Parallel reads of records into slots: the native lanes, and the same in Python where there are none.

A slot is marked READING by whoever submits; a lane marks it READY or FAILED when nothing writes to it any more.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.kernels.program import EMPTY, FAILED, READING, READY, ExpertSlots

BLOCK = 4096  # reads with O_DIRECT begin at multiples of it
STALLS = 100  # short reads that brought nothing new, until the file counts as unreadable

Run = tuple[
    int, Sequence[int]
]  # consecutive records of a file: where they begin, one slot for each


class Lanes(Protocol):
    """See src/native/lanes.h; every call is safe from any thread."""

    def submit(
        self, fd: int, nbytes: int, runs: Sequence[Run], drop: bool, prefetch: bool, /
    ) -> None:
        """Read records of `nbytes` into slots, which are READING.

        drop: let go of the page cache behind the read. prefetch: taken when nothing else is queued.
        """

    def promote(self, slot: int, /) -> None:
        """What is queued for this slot is needed: it goes before every prefetch."""

    def cancel(self, slot: int, /) -> bool:
        """Forget the read of one record into this slot, which becomes EMPTY; False while a lane is at it."""

    def wait(self, slot: int, /) -> int:
        """What becomes of a READING slot: READY or FAILED. Promotes it.

        Any other state at once, and READING where nothing reads into it.
        """

    def drain(self) -> None:
        """Wait until nothing is queued or being read."""

    def failure(self, slot: int, /) -> tuple[int, int]:
        """Why a slot is FAILED: errno, or 0 where the file ended, and the offset that could not be read."""

    def bytes_read(self) -> int:
        """Since the lanes were made."""

    def nanoseconds_waited(self) -> int:
        """For as long as at least one thread waited."""

    def pending(self) -> int:
        """Pieces queued or being read."""

    def close(self) -> None:
        """End the lanes after the reads in flight; what is queued becomes FAILED."""


def open_lanes(
    slots: ExpertSlots, num_lanes: int, *, piece_bytes: int, retries: int = 1, native: Any = None
) -> Lanes:
    """Lanes into these slots. Reads are cut into pieces of at most `piece_bytes`, a multiple of 4096; a piece that
    cannot be read is tried `retries` times more. native: the module `_native`, or None for Python's own threads."""
    lanes = PythonLanes if native is None else native.Lanes
    made: Lanes = lanes(slots.memory, slots.state, num_lanes, piece_bytes, retries)
    return made


@dataclass(eq=False)
class _Piece:
    fd: int
    offset: int
    nbytes: int
    parts: list[tuple[int, memoryview]]  # a slot and where in it the bytes go
    drop: bool

    @property
    def buffers(self) -> list[memoryview]:
        return [view for _, view in self.parts]


class PythonLanes:
    """Lanes that are Python threads; reads release the GIL."""

    def __init__(
        self, memory: Any, state: Any, num_lanes: int, piece_bytes: int, retries: int
    ) -> None:
        if len(state) != len(memory):
            raise ValueError("state and memory have different numbers of slots")
        if not 1 <= num_lanes <= 1024 or piece_bytes < BLOCK or piece_bytes % BLOCK or retries < 0:
            raise ValueError("lanes, piece or retries out of range")
        self._memory, self._state = memory, state
        self._piece_bytes, self._retries = piece_bytes, retries
        self._changed = threading.Condition()
        self._demand: deque[_Piece] = deque()
        self._prefetch: deque[_Piece] = deque()
        self._missing = [0] * len(state)  # bytes of a slot that no lane is done with
        self._failures: list[tuple[int, int] | None] = [None] * len(state)
        self._reading = self._waiting = self._bytes_read = 0
        self._waited = self._waiting_since = 0
        self._stop = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_lanes)]
        for thread in self._threads:
            thread.start()

    def submit(
        self, fd: int, nbytes: int, runs: Sequence[Run], drop: bool, prefetch: bool, /
    ) -> None:
        with self._changed:
            self._expect(nbytes, runs)
            for offset, slots in runs:
                end = nbytes * len(slots)
                for begin in range(0, end, self._piece_bytes):
                    stop = min(begin + self._piece_bytes, end)
                    parts = self._parts(begin, stop, nbytes, slots)
                    piece = _Piece(fd, offset + begin, stop - begin, parts, drop)
                    if self._stop:
                        self._finish(piece, (errno.ECANCELED, piece.offset))
                    else:
                        (self._prefetch if prefetch else self._demand).append(piece)
            self._changed.notify_all()

    def _expect(self, nbytes: int, runs: Sequence[Run]) -> None:
        """Mark the slots as being read into. Raises ValueError for what cannot be."""
        if not 0 < nbytes <= self._memory.shape[1] or any(offset < 0 for offset, _ in runs):
            raise ValueError("a record does not fit a slot")
        slots = [slot for _, run in runs for slot in run]
        if any(not 0 <= s < len(self._state) or self._state[s] != READING for s in slots):
            raise ValueError("a slot to read into is not marked as such")
        if len(set(slots)) < len(slots) or any(self._missing[slot] for slot in slots):
            raise ValueError("a slot is being read into already")
        for slot in slots:
            self._missing[slot], self._failures[slot] = nbytes, None

    def _parts(
        self, begin: int, end: int, nbytes: int, slots: Sequence[int]
    ) -> list[tuple[int, memoryview]]:
        """Where bytes [begin, end) of the records go."""
        parts = []
        while begin < end:
            slot, inside = slots[begin // nbytes], begin % nbytes
            count = min(nbytes - inside, end - begin)
            parts.append((slot, memoryview(self._memory[slot, inside : inside + count])))
            begin += count
        return parts

    def promote(self, slot: int, /) -> None:
        with self._changed:
            needed = [p for p in self._prefetch if any(s == slot for s, _ in p.parts)]
            for piece in needed:
                self._prefetch.remove(piece)
            self._demand.extend(needed)

    def cancel(self, slot: int, /) -> bool:
        with self._changed:
            queued = [
                p for p in (*self._demand, *self._prefetch) if [s for s, _ in p.parts] == [slot]
            ]
            if not queued or sum(p.nbytes for p in queued) != self._missing[slot]:
                return False
            for queue in (self._demand, self._prefetch):
                for piece in [p for p in queue if p in queued]:
                    queue.remove(piece)
            self._missing[slot] = 0
            self._state[slot] = EMPTY
            self._changed.notify_all()
            return True

    def wait(self, slot: int, /) -> int:
        self.promote(slot)
        with self._changed:
            if self._state[slot] != READING:
                return int(self._state[slot])
            if self._waiting == 0:
                self._waiting_since = time.monotonic_ns()
            self._waiting += 1
            self._changed.wait_for(lambda: self._state[slot] != READING or not self._missing[slot])
            self._waiting -= 1
            if self._waiting == 0:
                self._waited += time.monotonic_ns() - self._waiting_since
            return int(self._state[slot])

    def drain(self) -> None:
        with self._changed:
            self._changed.notify_all()  # for a `submit` that was interrupted before it did
            self._changed.wait_for(lambda: self.pending() == 0)
            self._missing = [0] * len(self._state)  # of one that was interrupted earlier

    def failure(self, slot: int, /) -> tuple[int, int]:
        return self._failures[slot] or (0, 0)

    def bytes_read(self) -> int:
        return self._bytes_read

    def nanoseconds_waited(self) -> int:
        return self._waited

    def pending(self) -> int:
        return len(self._demand) + len(self._prefetch) + self._reading

    def close(self) -> None:
        with self._changed:
            self._stop = True
            for queue in (self._demand, self._prefetch):
                for piece in queue:
                    self._finish(piece, (errno.ECANCELED, piece.offset))
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._demand or self._prefetch)
                if self._stop:
                    return
                piece = (self._demand or self._prefetch).popleft()
                self._reading += 1
            failure = self._read(piece)
            with self._changed:
                self._reading -= 1
                self._finish(piece, failure)
                self._changed.notify_all()

    def _finish(self, piece: _Piece, failure: tuple[int, int] | None) -> None:
        """With the lock held: the piece is done with; what lies before a failure has arrived.

        A slot is published when its last byte is done with.
        """
        end = piece.offset
        for slot, view in piece.parts:
            end += len(view)
            known = self._failures[slot]
            if failure and end > failure[1] and (known is None or failure[1] < known[1]):
                self._failures[slot] = failure
            self._missing[slot] -= len(view)
            if self._missing[slot] == 0:
                self._state[slot] = FAILED if self._failures[slot] else READY

    def _read(self, piece: _Piece) -> tuple[int, int] | None:
        failure = self._read_once(piece)
        for _ in range(self._retries):
            if failure is None or self._stop:
                break
            failure = self._read_once(piece)
        if piece.drop:
            os.posix_fadvise(piece.fd, piece.offset, piece.nbytes, os.POSIX_FADV_DONTNEED)
        return failure

    def _read_once(self, piece: _Piece) -> tuple[int, int] | None:
        # A file that ends inside a block, or a read that stops short, is seen by going back and reaching no further.
        done = reached = stalls = 0
        while done < piece.nbytes:
            if self._stop:
                return errno.ECANCELED, piece.offset + done
            try:
                count = os.preadv(piece.fd, _after(piece.buffers, done), piece.offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and done % BLOCK:
                    done -= done % BLOCK  # O_DIRECT goes on at whole blocks only
                    continue
                return error.errno or errno.EIO, piece.offset + done
            done += count
            if done <= reached:
                if os.fstat(piece.fd).st_size <= piece.offset + reached:
                    return 0, piece.offset + reached
                stalls += 1
                if stalls > STALLS:
                    return errno.EIO, piece.offset + reached
                done -= done % BLOCK
                continue
            with self._changed:
                self._bytes_read += done - reached
            reached = done
        return None


def _after(buffers: list[memoryview], skip: int) -> list[memoryview]:
    """What is left of the buffers after their first `skip` bytes; at most IOV_MAX of them."""
    left = []
    for view in buffers:
        here = min(skip, len(view))
        skip -= here
        if here < len(view):
            left.append(view[here:])
    return left[:1024]
