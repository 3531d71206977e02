"""Whole-model equality on real weights: threads, tiers, chunks of a prompt, batches, and the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.artifact.container import open_artifact
from headrace.engine.engine import Engine
from headrace.engine.sequence import Work
from headrace.kernels.select import TIERS, unavailable

PROMPT = [(7919 * i * i + 13 * i) % 49000 for i in range(520)]
NATIVE = [t for t in TIERS if t != "reference"]


def read(path: Path, tokens: list[int], **options: object) -> tuple[bytes, bytes]:
    """Logits after the last token, and the KV bytes."""
    with Engine(open_artifact(path), max_context=1024, **options) as engine:  # type: ignore[arg-type]
        sequence = engine.new_sequence()
        logits = engine.read(sequence, tokens).tobytes()
        return logits, engine.kv_bytes(sequence)


@pytest.fixture(scope="module")
def whole(default_model: Path) -> tuple[bytes, bytes]:
    return read(default_model, PROMPT, threads=1)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks(default_model: Path, whole: tuple[bytes, bytes], chunk: int) -> None:
    assert read(default_model, PROMPT, threads=2, chunk=chunk) == whole


@pytest.mark.parametrize("threads", [2, 3])
def test_threads(default_model: Path, whole: tuple[bytes, bytes], threads: int) -> None:
    assert read(default_model, PROMPT, threads=threads) == whole


@pytest.mark.parametrize("tier", NATIVE)
def test_tiers(default_model: Path, tier: str) -> None:
    reason = unavailable()[tier]
    if reason:
        pytest.skip(f"tier {tier}: {reason}")
    short = PROMPT[:40]
    assert read(default_model, short, kernels=tier) == read(default_model, short, threads=1)


def test_the_definition(default_model: Path) -> None:
    short = PROMPT[:3]
    assert read(default_model, short, kernels="reference", chunk=3) == read(default_model, short)


def test_batch_mates(default_model: Path) -> None:
    prompts = [PROMPT[i * 20 : i * 20 + 30 + 7 * i] for i in range(4)]
    with Engine(open_artifact(default_model), max_context=256, num_sequences=8) as engine:
        alone = []
        for prompt in prompts:
            sequence = engine.new_sequence()
            alone.append((engine.read(sequence, prompt).copy(), engine.kv_bytes(sequence)))
            sequence.release()
        sequences = [engine.new_sequence() for _ in prompts]
        together = engine.forward([Work(s, p) for s, p in zip(sequences, prompts, strict=True)])
        for (logits, _), row in zip(alone, together, strict=True):
            assert np.array_equal(logits, row)
        for s, p, (_, kv) in zip(sequences, prompts, alone, strict=True):
            assert _landed(engine, s, len(p)) == _landed_bytes(engine, kv, len(p))


def _landed(engine: Engine, sequence: object, count: int) -> bytes:
    return _landed_bytes(engine, engine.kv_bytes(sequence), count)  # type: ignore[arg-type]


def _landed_bytes(engine: Engine, kv: bytes, count: int) -> bytes:
    """The bytes of whole tiles that hold landed positions only (a page may hold an earlier owner's bytes)."""
    shape = engine.shape
    pages = np.frombuffer(kv, np.uint8).reshape(
        -1, shape.num_layers, shape.num_kv_heads, 4, shape.tile_bytes
    )
    by_tile = pages.transpose(0, 3, 1, 2, 4).reshape(
        -1, shape.num_layers, shape.num_kv_heads, shape.tile_bytes
    )
    return by_tile[: count // 16].tobytes()
