"""Speeds are measured on real bytes; what cannot be measured is said to be so."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import FileError
from headrace.memory.estimate import estimate
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.plan import plan
from headrace.memory.speed import READ_BYTES, measure_disk, measure_memory
from memory.model import DENSE, MACHINE, MIXTURE


def test_a_disk_reads_whole_pieces(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(5 * READ_BYTES + 7))
    speed = measure_disk(path, lanes=3)
    assert speed is not None
    assert speed.nbytes == 5 * READ_BYTES
    assert speed.bytes_per_s > 0
    part = measure_disk(path, 2 * READ_BYTES)
    assert part is not None
    assert part.nbytes == 2 * READ_BYTES


def test_a_file_system_without_direct_reads() -> None:
    """Memory file systems refuse or ignore O_DIRECT, and are read all the same."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm")
    path = shm / "headrace-test-speed"
    try:
        path.write_bytes(bytes(READ_BYTES))
        speed = measure_disk(path)
    finally:
        path.unlink(missing_ok=True)
    assert speed is not None
    assert speed.nbytes == READ_BYTES


def test_too_small_to_measure(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x" * 100)
    assert measure_disk(tmp_path / "small") is None


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(FileError, match="read"):
            measure_disk(path)


def test_memory_is_read() -> None:
    assert measure_memory(2, 8 << 20, rounds=1) > 0


def test_an_estimate_needs_measured_speeds() -> None:
    made = plan(MACHINE, MIXTURE, PlanOptions(memory_gb=2))
    assert isinstance(made, Plan)
    experts = 24 * 8 * 1_300_000
    both = estimate(made, MIXTURE, disk_bytes_per_s=10**9, memory_bytes_per_s=10**10)
    assert both.touched_bytes == MIXTURE.dense_bytes + experts
    assert both.streamed_bytes == experts * (3072 - made.pool_slots) // 3072
    assert both.decode_rate == pytest.approx(
        1 / (both.touched_bytes / 1e10 + both.streamed_bytes / 1e9)
    )
    for disk, memory in ((None, 10**10), (10**9, None)):
        some = estimate(made, MIXTURE, disk_bytes_per_s=disk, memory_bytes_per_s=memory)
        assert some.decode_rate is None
    whole = plan(MACHINE, DENSE, PlanOptions())
    assert isinstance(whole, Plan)
    dense = estimate(whole, DENSE, disk_bytes_per_s=None, memory_bytes_per_s=10**10)
    assert (dense.streamed_bytes, dense.decode_rate) == (0, 100.0)
