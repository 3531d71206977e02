"""Adapters: what integers lose of one against the float32 model with it, and what switching and using one costs.

There is no trained adapter of the small model that could be pinned, so one is made: random pairs of every module,
as large beside the weights as trained ones usually are. It says nothing about text, but its error is an adapter's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine, model
from bench.figures import Figures
from bench.float_model import FloatModel
from bench.quality import scores
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.systems import HEADRACE
from bench.tables import NOTHING, provenance, table
from bench.windows import SIZE, Windows, fingerprint, windows
from headrace.artifact.adapter import open_adapter
from headrace.artifact.adapter_convert import convert_adapter
from headrace.artifact.adapter_places import MODULES
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence, Work
from headrace.text.tokenizer import Tokenizer

RANK, ALPHA = 16, 32
RELATIVE_NORM = (
    0.03  # of what the adapter adds to a weight, over the weight's, in the Frobenius norm
)
WINDOWS = 3  # of the quality benchmark's seven: two technical, one legal
KL_PLAIN, KL_UNDER, KL_OF = "KL without", "KL under the adapter", "KL of the adapter"
RELOAD, LOAD, SWITCH, TOKEN, UNDER = (
    "reload to the first token",
    "load an adapter",
    "switch to the first token",
    "a token without",
    "a token under one",
)
CONTEXT = 64


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "adapters"."""
    run = machine.new_run(command("adapters", settings))
    base = open_artifact(model.kept_artifact(settings))
    floats = FloatModel(base)
    sources = [make(settings.work / f"adapter-{seed}", floats, seed) for seed in (1, 2)]
    folders = [convert_adapter(s, s.with_name(f"{s.name}-artifact"), base).path for s in sources]
    rows = [row for n in settings.threads for row in _costs(base, folders, settings.rounds, n, run)]
    rows += _quality(base, floats, sources[0], folders[0], max(settings.threads), run)
    append(settings.results / "adapters.jsonl", rows)
    return rows


def make(path: Path, floats: FloatModel, seed: int) -> Path:
    """A PEFT folder of random pairs in float32."""
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(floats.config.num_layers):
        for module, weight in floats.weights(layer).items():
            n, k = weight.shape
            a = rng.uniform(-1, 1, (RANK, k)) / np.sqrt(k)
            b = rng.normal(size=(n, RANK))
            wanted = RELATIVE_NORM * float(np.linalg.norm(weight))
            b *= wanted / (ALPHA / RANK * float(np.linalg.norm(b @ a)))
            name = f"base_model.model.model.layers.{layer}.{MODULES[module]}"
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    path.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    with (path / "adapter_model.safetensors").open("wb") as file:
        writer = TensorFileWriter(file, [TensorSpec(n, "F32", t.shape) for n, t in tensors.items()])
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return path


def _quality(
    base: Artifact, floats: FloatModel, source: Path, folder: Path, threads: int, run: Run
) -> Iterator[Row]:
    texts = chosen(Tokenizer.from_file(base.tokenizer_path).encode)
    facts: dict[str, Any] = {
        "windows": fingerprint(texts), "window_tokens": SIZE, "rank": RANK, "alpha": ALPHA,
        "relative_norm": RELATIVE_NORM,
    }  # fmt: skip
    plain = [floats.logits(tokens) for tokens in texts]
    floats.merge(source)
    under = [floats.logits(tokens) for tokens in texts]
    with Engine(base, threads=threads, max_context=SIZE) as engine:
        loaded = engine.load_adapter(open_adapter(folder, base))
        got = {salt: [_logits(engine, t, salt) for t in texts] for salt in (b"", loaded.salt)}
    pairs = {
        KL_PLAIN: (plain, got[b""]),
        KL_UNDER: (under, got[loaded.salt]),
        KL_OF: (under, plain),
    }
    for name, (exact, other) in pairs.items():
        each = [scores(e, o, t) for e, o, t in zip(exact, other, texts, strict=True)]
        more = {"top1": [s.top1 for s in each]}
        samples = tuple(s.kl for s in each)
        yield Row("adapters", name, HEADRACE, 0, "nats", samples, run, facts | more)


def chosen(encode: Callable[[str], list[int]]) -> Windows:
    every = windows(encode)
    return [every[0], every[2], every[-1]][:WINDOWS]


def _logits(engine: Engine, tokens: list[int], salt: bytes) -> Any:
    sequence, parts = engine.new_sequence(salt), []
    for at in range(0, len(tokens), 16):
        parts.append(engine.forward([Work(sequence, tokens[at : at + 16], True)]).copy())
    sequence.release()
    return (np.concatenate(parts) / 2**engine.fraction_bits).astype(np.float32)


def _costs(
    base: Artifact, folders: list[Path], rounds: int, threads: int, run: Run
) -> Iterator[Row]:
    samples: dict[str, list[float]] = {m: [] for m in (RELOAD, LOAD, SWITCH, TOKEN, UNDER)}
    nbytes = 0
    for _ in range(rounds):
        engine, seconds = _timed(partial(_opened, base.path, threads))
        samples[RELOAD].append(seconds)
        with engine:
            nbytes = _round(engine, base, folders, samples)
    facts = {"adapter_bytes": nbytes, "rank": RANK, "context": CONTEXT}
    for name, each in samples.items():
        yield Row("adapters", name, HEADRACE, threads, "s", tuple(each), run, facts)


def _round(
    engine: Engine, base: Artifact, folders: list[Path], samples: dict[str, list[float]]
) -> int:
    """Everything but the reload, in one engine; the bytes of an adapter."""
    opened = []
    for folder in folders:
        loaded, seconds = _timed(lambda f=folder: engine.load_adapter(open_adapter(f, base)))  # type: ignore[misc]
        samples[LOAD].append(seconds)
        opened.append(loaded)
    salts = [a.salt for a in opened]
    sequence = engine.new_sequence()
    engine.read(sequence, list(range(100, 100 + CONTEXT)))
    samples[TOKEN] += _tokens(engine, sequence, [b""] * 16)
    _tokens(engine, sequence, salts)
    samples[SWITCH] += _tokens(engine, sequence, salts * 8)
    samples[UNDER] += _tokens(engine, sequence, salts[1:] * 16)
    return int(opened[0].nbytes)


def _opened(path: Path, threads: int) -> Engine:
    """The model from its file to the logits after a token."""
    engine = Engine(open_artifact(path), threads=threads, max_context=512)
    engine.warm()
    _first(engine, engine.new_sequence())
    return engine


def _first(engine: Engine, sequence: Sequence) -> None:
    engine.forward([Work(sequence, [100])])


def _tokens(engine: Engine, sequence: Sequence, salts: list[bytes]) -> list[float]:
    """Seconds of a token under each adapter, with setting it."""

    def one(salt: bytes) -> None:
        sequence.set_adapter(salt)
        _first(engine, sequence)

    return [_timed(partial(one, salt))[1] for salt in salts]


def _timed(act: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return act(), time.perf_counter() - start


def section(figures: Figures) -> Iterator[str]:
    """The page's tables."""
    rows = figures.rows("adapters")
    if not rows:
        yield NOTHING
        return
    yield table(
        ("KL, nats", "median", "top-1 equal"),
        [
            (name, f"{row.median:.4f}", f"{np.median(row.settings['top1']):.1%}")
            for name in (KL_PLAIN, KL_UNDER, KL_OF)
            for row in figures.rows("adapters", measure=name)
        ],
    )
    threads = sorted({r.threads for r in rows if r.threads})
    yield table(
        ("milliseconds", *(f"{n} threads" if n > 1 else "1 thread" for n in threads)),
        [
            _cost_line(figures, name, threads)
            for name in (RELOAD, LOAD, SWITCH, UNDER, TOKEN)
            if figures.rows("adapters", measure=name)
        ],
    )
    yield from provenance(rows)


def _cost_line(figures: Figures, name: str, threads: list[int]) -> tuple[str, ...]:
    cells = []
    for n in threads:
        seconds = figures.median("adapters", name, HEADRACE, threads=n) or 0.0
        reload = figures.median("adapters", RELOAD, HEADRACE, threads=n) or 1.0
        token = figures.median("adapters", TOKEN, HEADRACE, threads=n) or 0.0
        if name == SWITCH:
            cells.append(
                f"{seconds * 1e3:.2f}, beyond a token {(seconds - token) / reload:.2%} of a reload"
            )
        else:
            cells.append(f"{seconds * 1e3:.2f}")
    return name, *cells
