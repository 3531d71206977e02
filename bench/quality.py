"""How far each system's predictions are from the float32 forward pass with the same weights.

KL divergence and agreement of the likeliest token over every position of the windows, and the
loss on each window's own text (perplexity is e to its mean). Time does not matter here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import machine, model
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.systems import REFERENCE, System, headrace, llama_systems, transformers_systems
from bench.windows import SIZE, Windows, fingerprint, windows
from headrace.text.tokenizer import Tokenizer

Floats = NDArray[np.float64]
Facts = Mapping[str, Any]
KL, TOP1, LOSS = "KL to float32", "top-1 equal", "loss"


@dataclass(frozen=True)
class Scores:
    """One window of one system."""

    kl: float
    top1: float
    loss: float  # nats a token


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "quality": a sample is a window."""
    run = machine.new_run(command("quality", settings))
    reference = transformers_systems(settings)[:1]
    if not reference:
        print("quality needs --torch-python for the float32 reference: skipped")
        return []
    texts = _windows(settings)
    systems = [headrace(settings), *llama_systems(settings, kv_variants=True)]
    threads = max(settings.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=settings.work) as folder:
        exact = _Logits(Path(folder), "exact", texts)
        got = _Logits(Path(folder), "got", texts)
        facts = exact.save(reference[0], threads)
        rows += _rows(run, REFERENCE, facts, texts, exact.scores(exact))
        for system in systems:
            facts = got.save(system, threads)
            rows += _rows(run, system.name, facts, texts, exact.scores(got))
            print(f"quality: {system.name}", flush=True)
    append(settings.results / "quality.jsonl", rows)
    return rows


class _Logits:
    """Files of one system's logits, one a window: whole vocabularies would not fit in memory at once."""

    def __init__(self, folder: Path, name: str, texts: Windows) -> None:
        self._texts = texts
        self._paths = [folder / f"{name}-{i}.npy" for i in range(len(texts))]

    def save(self, system: System, threads: int) -> Facts:
        """Have a system write its logits; its facts."""
        with system.start(threads) as worker:
            for tokens, path in zip(self._texts, self._paths, strict=True):
                worker.ask("save_logits", tokens=tokens, path=str(path))
            return worker.facts

    def scores(self, other: _Logits) -> list[Scores]:
        """Of the other's logits against these."""
        pairs = zip(self._paths, other._paths, self._texts, strict=True)
        return [scores(np.load(exact), np.load(got), tokens) for exact, got, tokens in pairs]


def scores(exact: NDArray[np.float32], got: NDArray[np.float32], tokens: list[int]) -> Scores:
    """Of logits [len, vocab] of a window's tokens. Raises ValueError where a logit is not finite."""
    if not (np.isfinite(exact).all() and np.isfinite(got).all()):
        raise ValueError("a logit is not finite")
    p, q = log_softmax(exact), log_softmax(got)
    kl = (np.exp(p) * (p - q)).sum(axis=1).mean()
    top1 = (exact.argmax(axis=1) == got.argmax(axis=1)).mean()
    loss = -q[np.arange(len(tokens) - 1), tokens[1:]].mean()
    return Scores(float(kl), float(top1), float(loss))


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    """In float64, over the last axis."""
    shifted: Floats = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _windows(settings: Settings) -> Windows:
    tokenizer = Tokenizer.from_file(model.kept_artifact(settings) / "tokenizer.json")
    return windows(tokenizer.encode)


def _rows(run: Run, name: str, facts: Facts, texts: Windows, found: list[Scores]) -> Iterator[Row]:
    settings = {**facts["settings"], "windows": fingerprint(texts), "window_tokens": SIZE}
    columns = {
        KL: ("nats", [s.kl for s in found]),
        TOP1: ("share", [s.top1 for s in found]),
        LOSS: ("nats", [s.loss for s in found]),
    }
    for measure_name, (unit, samples) in columns.items():
        head = ("quality", measure_name, name, 0, unit, tuple(samples))
        yield Row(*head, run, settings, facts["versions"])
