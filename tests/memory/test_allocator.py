"""Large blocks go back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from headrace.memory.allocator import give_back_large_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

assert give_back_large_blocks()
before, small = resident(), []
for size in (24 << 20, 12 << 20, 6 << 20):
    for _ in range(3):
        blocks = [bytearray(b"x") * size for _ in range(2)]  # written to, so that it is there
        small += [bytearray(b"y") * 4096 for _ in range(20)]  # and what stays lies behind it
        assert resident() - before > 2 * (size >> 20) - 2
        del blocks
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="for glibc's malloc")
def test_what_was_freed_is_not_kept() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) <= 3
