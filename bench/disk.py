"""The disk as experts use it: MB/s of O_DIRECT reads of random records, by lane count, record and piece size.

`python -m bench.disk FOLDER` makes a file of random bytes there, measures and removes it. Two patterns: "stream"
keeps reads queued at all times, as a sweep does; "burst" asks for some records and waits for all of them, as a layer of
decode does. The page cache is not involved.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.machine import ROOT, new_run
from bench.rows import Row, append
from headrace.artifact.records import LayerRecords
from headrace.experts.slots import SlotPool
from headrace.experts.store import ExpertStore
from headrace.kernels.program import READING, READY, ExpertLayout, WeightSpans
from headrace.kernels.select import native_module

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 4096


def make_file(path: Path, nbytes: int) -> None:
    """A file of random bytes, on the disk when this returns."""
    piece = os.urandom(16 * MIB)
    with path.open("wb") as file:
        for _ in range(nbytes // len(piece)):
            file.write(piece)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def records_of(path: Path, nbytes: int) -> LayerRecords:
    """The file as records of nbytes."""
    nothing = WeightSpans({}, 0, 0, 4, 32)
    count = path.stat().st_size // nbytes
    return LayerRecords(0, path, 0, count, ExpertLayout(nothing, nothing, nbytes))


def endless(count: int, rng: random.Random) -> Iterator[int]:
    """Records in random order, all before any again."""
    while True:
        yield from rng.sample(range(count), count)


def rate(
    records: LayerRecords, lanes: int, piece: int, burst: int, seconds: float
) -> tuple[float, float]:
    """(MB/s, processor seconds a GB) of random reads; burst 0: always 2 reads a lane queued."""
    depth = burst or max(2 * lanes, 4)
    pool = SlotPool([records], 1, records.num_experts, depth, depth)
    store = ExpertStore(
        [records], pool.slots, num_lanes=lanes, piece_bytes=piece, native=native_module()
    )
    if not store.direct:
        raise OSError("the folder's file system has no O_DIRECT")
    experts = endless(records.num_experts, random.Random(lanes))
    free, reading = deque(range(depth)), deque[int]()

    def read_one() -> None:
        slot = free.popleft()
        pool.slots.state[slot] = READING
        store.read(0, [(next(experts), slot)])
        reading.append(slot)

    def wait_one() -> None:
        slot = reading.popleft()
        if store.lanes.wait(slot) != READY:
            raise store.error(0, 0, slot)
        free.append(slot)

    pool.slots.memory[:] = 0  # not to measure page faults
    begin, busy = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + seconds:
        while free:
            read_one()
        for _ in range(burst or 1):
            wait_one()
    while reading:
        wait_one()
    took, worked = time.perf_counter() - begin, time.process_time() - busy
    nbytes = store.lanes.bytes_read()
    store.close()
    return nbytes / took / 1e6, worked / (nbytes / 1e9)


@dataclass(frozen=True)
class Case:
    """One point of the grid; burst 0 is a stream."""

    record_kib: int
    piece_kib: int
    lanes: int
    burst: int

    @property
    def pattern(self) -> str:
        return f"burst of {self.burst}" if self.burst else "stream"


def measured(
    path: Path, cases: list[Case], rounds: int, seconds: float
) -> dict[Case, list[tuple[float, float]]]:
    """Samples of `rate`, the rounds interleaved: what disturbs the disk for a while disturbs all cases."""
    found: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, samples in found.items():
            records = records_of(path, case.record_kib * KIB // BLOCK * BLOCK)
            samples.append(rate(records, case.lanes, case.piece_kib * KIB, case.burst, seconds))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.disk", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="on the disk to measure")
    add("--file-mb", type=int, default=2048)
    add("--lanes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    add("--record-kb", type=int, nargs="+", default=[128, 512, 1280, 4096])
    add("--piece-kb", type=int, nargs="+", default=[1024])
    add("--burst", type=int, nargs="+", default=[0, 4], help="records at a time; 0: a stream")
    add("--seconds", type=float, default=0.5, help="of one sample")
    add("--rounds", type=int, default=5)
    add("--results", type=Path, default=ROOT / "bench" / "results")
    add("--record", action="store_true", help="add the rows to the results")
    return parser.parse_args()


def main() -> int:
    given = parse()
    grid = product(given.record_kb, given.piece_kb, given.lanes, given.burst)
    path = given.folder / f"disk-{os.getpid()}.bin"
    run = new_run("python -m bench.disk")
    try:
        make_file(path, given.file_mb * MIB)
        found = measured(path, [Case(*point) for point in grid], given.rounds, given.seconds)
    finally:
        path.unlink(missing_ok=True)
    rows = []
    print("record KiB  piece KiB  lanes  pattern      MB/s  least  most  CPU s/GB")
    for case, samples in found.items():
        rates = tuple(mb for mb, _ in samples)
        settings = {"record_kib": case.record_kib, "piece_kib": case.piece_kib}
        name = f"disk, {case.pattern}"
        rows.append(Row("bandwidth", name, "headrace", case.lanes, "MB/s", rates, run, settings))
        print(
            f"{case.record_kib:10}  {case.piece_kib:9}  {case.lanes:5}  {case.pattern:10}"
            f"  {rows[-1].median:5.0f}  {min(rates):5.0f} {max(rates):5.0f}"
            f"  {statistics.median(cpu for _, cpu in samples):8.3f}"
        )
    if given.record:
        append(given.results / "disk.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
