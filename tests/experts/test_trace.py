"""A file of routes is refused unless it is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import FileError
from headrace.experts.trace import RouteHeader, RouteRecorder, read_routes

HEADER = b'{"version": 1, "num_layers": 2, "num_experts": 4, "top_k": 1}\n'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]\n",
        b"[" * 4000 + b"\n",
        b"{}\n",
        b"\xff\n",
        HEADER[:-1],
        HEADER.replace(b"1,", b"2,", 1),
        HEADER.replace(b"4", b"0"),
        HEADER.replace(b"4", b"true"),
        HEADER.replace(b'"top_k": 1', b'"top_k": 1e3'),
        HEADER + bytes([0, 0, 0, 0, 2, 0, 0, 0]),
        HEADER + bytes([0, 0, 0, 0, 1, 0, 4, 0]),
    ],
)
def test_a_hostile_file_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "routes"
    path.write_bytes(data)
    with pytest.raises(FileError, match="routes"):
        read_routes(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="No such file"):
        read_routes(tmp_path / "none")
    with pytest.raises(FileError, match="No such file"):
        RouteRecorder(tmp_path / "none" / "routes", RouteHeader(1, 1, 1))


def _record(path: Path, count: int) -> None:
    recorder = RouteRecorder(path, RouteHeader(2, 4, 1))
    for i in range(count):
        recorder.add(i % 2, np.array([i // 2]), np.array([[i % 4]]))
    recorder.close()


def test_a_recording_cut_at_any_byte_gives_its_whole_records(tmp_path: Path) -> None:
    path, cut = tmp_path / "routes", tmp_path / "cut"
    _record(path, 5)
    data = path.read_bytes()
    start = data.index(b"\n") + 1
    for size in range(len(data) + 1):
        cut.write_bytes(data[:size])
        if size < start:
            with pytest.raises(FileError, match="not a recording"):
                read_routes(cut)
        else:
            assert read_routes(cut)[1]["experts"].ravel().tolist() == list(range(4))[
                : (size - start) // 8
            ] + [0] * (size == len(data))


def test_the_header_is_there_before_the_first_record(tmp_path: Path) -> None:
    recorder = RouteRecorder(tmp_path / "routes", RouteHeader(2, 4, 1))
    header, rows = read_routes(tmp_path / "routes")
    assert (header, len(rows)) == (RouteHeader(2, 4, 1), 0)
    recorder.close()


def test_only_a_recording_or_nothing_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "routes"
    path.touch()
    _record(path, 4)
    _record(path, 2)
    assert len(read_routes(path)[1]) == 2
    for other in (b"x", b"x" * 10000, b"{}\n", HEADER[:-1]):
        path.write_bytes(other)
        with pytest.raises(FileError, match="not replaced"):
            _record(path, 1)
        assert path.read_bytes() == other
    with pytest.raises(FileError, match="not a plain file"):
        _record(Path("/dev/full"), 1)
    with pytest.raises(FileError, match="not a plain file"):
        _record(tmp_path, 1)


def test_no_recording_is_put_into_a_model(tmp_path: Path) -> None:
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / name).touch()
    with pytest.raises(FileError, match="directory"):
        _record(tmp_path / "forecast.safetensors", 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link").symlink_to(tmp_path / "manifest.json")
    with pytest.raises(FileError, match="directory"):
        _record(tmp_path / "other" / "link", 1)
    assert not (tmp_path / "forecast.safetensors").exists()


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from headrace.errors import FileError
from headrace.experts.trace import RouteHeader, RouteRecorder

most = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
try:
    recorder = RouteRecorder(Path(sys.argv[1]), RouteHeader(2, 4, 1))
except FileError as error:
    sys.exit(f"at once: {error}")
for i in range(100000):
    recorder.add(0, np.array([i]), np.array([[1]]))
try:
    recorder.close()
except FileError as error:
    recorder.close()
    sys.exit(f"at the end: {error}")
"""


@pytest.mark.parametrize(("most", "when"), [(10, "at once"), (1000, "at the end")])
def test_a_full_disk_is_told_by_name_and_ends_no_pass(tmp_path: Path, most: int, when: str) -> None:
    path = tmp_path / "routes"
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), str(most)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.startswith(f"{when}: {path}: routes: "), done.stderr
    if most > 100:
        assert len(read_routes(path)[1]) > 50
