"""The JavaScript clients, installed once from their lock file, and what runs a program of them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
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
def node(node_modules: Path) -> str:
    """The Node that came with the packages, or the system's."""
    processor = PROCESSORS.get(platform.machine(), "")
    own = node_modules / f"node-linux-{processor}" / "bin" / "node"
    return str(own) if own.is_file() else (shutil.which("node") or "node")


@pytest.fixture(scope="session")
def program(
    node: str, node_modules: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """Hands a job to `<name>.mjs`, with the URL of a server: its answer. A program runs once a session."""
    folder = tmp_path_factory.mktemp("javascript")
    (folder / "node_modules").symlink_to(node_modules)
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    running: dict[str, Node] = {}

    def run(name: str, url: str, **job: object) -> Any:
        if name not in running:
            running[name] = Node([node, f"{name}.mjs"], folder)
        return running[name].answer({"url": url, **job})

    yield run
    for one in running.values():
        one.close()


class Node:
    """A program that answers a line of JSON with a line of JSON."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._said = (folder / f"{command[-1]}.stderr").open("w+")
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def answer(self, job: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=60)
        except queue.Empty:
            line = b""
        assert line, self._complaint()
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._said.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _complaint(self) -> str:
        self._said.seek(0)
        return f"no answer to a job; {self._said.read()[-3000:]}"
