"""A file of routes is refused unless it is one."""

from __future__ import annotations

from pathlib import Path

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
