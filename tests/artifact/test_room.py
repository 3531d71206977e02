"""What ran out is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.artifact import room
from headrace.errors import DiskFullError


def run_out(path: Path, number: int) -> str:
    with pytest.raises(DiskFullError) as caught, room.full_disk_told(path, 5000):
        raise OSError(number, "")
    return caught.value.message


def test_bytes_quota_and_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs 5,000 bytes, " in run_out(tmp_path / "not" / "there", errno.ENOSPC)
    assert "quota" in run_out(tmp_path, errno.EDQUOT)
    real = list(os.statvfs(tmp_path))
    real[5:8] = 100, 0, 0  # files, free, available
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(real))
    monkeypatch.setattr(room, "free_bytes", lambda path: 10**9)
    assert run_out(tmp_path, errno.ENOSPC).endswith(
        "no inodes left: it holds as many files as it can"
    )
