"""Both kinds of lanes: what is read is what the file holds, and every failure says which byte and why."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts.disk import BLOCK, painted, write
from headrace.experts.lanes import Lanes, open_lanes
from headrace.experts.slots import SlotPool
from headrace.kernels.program import EMPTY, FAILED, READING, READY, ExpertSlots

RECORD = 5 * BLOCK
EXPERTS = 12


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, [RECORD], EXPERTS)[0].path


@contextmanager
def lanes_into(
    path: Path, native: Any, num_lanes: int = 3, piece: int = 2 * BLOCK, direct: bool = True
) -> Iterator[tuple[Lanes, ExpertSlots, int]]:
    records = write(path.parent / "", [RECORD], EXPERTS, "layout")
    slots = SlotPool(records, 1, EXPERTS, EXPERTS, EXPERTS).slots
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    lanes = open_lanes(slots, num_lanes, piece_bytes=piece, native=native)
    try:
        yield lanes, slots, fd
    finally:
        lanes.close()
        os.close(fd)


def submit(
    lanes: Lanes, slots: ExpertSlots, fd: int, expert: int, into: list[int], prefetch: bool = False
) -> None:
    slots.state[into] = READING
    lanes.submit(fd, RECORD, [(2 * BLOCK + expert * RECORD, into)], False, prefetch)


def holds(slots: ExpertSlots, slot: int, expert: int) -> bool:
    return np.array_equal(slots.memory[slot], painted(0, expert, RECORD))


@pytest.mark.parametrize("num_lanes", [1, 2, 7])
@pytest.mark.parametrize("piece", [BLOCK, 2 * BLOCK, RECORD, 64 * BLOCK])
@pytest.mark.parametrize("direct", [True, False])
def test_records_arrive_whole(
    path: Path, native: Any, num_lanes: int, piece: int, direct: bool
) -> None:
    with lanes_into(path, native, num_lanes, piece, direct) as (lanes, slots, fd):
        for expert in (3, 0, 11):
            submit(lanes, slots, fd, expert, [EXPERTS - 1 - expert], prefetch=expert == 0)
        submit(lanes, slots, fd, 4, [9, 1, 7])  # neighbours in one read, scattered
        expected = {8: 3, 11: 0, 0: 11, 9: 4, 1: 5, 7: 6}
        assert [lanes.wait(slot) for slot in expected] == [READY] * 6
        assert all(holds(slots, slot, expert) for slot, expert in expected.items())
        lanes.drain()
        assert lanes.pending() == 0
        assert lanes.bytes_read() == 6 * RECORD
        assert sum(slots.state == READY) == 6


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("cut", [1, BLOCK, BLOCK + 17, RECORD])
def test_a_file_that_ends_early_fails_only_what_it_lacks(
    path: Path, native: Any, direct: bool, cut: int
) -> None:
    with lanes_into(path, native, direct=direct) as (lanes, slots, fd):
        os.truncate(path, path.stat().st_size - cut)
        submit(lanes, slots, fd, EXPERTS - 2, [0, 1])
        assert lanes.wait(1) == FAILED
        assert lanes.failure(1) == (0, path.stat().st_size)
        assert lanes.wait(0) == READY
        assert holds(slots, 0, EXPERTS - 2)


def test_an_error_of_the_system_is_named_and_the_slot_is_usable_again(
    path: Path, native: Any
) -> None:
    with lanes_into(path, native) as (lanes, slots, fd):
        wrong = os.open(path, os.O_WRONLY)
        submit(lanes, slots, wrong, 2, [5])
        assert lanes.wait(5) == FAILED
        assert lanes.failure(5)[0] == errno.EBADF
        os.close(wrong)
        submit(lanes, slots, fd, 2, [5])
        assert lanes.wait(5) == READY
        assert holds(slots, 5, 2)


def test_queued_prefetches_can_be_cancelled_and_nothing_else(path: Path, native: Any) -> None:
    """One lane works through a long queue; what is behind in it is certainly still queued or done."""
    with lanes_into(path, native, num_lanes=1, piece=BLOCK) as (lanes, slots, fd):
        for slot in range(EXPERTS):
            submit(lanes, slots, fd, slot, [slot], prefetch=True)
        cancelled = {slot for slot in reversed(range(EXPERTS)) if lanes.cancel(slot)}
        lanes.drain()
        for slot in range(EXPERTS):
            assert slots.state[slot] == (EMPTY if slot in cancelled else READY)
            assert slot in cancelled or holds(slots, slot, slot)
        assert not lanes.cancel(0) or 0 in cancelled
        for slot in cancelled:  # a cancelled slot can be read into at once
            submit(lanes, slots, fd, (slot + 1) % EXPERTS, [slot])
        assert all(lanes.wait(slot) == READY for slot in cancelled)
        assert all(holds(slots, slot, (slot + 1) % EXPERTS) for slot in cancelled)


def test_a_merged_read_is_not_cancelled_in_part(path: Path, native: Any) -> None:
    with lanes_into(path, native, num_lanes=1, piece=64 * BLOCK) as (lanes, slots, fd):
        submit(lanes, slots, fd, 0, [0, 1, 2], prefetch=True)
        assert not lanes.cancel(1)
        assert lanes.wait(1) == READY


def test_a_slot_takes_one_read_at_a_time(path: Path, native: Any) -> None:
    with lanes_into(path, native, num_lanes=1, piece=BLOCK) as (lanes, slots, fd):
        with pytest.raises(ValueError, match="already"):
            submit(lanes, slots, fd, 0, [3, 3])
        submit(lanes, slots, fd, 0, [3])  # the refused one left nothing behind
        assert lanes.wait(3) == READY
        with pytest.raises(ValueError, match="marked"):
            lanes.submit(fd, RECORD, [(2 * BLOCK, [3])], False, False)
        with pytest.raises(ValueError, match="fit"):
            lanes.submit(fd, RECORD + 1, [(2 * BLOCK, [4])], False, False)


def test_many_threads_wait_for_one_prefetch(path: Path, native: Any) -> None:
    with lanes_into(path, native, num_lanes=1, piece=BLOCK) as (lanes, slots, fd):
        for slot in range(EXPERTS):
            submit(lanes, slots, fd, slot, [slot], prefetch=True)
        seen: list[int] = []
        threads = [
            threading.Thread(target=lambda: seen.append(lanes.wait(EXPERTS - 1))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [READY] * 4
        assert holds(slots, EXPERTS - 1, EXPERTS - 1)


def test_close_fails_what_is_queued_and_wakes_who_waits(path: Path, native: Any) -> None:
    with lanes_into(path, native, num_lanes=1, piece=BLOCK) as (lanes, slots, fd):
        for slot in range(EXPERTS):
            submit(lanes, slots, fd, slot, [slot], prefetch=slot % 2 == 0)
        seen: list[int] = []
        waiter = threading.Thread(target=lambda: seen.append(lanes.wait(EXPERTS - 1)))
        waiter.start()
        lanes.close()
        waiter.join()
        assert seen[0] in (READY, FAILED)
        assert READING not in slots.state
        for slot in range(EXPERTS):
            if slots.state[slot] == READY:
                assert holds(slots, slot, slot)
            else:
                assert lanes.failure(slot)[0] == errno.ECANCELED
        submit(lanes, slots, fd, 0, [0])
        assert lanes.wait(0) == FAILED
