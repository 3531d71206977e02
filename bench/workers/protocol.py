"""How a worker talks: a JSON line says that it is ready, then one answer for each request.

What is timed is the same code for every system: `read` and `step` between two looks at the clock.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

PERIOD = 251  # shares no factor with a block, a tile or a chunk
Config = Mapping[str, Any]


class Served(Protocol):
    """What answers requests."""

    def facts(self) -> dict[str, Any]: ...

    def commands(self) -> Mapping[str, Callable[..., dict[str, Any]]]: ...


class Reader(ABC):
    """A loaded model with one sequence, to which tokens are given."""

    vocab: int
    painted = 0  # how many painted tokens the sequence begins with

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Versions, build and settings: {"versions": {...}, "settings": {...}}."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every token."""

    @abstractmethod
    def read(self, tokens: list[int]) -> None:
        """Read tokens; the logits of the last are ready when this returns."""

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"follow": self._follow, "peak": lambda: {"bytes": peak_bytes()}}

    def counters(self) -> dict[str, float]:
        """What grows with work, by name."""
        return {"storage_bytes": storage_bytes()}

    def _follow(self, context: int, steps: int, seconds: float) -> dict[str, Any]:
        """Read `context` drawn tokens at once, then `steps` more, each by itself, until the seconds are over.

        The answer has the time, the steps and the growth of the counters of both parts.
        """
        tokens = drawn_tokens(context + steps, self.vocab)
        self.clear()
        self.painted = 0
        answer = {"prompt": self._timed([tokens[:context]], seconds)}
        answer["steps"] = self._timed([[t] for t in tokens[context:]], seconds)
        return answer

    def _timed(self, parts: list[list[int]], seconds: float) -> dict[str, Any]:
        before, done, start = self.counters(), 0, time.perf_counter()
        for part in parts:
            self.read(part)
            done += len(part)
            if time.perf_counter() - start >= seconds:
                break
        took = time.perf_counter() - start
        grown = {name: value - before[name] for name, value in self.counters().items()}
        return {"seconds": took, "tokens": done, "counters": grown}


class Engine(Reader):
    """One that also picks tokens, goes back to any of them, and tells its logits."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on."""

    @abstractmethod
    def step(self) -> None:
        """Pick the likeliest token and read it."""

    @abstractmethod
    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Logits after each token of a new sequence, [len, vocab]."""

    def clear(self) -> None:
        self.rewind(0)

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        own = {"prefill": self._prefill, "decode": self._decode, "save_logits": self._save_logits}
        return {**super().commands(), **own}

    def _prefill(self, tokens: int) -> dict[str, Any]:
        prompt = painted_tokens(tokens, self.vocab)
        self.rewind(0)
        start = time.perf_counter()
        self.read(prompt)
        seconds = time.perf_counter() - start
        self.painted = tokens
        return {"seconds": seconds}

    def _decode(self, context: int, steps: int) -> dict[str, Any]:
        self.go_to(context)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        return {"seconds": time.perf_counter() - start}

    def go_to(self, context: int) -> None:
        """Be at the end of `context` painted tokens, with their logits; read only what is missing."""
        keep = min(self.painted, context - 1)
        self.rewind(keep)
        self.read(painted_tokens(context, self.vocab)[keep:])
        self.painted = context

    def _save_logits(self, tokens: list[int], path: str) -> dict[str, Any]:
        np.save(path, self.logits(tokens))
        return {}


def painted_tokens(count: int, vocab: int) -> list[int]:
    """The same tokens on every machine and for every system."""
    return [(7 + 193 * (i % PERIOD)) % vocab for i in range(count)]


def drawn_tokens(count: int, vocab: int) -> list[int]:
    """As painted ones, but without a period: for models whose experts follow the tokens."""
    rng = random.Random(1)
    return [rng.randrange(vocab) for _ in range(count)]


def batch_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Prompts that have nothing in common, without a period."""
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def storage_bytes() -> int:
    """What this process had read from disks, faults of mapped files included; 0 where the system doesn't tell."""
    return _number(Path("/proc/self/io"), "read_bytes:")


def peak_bytes() -> int:
    """The most memory that this process held at once, as the kernel counted it."""
    return _number(Path("/proc/self/status"), "VmHWM:") * 1024


def _number(path: Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def pin(threads: int) -> None:
    """Keep this process on the last `threads` processors, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, usable[-threads:])


def main(make: Callable[[Config], Served]) -> None:
    """Serve an engine made from the configuration on the command line."""
    config, out = begin()
    engine = make(config)
    serve(out, engine.facts(), engine.commands())


def begin() -> tuple[Config, TextIO]:
    """The configuration, and the stream of answers: what a library prints goes to standard error."""
    config: Config = json.loads(sys.argv[1])
    pin(int(config["threads"]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return config, out


def serve(
    out: TextIO, facts: dict[str, Any], commands: Mapping[str, Callable[..., dict[str, Any]]]
) -> None:
    """Say that this worker is ready and answer until standard input ends."""
    _say(out, facts)
    for line in sys.stdin:
        request = json.loads(line)
        _say(out, commands[request.pop("do")](**request))


def _say(out: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=out, flush=True)
