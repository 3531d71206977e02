"""`headrace bench`: load, prefill and decode of one model. Owns what is measured and how.

Prompts are painted: token i of a prompt is a formula of i, so every machine reads the same tokens.
"""

from __future__ import annotations

import hashlib
import json as json_text
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from headrace import locate
from headrace.artifact.container import open_artifact
from headrace.cli import progress
from headrace.cli.stats import peak_memory_bytes
from headrace.cli.whole import WHOLE
from headrace.engine.engine import Engine
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Work
from headrace.errors import HeadraceError, InputError
from headrace.llm import DEFAULT_MODEL
from headrace.values import SamplingParams

PREFILL_TOKENS = 512
CONTEXTS = (16, 1000)
DECODE_TOKENS = 32
PERIOD = 251


class UnrepeatableError(HeadraceError):
    """Two repetitions gave different logits: the one thing that must never happen."""

    code = "unrepeatable"


@dataclass(frozen=True)
class Row:
    """One measurement: seconds of each repetition, for `tokens` tokens at a context."""

    name: str
    context: int
    tokens: int
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Tokens a second at the median."""
        return self.tokens / self.median_seconds


def bench(
    model: str = DEFAULT_MODEL,
    *,
    repetitions: Annotated[int, WHOLE] = 3,
    threads: Annotated[int | None, WHOLE] = None,
    kernels: str | None = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Measure load, prefill of 512 tokens, and decode at contexts of 16 and 1,000 tokens.

    A context that the model does not have is cut. Every repetition must give the same logits; the last
    line is their fingerprint. HEADRACE_THREADS and HEADRACE_KERNELS set what the flags do not.

    Parameters
    ----------
    model
        Anything that `headrace run` takes.
    repetitions
        How often each is measured; the median is shown.
    threads
        Threads of the kernels; every usable processor if not set.
    kernels
        Kernel tier, auto if not set: amx, avx512, avx2, neon, portable or reference. None changes the answer.
    json
        Print one JSON object.
    """
    if repetitions < 1:
        raise InputError(f"repetitions is {repetitions}; it must be at least 1")
    with progress.shown() as report:
        path = locate.locate(model, progress=report)
    threads, kernels = locate.compute_settings(threads, kernels)

    def load() -> Engine:
        return Engine(open_artifact(path), threads=threads, kernels=kernels)

    rows = [_load_row(load, repetitions)]
    with load() as engine:
        measured = _Bench(engine, repetitions)
        rows += measured.rows()
        facts = {
            "model": str(path),
            "kernels": engine.backend.name,
            "threads": getattr(engine.backend, "threads", 1),
            "fingerprint": measured.fingerprint,
        }
    print(_as_json(rows, facts) if json else "\n".join(_lines(rows, facts)))
    return 0


def _load_row(load: Any, repetitions: int) -> Row:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        load().close()
        times.append(time.perf_counter() - start)
    return Row("load", 0, 0, tuple(times))


class _Bench:
    def __init__(self, engine: Engine, repetitions: int) -> None:
        self._engine = engine
        self._repetitions = repetitions
        self._digests: list[str] = []

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256("".join(self._digests).encode()).hexdigest()[:32]

    def rows(self) -> Iterator[Row]:
        """The measurements, each cut to what the model's context holds."""
        self._decode(2, 1)  # wakes threads and caches
        self._digests.clear()
        room = self._engine.context - DECODE_TOKENS
        if room < 1:
            raise InputError(f"a context of {self._engine.context} is too short to measure")
        yield self._repeated("prefill", min(PREFILL_TOKENS, room))
        for context in sorted({min(c, room) for c in CONTEXTS}):
            yield self._repeated("decode", context)

    def _repeated(self, name: str, context: int) -> Row:
        tokens = context if name == "prefill" else DECODE_TOKENS
        runs = [
            self._decode(context, 0 if name == "prefill" else tokens)
            for _ in range(self._repetitions)
        ]
        digests = {digest for _, _, digest in runs}
        if len(digests) != 1:
            raise UnrepeatableError(
                f"{name} at a context of {context} gave different logits each time"
            )
        self._digests += digests
        seconds = tuple(read if name == "prefill" else steps for read, steps, _ in runs)
        return Row(name, context if name == "decode" else 0, tokens, seconds)

    def _decode(self, context: int, count: int) -> tuple[float, float, str]:
        """Seconds of reading `context` tokens and of `count` steps after it, and the logits' digest."""
        engine, digest = self._engine, hashlib.sha256()
        vocab = engine.config.vocab_size
        params = SamplingParams(temperature=0.0)
        sampler = Sampler(params, 0, vocab, engine.fraction_bits, engine.backend)
        sequence = engine.new_sequence()
        try:
            start = time.perf_counter()
            logits = engine.read(sequence, painted_tokens(context, vocab))
            middle = time.perf_counter()
            digest.update(logits.tobytes())
            steps = 0.0
            for _ in range(count):
                begin = time.perf_counter()
                token = sampler.pick(logits, len(sequence))
                logits = engine.forward([Work(sequence, [token])])[0]
                steps += time.perf_counter() - begin
                digest.update(logits.tobytes())
        finally:
            sequence.release()
        return middle - start, steps, digest.hexdigest()


def painted_tokens(count: int, vocab: int) -> list[int]:
    """Tokens by formula: the period of 251 shares no factor with any block or chunk."""
    return [(7 + 193 * (i % PERIOD)) % vocab for i in range(count)]


def _lines(rows: list[Row], facts: dict[str, Any]) -> Iterator[str]:
    yield f"{facts['model']}: {facts['kernels']} kernels, threads {facts['threads']}"
    for row in rows:
        what = f"{row.name} {row.tokens} tokens" if row.tokens else row.name
        at = f" at context {row.context:,}" if row.context else ""
        rate = f", {row.rate:,.1f} tok/s" if row.tokens else ""
        spread = f"{min(row.seconds):.4f} to {max(row.seconds):.4f}"
        yield f"{what}{at}: {row.median_seconds:.4f} s ({spread}){rate}"
    yield f"peak memory {peak_memory_bytes() / 1e6:,.0f} MB"
    yield f"fingerprint {facts['fingerprint']}"


def _as_json(rows: list[Row], facts: dict[str, Any]) -> str:
    body = [
        {
            "name": row.name,
            "context": row.context,
            "tokens": row.tokens,
            "seconds": list(row.seconds),
            "median_seconds": row.median_seconds,
            "rate": row.rate if row.tokens else None,
        }
        for row in rows
    ]
    return json_text.dumps(
        {**facts, "rows": body, "peak_memory_bytes": peak_memory_bytes()}, indent=1
    )
