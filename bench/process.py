"""Runs measured programs: workers that answer requests, and whole processes with their peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.machine import ROOT


class WorkerError(Exception):
    """A worker ended instead of answering; the message is the end of what it said."""


def environment(threads: int) -> dict[str, str]:
    """This process's, without headrace's settings and with OpenMP's threads set."""
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_") or k == "HEADRACE_HOME"
    }
    count = str(threads)
    # Whoever uses NumPy's matrix product here splits the work itself.
    blas = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": count, "OMP_NUM_THREADS": count}
    return {**kept, **blas, "TOKENIZERS_PARALLELISM": "false"}


def worker_command(python: Path, module: str, config: Mapping[str, Any], threads: int) -> list[str]:
    body = json.dumps({**config, "threads": threads})
    return [str(python), "-m", f"bench.workers.{module}", body]


class Worker:
    """One system in its own process, pinned to as many processors as it has threads.

    prefix: words before the command, such as those of `MemoryGroup.prefix`.
    """

    def __init__(
        self,
        python: Path,
        module: str,
        config: Mapping[str, Any],
        threads: int,
        prefix: Sequence[str] = (),
    ) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the worker
        self._process = subprocess.Popen(
            [*prefix, *worker_command(python, module, config, threads)],
            cwd=ROOT,
            env=environment(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        try:
            self.facts = self._answer()
        except WorkerError:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request. Raises WorkerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def close(self) -> None:
        """End the worker; waits for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        self._process.wait()
        self._said.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        self._said.seek(0)
        tail = self._said.read()[-2000:].strip()
        return WorkerError(f"the worker ended with {code}:\n{tail}")


@dataclass(frozen=True)
class Timing:
    """A whole process: wall seconds and the most memory that it held."""

    seconds: float
    peak_bytes: int


def timed(
    command: Sequence[str], *, threads: int, stdin: str = "", home: Path | None = None
) -> Timing:
    """Run a command to its end. Raises WorkerError when it fails."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as text:
        text.write(stdin)
        text.seek(0)
        env = environment(threads) | ({} if home is None else {"HEADRACE_HOME": str(home)})
        start = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=text, stdout=subprocess.DEVNULL, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            raise WorkerError(f"ended with {process.returncode}:\n{said.read()[-2000:]}")
    return Timing(seconds, usage.ru_maxrss * 1024)
