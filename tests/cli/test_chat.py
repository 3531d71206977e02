"""The interactive chat on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shell import Shell, default_sigint

PROMPT = b">>> "


class Terminal:
    """The other side of a chat's terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.seen = b""

    def send(self, data: bytes) -> None:
        os.write(self._master, data)

    def control_c(self) -> None:
        """Press it as a person does: readline misses one between its prompt and its wait for a key."""
        time.sleep(0.5)
        self.send(b"\x03")

    def until(self, mark: bytes, timeout: float = 60) -> bytes:
        """What is shown up to the next `mark`."""
        end = time.monotonic() + timeout
        while mark not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{mark!r} did not come; seen {self.seen!r}"
            self.seen += os.read(self._master, 4096)
        shown, self.seen = self.seen.split(mark, 1)
        return shown

    def end(self, timeout: float = 60) -> int:
        """Exit code, once the process has ended."""
        end = time.monotonic() + timeout
        while select.select([self._master], [], [], max(0, end - time.monotonic()))[0]:
            try:
                self.seen += os.read(self._master, 4096)
            except OSError:  # the other side is closed
                return self.process.wait(30)
        raise AssertionError(f"the chat did not end; seen {self.seen!r}")


@contextmanager
def chatting(shell: Shell, model: Path, *flags: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    process = shell.start(
        "run", model, "--seed", "1", *flags,
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=lambda: _own_terminal(slave),
    )  # fmt: skip
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _own_terminal(slave: int) -> None:
    import fcntl
    import termios

    default_sigint()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


def test_turns_and_the_end(shell: Shell, model: Path) -> None:
    with chatting(shell, model, "--max-tokens", "8") as terminal:
        terminal.until(PROMPT)
        terminal.send(b"Hello\n")
        first = terminal.until(PROMPT)
        terminal.send(b"And now?\n")
        second = terminal.until(PROMPT)
        terminal.send(b"\x04")
        assert terminal.end() == 0
    assert len(first) > len(b"Hello\r\n")
    assert first != second
    assert b"fingerprint" in terminal.seen


def test_control_c_ends_an_answer_and_then_the_chat(shell: Shell, model: Path) -> None:
    with chatting(shell, model, "--kernels", "reference") as terminal:
        terminal.until(PROMPT)
        terminal.send(b"Hello\n")
        terminal.until(b"Hello\r\n")
        terminal.control_c()
        terminal.until(PROMPT)
        terminal.control_c()
        assert terminal.end() == 130
    assert b"Traceback" not in terminal.seen


def test_control_c_throws_a_line_away(shell: Shell, model: Path) -> None:
    pytest.importorskip("readline")
    with chatting(shell, model, "--max-tokens", "4") as terminal:
        terminal.until(PROMPT)
        terminal.send(b"half a li")
        terminal.control_c()
        terminal.until(PROMPT)
        terminal.send(b"\x04")
        assert terminal.end() == 0


def test_a_conversation_that_does_not_fit_goes_on(shell: Shell, model: Path) -> None:
    with chatting(shell, model, "--max-context", "64", "--max-tokens", "4") as terminal:
        terminal.until(PROMPT)
        terminal.send(b"x" * 100 + b"\n")
        assert b"the context holds 64" in terminal.until(PROMPT)
        terminal.send(b"Hi\n")
        assert b"error" not in terminal.until(PROMPT)
        terminal.send(b"/clear\n")
        terminal.until(PROMPT)
        terminal.send(b"\x04")
        assert terminal.end() == 0


@pytest.mark.parametrize("flag", [["--digest"], ["--raw"], ["--stats-json", "stats.json"]])
def test_what_needs_a_prompt_is_refused_in_a_chat(
    shell: Shell, model: Path, tmp_path: Path, flag: list[str]
) -> None:
    flag = [str(tmp_path / f) if f.endswith(".json") else f for f in flag]
    with chatting(shell, model, *flag) as terminal:
        assert terminal.end() == 2
        assert b"need a prompt" in terminal.seen
    assert not any(tmp_path.glob("*stats*"))
