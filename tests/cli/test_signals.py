"""Control-C from the first instruction of the console script on; streams that are closed or full."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shell import Shell, default_sigint

# Sends SIGINT to itself at the moment when a module is looked for.
AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == %r:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
import headrace.entry
headrace.entry.main()
"""


@pytest.mark.parametrize(
    "module",
    ["headrace.cli.main", "cyclopts", "headrace.cli.run", "numpy", "headrace.llm", "tokenizers", "jinja2"],
)  # fmt: skip
def test_control_c_during_an_import(shell: Shell, model: Path, module: str) -> None:
    flags = ("run", model, "--prompt", "x", "--max-tokens", "1")
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT % module, *map(str, flags)],
        capture_output=True, env=shell.environment, timeout=60, check=False, preexec_fn=default_sigint,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"\n")


def test_an_ignored_control_c_stays_ignored(shell: Shell, model: Path) -> None:
    """As in a background job of nohup."""
    process = subprocess.Popen(
        shell.command("run", model, "--prompt", "x", "--seed", "3", "--max-tokens", "200"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=shell.environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, report = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"cancelled" not in report
