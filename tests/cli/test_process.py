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


# ---- streams that are closed or full ---------------------------------------------------------------


def sh(shell: Shell, line: str, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which "$@" is the command line."""
    return subprocess.run(
        ["sh", "-c", line, "sh", *shell.command(*arguments)],
        capture_output=True, env=shell.environment, timeout=60, check=False,
    )  # fmt: skip


COMMANDS = [("run", "MODEL", "--prompt", "x", "--greedy", "--max-tokens", "4"), ("inspect", "MODEL"), ("--help",), ("--version",)]  # fmt: skip
ENDS = {  # of standard output, standard error: exit code, lines of standard error
    '"$@" >&-': (1, [b"error: standard output is closed"]),
    '"$@" >/dev/full': (1, [b"No space left on device"]),
    '"$@" 2>&-': (0, []),
    '"$@" >/dev/null 2>&- <&-': (0, []),
    '"$@" >&- 2>&-': (1, []),
    '"$@" >&- 2>&- <&-': (1, []),
    '"$@" >/dev/full 2>/dev/full': (1, []),
}


@pytest.mark.parametrize("line", ENDS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_closed_and_full_streams(
    shell: Shell, model: Path, line: str, command: tuple[str, ...]
) -> None:
    done = sh(shell, line, *(model if part == "MODEL" else part for part in command))
    code, lines = ENDS[line]
    assert done.returncode == code, done.stderr
    for cause, shown in zip(lines, done.stderr.splitlines(), strict=True):
        assert shown.startswith(b"error: ")
        assert cause in shown or shown == cause


def test_an_error_with_a_closed_standard_error(shell: Shell) -> None:
    for line in ('"$@" 2>&-', '"$@" 2>/dev/full', '"$@" >&- 2>/dev/full'):
        done = sh(shell, line, "run", "gpt:9000t", "--prompt", "x")
        assert done.returncode in (1, 2)
        assert (done.stdout, done.stderr) == (b"", b"")


def test_the_locale_changes_nothing(shell: Shell, model: Path) -> None:
    """Neither what is read from the command line nor what is written."""
    flags = ("run", model, "--prompt", "é€", "--seed", "1", "--max-tokens", "24", "--system", "ü")
    plain = shell.run(*flags)
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    other = shell.run(*flags, **ascii_only)
    assert other.returncode == 0
    assert other.stdout == plain.stdout
    assert other.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


def test_a_place_that_cannot_be_used_is_bad_input(
    shell: Shell, model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    below, long = tmp_path / "file" / "below", "x" * 300
    for command, home in (
        (("convert", checkpoint, below), shell.home),
        (("convert", checkpoint, tmp_path / long), shell.home),
        (("convert", tmp_path / long, tmp_path / "out"), shell.home),
        (("inspect", below), shell.home),
        (("inspect", tmp_path / long), shell.home),
        (("run", checkpoint, "--prompt", "x"), below),
        (("pull", "smollm2:135m"), below),
        (("run", model, "--prompt", "x", "--stats-json", below), shell.home),
    ):
        done = shell.run(*command, HEADRACE_HOME=str(home))
        assert done.returncode == 2, (command, done.stderr)
        assert b"Traceback" not in done.stderr
        assert b"error: " in done.stderr
