"""The JavaScript clients, installed once from their lock file, and what runs a program of them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PINS = ("package.json", "package-lock.json")
PROCESSORS = {"x86_64": "x64", "aarch64": "arm64"}
Program = Callable[..., Any]


@pytest.fixture(scope="session")
def node_modules(request: pytest.FixtureRequest) -> Path:
    """The installed packages; tests that need them are skipped by name where there is no npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed (the official JavaScript clients come from it)")
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in PINS)).hexdigest()[:16]
    home = os.environ.get("HEADRACE_TEST_HOME")
    base = Path(home) if home else request.config.cache.mkdir("javascript")
    installed = base / f"javascript-{key}"
    if not installed.is_dir():
        making = base / f"javascript-{key}.{os.getpid()}"
        making.mkdir(parents=True)
        for name in PINS:
            shutil.copy(HERE / name, making)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=making, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        try:
            making.rename(installed)
        except OSError:  # another session was faster
            shutil.rmtree(making)
    return installed / "node_modules"


@pytest.fixture(scope="session")
def program(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Runs `<name>.mjs` with the URL of a server and a JSON value; its answer, from what it printed."""
    folder = tmp_path_factory.mktemp("javascript")
    (folder / "node_modules").symlink_to(node_modules)
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    processor = PROCESSORS.get(platform.machine(), "")
    own = node_modules / f"node-linux-{processor}" / "bin" / "node"
    node = str(own) if own.is_file() else (shutil.which("node") or "node")

    def run(name: str, url: str, **job: object) -> Any:
        command = [node, f"{name}.mjs", url, json.dumps(job)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
