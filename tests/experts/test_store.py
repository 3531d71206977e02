"""The store: what cannot be read is refused by name when it is opened, or a typed error later."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts.disk import BLOCK, GAP, layout, painted, write
from headrace.errors import ExpertReadError, FileError
from headrace.experts.slots import SlotPool
from headrace.experts.store import ExpertStore
from headrace.kernels.program import EMPTY, FAILED, READING, READY

SIZES, EXPERTS = [3 * BLOCK, 5 * BLOCK, 5 * BLOCK], 8
SHARED_MEMORY = Path("/dev/shm")


def open_store(folder: Path, native: Any, **options: Any) -> tuple[SlotPool, ExpertStore]:
    records = write(folder, SIZES, EXPERTS)
    pool = SlotPool(records, 3, EXPERTS, 16, 16)
    return pool, ExpertStore(records, pool.slots, native=native, **options)


def assert_holds(pool: SlotPool, slot: int, layer: int, expert: int) -> None:
    size = SIZES[layer]
    assert np.array_equal(pool.slots.memory[slot, :size], painted(layer, expert, size))


@pytest.mark.parametrize("direct", [True, False])
def test_every_record_of_every_layer(tmp_path: Path, native: Any, direct: bool) -> None:
    pool, store = open_store(tmp_path, native, direct=direct, num_lanes=2, piece_bytes=BLOCK)
    assert store.direct == direct
    for layer in range(3):
        for half in ([0, 1, 2, 5], [3, 4, 6, 7]):
            placed = pool.claim(layer, half, ())
            (store.read if layer == 1 else store.read_runs)(layer, placed)
            for expert, slot in placed:
                assert store.lanes.wait(slot) == READY
                assert_holds(pool, slot, layer, expert)
    assert store.lanes.bytes_read() == EXPERTS * sum(SIZES)
    store.close()
    store.close()


def test_a_file_system_without_direct_reads(native: Any) -> None:
    """Whether it has them or not, the records are read."""
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("no file system in memory")
    folder = SHARED_MEMORY / f"experts-{os.getpid()}-{native is None}"
    folder.mkdir()
    try:
        pool, store = open_store(folder, native)
        for expert, slot in pool.claim(2, [7, 3], ()):
            store.read(2, [(expert, slot)])
            assert store.lanes.wait(slot) == READY
            assert_holds(pool, slot, 2, expert)
        store.close()
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def cached_pages(path: Path) -> int:
    """Pages of a file in the page cache, as the kernel sees them."""
    text = subprocess.run(
        ["fincore", "-nb", "-o", "PAGES", path], capture_output=True, text=True, check=True
    )
    return int(text.stdout)


@pytest.mark.parametrize("direct", [True, False])
def test_reads_leave_nothing_in_the_page_cache(tmp_path: Path, native: Any, direct: bool) -> None:
    pool, store = open_store(tmp_path, native, direct=direct)
    path = tmp_path / "experts-00002.safetensors"
    try:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        before = cached_pages(path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no fincore to ask the page cache with")
    placed = pool.claim(2, list(range(EXPERTS)), ())
    store.read_runs(2, placed)
    assert all(store.lanes.wait(slot) == READY for _, slot in placed)
    store.lanes.drain()
    assert cached_pages(path) <= before
    store.close()


def test_a_missing_or_short_file_is_refused_when_it_is_opened(tmp_path: Path, native: Any) -> None:
    records = write(tmp_path, SIZES, EXPERTS)
    pool = SlotPool(records, 3, EXPERTS, 4, 4)
    os.truncate(records[2].path, records[2].path.stat().st_size - 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileError, match="experts of layer 2: needs .* bytes, the file has"):
        ExpertStore(records, pool.slots, native=native)
    records[2].path.unlink()
    with pytest.raises(FileError, match="No such file"):
        ExpertStore(records, pool.slots, native=native)
    with pytest.raises(FileError, match="multiples of 4096"):
        ExpertStore([replace(records[0], offset=GAP + 1)], pool.slots, native=native)
    with pytest.raises(FileError, match="multiples of 4096"):
        ExpertStore([replace(records[0], layout=layout(BLOCK + 64))], pool.slots, native=native)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_an_expert_that_is_not_there_is_no_read(tmp_path: Path, native: Any) -> None:
    _, store = open_store(tmp_path, native)
    with pytest.raises(ValueError, match="no expert 8"):
        store.read(0, [(EXPERTS, 0)])
    with pytest.raises(ValueError, match="no expert -1"):
        store.read(0, [(-1, 0)])
    store.close()


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path, native: Any) -> None:
    pool, store = open_store(tmp_path, native)
    path = tmp_path / "experts-00002.safetensors"
    os.truncate(path, GAP + 6 * SIZES[2] + 100)
    placed = pool.claim(2, [5, 6, 7], ())
    store.read(2, placed)
    states = [store.lanes.wait(slot) for _, slot in placed]
    assert states == [READY, FAILED, FAILED]
    assert_holds(pool, placed[0][1], 2, 5)
    error = store.error(2, *placed[1])
    assert isinstance(error, ExpertReadError)
    assert error.message == (
        f"layer 2, expert 6: {path} ends at byte {GAP + 6 * SIZES[2] + 100}, inside it"
    )
    store.close()


DRIVER = """
import json, sys
from pathlib import Path
import numpy as np
from experts.disk import painted, write
from experts.test_store import EXPERTS, SIZES
from headrace.experts.slots import SlotPool
from headrace.experts.store import ExpertStore
from headrace.kernels.select import native_module

native = native_module() if sys.argv[2] == "native" else None
records = write(Path(sys.argv[1]), SIZES, EXPERTS)
pool = SlotPool(records, 3, EXPERTS, 16, 16)
store = ExpertStore(records, pool.slots, native=native, num_lanes=2, piece_bytes=4 * 4096)
placed = pool.claim(2, [4, 5], ())
store.read(2, placed)
out = []
for expert, slot in placed:
    state = store.lanes.wait(slot)
    whole = np.array_equal(pool.slots.memory[slot], painted(2, expert, SIZES[2]))
    reason = store.error(2, expert, slot).message
    out.append([state, whole, *store.lanes.failure(slot), reason, store.direct])
print(json.dumps(out))
store.close()
"""


# One lane stands at the gate with expert 0 while the others are queued, promoted and cancelled.
ORDER_DRIVER = """
import json, sys
from pathlib import Path
from experts.disk import GAP
from experts.test_store import open_store, SIZES
from headrace.kernels.select import native_module

native = native_module() if sys.argv[2] == "native" else None
pool, store = open_store(Path(sys.argv[1]), native, num_lanes=1, piece_bytes=2 * 4096)
lanes, slot = store.lanes, dict(pool.claim(2, list(range(8)), ()))
store.read(2, [(0, slot[0])])
while str(GAP) not in Path(sys.argv[3]).read_text().split():
    pass
store.read(2, [(e, slot[e]) for e in (1, 2, 3, 4)], prefetch=True)
store.read(2, [(e, slot[e]) for e in (5, 6)])
cancelled = [e for e in (0, 2, 6) if lanes.cancel(slot[e])]
lanes.promote(slot[4])
states = pool.slots.state[[slot[e] for e in range(8)]].tolist()
Path(sys.argv[4]).touch()
lanes.wait(slot[3])
lanes.drain()
offsets = [int(line) for line in Path(sys.argv[3]).read_text().split()]
order = dict.fromkeys((at - GAP) // SIZES[2] for at in offsets if at >= GAP)  # without the probes
print(json.dumps([cancelled, states, list(order), pool.slots.state.tolist()]))
store.close()
"""


def driven(
    folder: Path, native: Any, shim: Path, driver: str = DRIVER, **environment: object
) -> list[list[Any]]:
    """What a driver prints of a store whose reads the shim disturbs.

    By default: state, contents, errno, offset, message and whether reads are direct, of two experts.
    """
    given = {f"SHIM_{name.upper()}": str(value) for name, value in environment.items()}
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [
            *(sys.executable, "-c", driver, str(folder)),
            *("python" if native is None else "native", str(folder / "log"), str(folder / "gate")),
        ],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": paths, **given},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    out: list[list[Any]] = json.loads(done.stdout)
    return out


def test_an_error_of_the_disk_is_retried_once(tmp_path: Path, native: Any, shim: Path) -> None:
    bad = GAP + 5 * SIZES[2] + BLOCK
    once = driven(tmp_path, native, shim, offset=bad, times=1)
    assert [one[:2] for one in once] == [[READY, True], [READY, True]]
    twice = driven(tmp_path, native, shim, offset=bad, times=2)
    assert [one[0] for one in twice] == [READY, FAILED]
    assert twice[0][1]
    assert twice[1][2:4] == [errno.EIO, GAP + 5 * SIZES[2]]
    assert twice[1][4].startswith("layer 2, expert 5: ")
    assert twice[1][4].endswith(os.strerror(errno.EIO))


@pytest.mark.parametrize("most", [700, BLOCK, 3 * BLOCK - 700])
def test_short_and_interrupted_reads_go_on(
    tmp_path: Path, native: Any, shim: Path, most: int
) -> None:
    """Short at any byte: O_DIRECT then goes on at the block before it."""
    done = driven(tmp_path, native, shim, most=most)
    if most >= BLOCK:
        assert [one[:2] for one in done] == [[READY, True], [READY, True]]
    else:  # a disk that never gives a whole block
        assert [one[0] for one in done] == [FAILED, FAILED]


@pytest.mark.parametrize(("refuses", "direct"), [(0, True), (1, False), (2, False)])
def test_where_direct_reads_are_refused_files_are_read_plainly(
    tmp_path: Path, native: Any, shim: Path, refuses: int, direct: bool
) -> None:
    """Some file systems refuse to open, some to read."""
    done = driven(tmp_path, native, shim, no_direct=refuses)
    assert [(one[0], one[1], one[5]) for one in done] == [(READY, True, direct)] * 2


def test_what_is_needed_goes_before_what_is_foretold(
    tmp_path: Path, native: Any, shim: Path
) -> None:
    at = GAP + 1  # in expert 0 of layer 2
    cancelled, states, order, after = driven(
        tmp_path,
        native,
        shim,
        ORDER_DRIVER,
        offset=at,
        gate=tmp_path / "gate",
        log=tmp_path / "log",
    )
    assert cancelled == [2, 6]  # a lane was at 0
    assert states == [READING, READING, EMPTY, READING, READING, READING, EMPTY, READING]
    assert order[:3] == [0, 5, 4]
    assert sorted(order) == [0, 1, 3, 4, 5]
    assert after[:8] == [READY, READY, EMPTY, READY, READY, READY, EMPTY, READING]
