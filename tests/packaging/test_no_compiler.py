"""Without a C++ compiler the package is built all the same, runs, and says once what that costs."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built where the only compilers named do not exist, with a build folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-cache-dir",
        "-w",
        str(folder),
    ]
    command += ["-C", f"build-dir={folder / 'build'}", str(ROOT)]
    missing = {name: str(folder / "no-such-compiler") for name in ("CC", "CXX")}
    done = subprocess.run(
        command, env={**os.environ, **missing}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("headrace-*.whl")
    return found


@pytest.fixture(scope="module")
def run(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python on the unpacked wheel. Without `site`, so that no editable install comes first."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    path = os.pathsep.join(
        [str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    )
    env = {**os.environ, "PYTHONPATH": path, "HEADRACE_HOME": str(folder / "home")}
    env.pop("HEADRACE_KERNELS", None)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, cwd=folder
        )

    return call


def test_the_wheel_holds_the_package_and_no_native_module(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "headrace/__init__.py",
        "headrace/arith/ops.py",
        "headrace/artifact/registry.json",
    } <= set(names)
    assert [n for n in names if "_native" in n] == ["headrace/kernels/_native.pyi"]
    assert not [n for n in names if n.endswith((".so", ".cpp"))]


def test_a_model_answers_and_one_warning_says_what_to_install(
    run: Callable[..., subprocess.CompletedProcess[str]], tiny_artifact: Callable[[str], Artifact]
) -> None:
    model = str(tiny_artifact("llama").path)
    done = run(
        "-m",
        "headrace",
        "run",
        "--model",
        model,
        "--prompt",
        "hello",
        "--max-tokens",
        "3",
        "--greedy",
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "warning" in line.lower()] == [
        line
        for line in done.stderr.splitlines()
        if "slower" in line and "apt-get install g++" in line
    ]
    assert done.stderr.count("slower") == 1
    assert "reference kernels" in done.stderr


def test_the_library_warns_once(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    code = "import headrace; from headrace.kernels.select import select; print(headrace.__file__); [select() for _ in range(3)]"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert "installed" in done.stdout
    assert done.stderr.count("RuntimeWarning") == 1


def test_a_forced_native_tier_is_refused_with_the_reason(
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run("-c", "from headrace.kernels.select import select; select('portable')")
    assert done.returncode != 0
    assert "'portable' cannot run here: the native module was not built" in done.stderr
