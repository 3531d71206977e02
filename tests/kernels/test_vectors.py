"""The painted vectors: they are what the definition says, and every instruction set reproduces them.

The slow tests build the programs of tests/native for this machine and, under qemu, for Arm.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.kernels.select import unavailable
from kernels import vectors

NATIVE = Path(__file__).parent.parent / "native"
FILES = [str(vectors.FOLDER / f"{name}.json") for name in vectors.OPERATIONS]
ARM = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
)


@pytest.mark.parametrize("name", vectors.OPERATIONS)
def test_files_are_what_the_definition_writes(name: str) -> None:
    """A difference means that the arithmetic changed: raise its version, then run vectors.py."""
    assert (vectors.FOLDER / f"{name}.json").read_text() == vectors.text(name)


def _build(folder: Path, *options: str) -> Path:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    subprocess.run(["cmake", "-S", NATIVE, "-B", folder, *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder, "-j2"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64"):
        if shutil.which(tool) is None:
            pytest.skip(f"tier neon: {tool} is not installed (g++-aarch64-linux-gnu, qemu-user)")
    return _build(tmp_path_factory.mktemp("arm"), *ARM)


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["portable", "avx2", "avx512", "amx"])
def test_vectors_on_this_machine(tier: str, host: Path) -> None:
    if unavailable().get(tier, "not a tier of this build"):
        pytest.skip(f"tier {tier}: {unavailable().get(tier)}")
    assert _run(host / "vectors", tier, *FILES).count(" 0 differ") == len(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["portable", "neon"])
def test_vectors_on_arm(tier: str, arm: Path) -> None:
    output = _run("qemu-aarch64", "-cpu", "max", arm / "vectors", tier, *FILES)
    assert output.count(" 0 differ") == len(FILES)


@pytest.mark.slow
def test_projections_agree_on_every_processor(host: Path, arm: Path) -> None:
    here = _run(host / "project_check")
    there = _run("qemu-aarch64", "-cpu", "max", arm / "project_check")
    assert here.split()[-1] == there.split()[-1]  # the digest


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_pool(threads: int, host: Path) -> None:
    assert _run(host / "pool_check", str(threads)).endswith(": 0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3])
def test_lanes(lanes: int, host: Path, tmp_path: Path) -> None:
    output = _run(host / "lanes_check", str(lanes), "200", tmp_path / "records")
    assert output.endswith(": 0 wrong\n")
