"""headrace, with two measurements of its inside: Python's share of a step, and seconds by operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import headrace
from bench.workers.protocol import Config, Engine, main, painted_tokens
from headrace.arith.sampling import Draw, Logits
from headrace.artifact.container import open_artifact
from headrace.engine import engine as engine_module
from headrace.engine.batch import batch_of
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Work
from headrace.kernels import program as p
from headrace.values import SamplingParams


class Headrace(Engine):
    """config: model (an artifact's path), threads."""

    def __init__(self, config: Config) -> None:
        self._artifact = open_artifact(Path(config["model"]))
        self._threads = int(config["threads"])
        self._engine = engine_module.Engine(self._artifact, threads=self._threads)
        self.vocab = self._engine.config.vocab_size
        self._sequence = self._engine.new_sequence()
        greedy = SamplingParams(temperature=0.0)
        engine = self._engine
        self._sampler = Sampler(greedy, 0, self.vocab, engine.fraction_bits, engine.backend)
        self._logits = np.zeros(self.vocab, np.int32)

    def facts(self) -> dict[str, Any]:
        settings = {
            "kernels": self._engine.backend.name,
            "identity": self._artifact.identity,
            "weight_bytes": sum(_op_bytes(op) for op in self._engine._program.ops),
            "kv_bytes_per_token": self._engine.shape.page_bytes / p.PAGE_TOKENS,
        }
        return {"versions": {"headrace": headrace.__version__}, "settings": settings}

    def rewind(self, length: int) -> None:
        self._sequence.rewind(length)

    def read(self, tokens: list[int]) -> None:
        self._logits = self._engine.read(self._sequence, tokens)

    def step(self) -> None:
        token = self._sampler.pick(self._logits, len(self._sequence))
        self._logits = self._engine.forward([Work(self._sequence, [token])])[0]

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Exact: a logit has fewer than 24 bits."""
        fixed = self._engine.logits(tokens)
        return np.ldexp(fixed.astype(np.float32), -self._engine.fraction_bits)

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {**super().commands(), "share": self._share, "operations": self._operations}

    def _share(self, context: int, steps: int, sampled: bool = False) -> dict[str, Any]:
        """Seconds of whole steps, as `LLM` makes them, and of the native calls in them."""
        self.rewind(0)  # the generation has a sequence of its own, and needs the pages
        self.painted = 0
        stopwatch = _Stopwatch(self._engine._runner, self._engine.backend)
        self._engine._runner, ends = stopwatch, self._engine.end_tokens
        self._engine.backend = stopwatch
        self._engine.end_tokens = frozenset()
        drawn = SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=steps + 1)
        params = drawn if sampled else SamplingParams(temperature=0.0, max_tokens=steps + 1)
        tokens = self._engine.generate(painted_tokens(context, self.vocab), params)
        try:
            next(tokens)
            stopwatch.seconds, start = 0.0, time.perf_counter()
            count = sum(1 for _ in tokens)
            seconds = time.perf_counter() - start
        finally:
            self._engine._runner, self._engine.end_tokens = stopwatch.runner, ends
            self._engine.backend = stopwatch.backend
        return {"seconds": seconds, "native": stopwatch.seconds, "steps": count}

    def _operations(self, context: int, steps: int, rows: int = 1) -> dict[str, Any]:
        """Seconds of passes of `rows` tokens by operation, each run alone, less what an empty run takes.

        Of one row: steps that write. Of more: the tokens after the context, read again and again.
        """
        if context:
            self.go_to(context)
        samples = []
        for _ in range(steps):
            self.rewind(len(self._sequence) if rows == 1 else context)
            samples.append(self._pass_by_operation(rows))
        seconds = {name: [s[name] for s in samples] for name in samples[0]}
        nbytes: dict[str, int] = defaultdict(int)
        for op in self._engine._program.ops:
            nbytes[_op_name(op, self._engine.shape)] += _op_bytes(op)
        return {"seconds": seconds, "bytes": dict(nbytes)}

    def _pass_by_operation(self, rows: int) -> dict[str, float]:
        engine, totals = self._engine, defaultdict[str, float](float)
        start = len(self._sequence)
        picked = [int(self._logits.argmax())]
        tokens = picked if rows == 1 else painted_tokens(start + rows, self.vocab)[start:]
        self._sequence.reserve(rows)
        batch = batch_of([Work(self._sequence, tokens)])
        clock = time.perf_counter
        for index, op in enumerate(engine._program.ops):
            start = clock()
            engine._runner.run(index, index, batch, engine._cache)
            middle = clock()
            engine._runner.run(index, index + 1, batch, engine._cache)
            spent = (clock() - middle) - (middle - start)
            totals[_op_name(op, engine.shape)] += spent
        self._sequence.commit(tokens)
        self._logits = engine._runner.logits(1)[0]
        return totals


class _Stopwatch:
    """A runner and its backend that add up the seconds of runs and draws."""

    def __init__(self, runner: p.Runner, backend: p.Backend) -> None:
        self.runner, self.backend = runner, backend
        self.capacity = runner.capacity
        self.logits, self.saturations, self.close = runner.logits, runner.saturations, runner.close
        self.seconds = 0.0

    def run(self, begin: int, end: int, batch: p.Batch, cache: NDArray[np.uint8]) -> int:
        start = time.perf_counter()
        stopped = self.runner.run(begin, end, batch, cache)
        self.seconds += time.perf_counter() - start
        return stopped

    def draw(self, logits: Logits, how: Draw, word: int) -> int:
        start = time.perf_counter()
        token = self.backend.draw(logits, how, word)
        self.seconds += time.perf_counter() - start
        return token


def _op_bytes(op: p.Op) -> int:
    """Bytes of weights that a step reads for an operation; of the embedding, one row at most."""
    match op:
        case p.Project(weight):
            return weight.nbytes
        case p.Embed(weight):
            return weight.nbytes // weight.n
        case p.Norm(gain) | p.HeadNorm(gain):
            return gain.values.nbytes
        case _:
            return 0


def _op_name(op: p.Op, shape: p.ModelShape) -> str:
    if not isinstance(op, p.Project):
        return type(op).__name__
    if op.target == p.Buffer.X:
        return "Project down" if op.weight.k == shape.ffn_width else "Project out"
    names = {p.Buffer.QKV: "qkv", p.Buffer.GATE_UP: "gate and up", p.Buffer.LOGITS: "head"}
    return f"Project {names[op.target]}"


if __name__ == "__main__":
    main(Headrace)
