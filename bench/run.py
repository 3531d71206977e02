"""Runs the benchmarks and appends their rows to bench/results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PROMPT = [(7919 * i * i + 104729 * i) % 40000 + 100 for i in range(1100)]


@dataclass(frozen=True)
class Contender:
    """An engine, the Python that has it, its model file, and one option (kernels, KV type or dtype)."""

    label: str
    engine: str
    python: str
    model: str
    option: str | None = None


class Process:
    """A running worker."""

    def __init__(self, contender: Contender, threads: int) -> None:
        command = [
            contender.python,
            str(ROOT / "bench" / "workers.py"),
            contender.engine,
            contender.model,
            str(threads),
        ]
        if contender.option:
            command.append(contender.option)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
            env.pop(name, None)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self._answer()

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"a worker ended: {self._process.args!r}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def machine() -> dict[str, Any]:
    """What the rows were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":")[1].strip() for line in info.splitlines() if "model name" in line), "?"
    )
    flags = next(
        (line.split(":")[1].split() for line in info.splitlines() if line.startswith("flags")), []
    )
    wanted = [f for f in ("avx2", "avx_vnni", "avx512_vnni", "amx_int8") if f in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "flags": wanted,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "system": platform.system(),
    }


def record(kind: str, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows with the date, machine and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    head = {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "machine": machine(),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{kind}.jsonl").open("a") as file:
        for row in rows:
            file.write(json.dumps(head | row) + "\n")
            print(json.dumps({k: v for k, v in row.items() if k != "samples"}), flush=True)


WORKLOADS: dict[str, dict[str, Any]] = {
    "prefill 512": {"do": "prefill", "tokens": PROMPT[:512]},
    "decode at 16": {"do": "decode", "tokens": PROMPT, "context": 16, "steps": 48},
    "decode at 1000": {"do": "decode", "tokens": PROMPT, "context": 1000, "steps": 48},
}


def speed(contenders: Sequence[Contender], threads: Sequence[int], rounds: int) -> None:
    """Every contender in turn, round by round, on an otherwise idle machine."""
    for count in threads:
        running = {c: Process(c, count) for c in contenders}
        samples: dict[tuple[Contender, str], list[float]] = {}
        facts = {c: p.ask(do="facts") for c, p in running.items()}
        for turn in range(rounds + 1):
            for name, order in WORKLOADS.items():
                for contender, process in running.items():
                    if contender.engine == "transformers" and turn > 2:
                        continue
                    done = process.ask(**order)
                    if turn:  # the first round warms up
                        samples.setdefault((contender, name), []).append(
                            done["tokens"] / done["seconds"]
                        )
        for process in running.values():
            process.close()
        rows = [
            {"engine": c.label, "threads": count, "workload": name, "unit": "tok/s", "median": statistics.median(s),
             "samples": s, "facts": facts[c]}
            for (c, name), s in samples.items()
        ]  # fmt: skip
        record("speed", rows)


def bandwidth() -> None:
    """Plain reading of memory by NumPy's sum over int64, one and two processes."""
    rows = []
    for name, size in (("model-sized, 96 MB", 96 << 20), ("memory, 1 GB", 1 << 30)):
        data = np.ones(size // 8, np.int64)
        samples = []
        for _ in range(9):
            start = time.perf_counter()
            for part in np.split(data, 8):
                np.bitwise_or.reduce(part)
            samples.append(size / (time.perf_counter() - start) / 1e9)
        rows.append(
            {
                "workload": name,
                "threads": 1,
                "unit": "GB/s",
                "median": statistics.median(samples),
                "samples": samples,
            }
        )
    record("bandwidth", rows)


def load(artifact: str, rounds: int) -> None:
    """A fresh process from nothing to the first token, whole process."""
    command = [
        str(Path(sys.executable).parent / "headrace"),
        "run",
        "--model",
        artifact,
        "--greedy",
        "--max-tokens",
        "1",
        "--prompt",
        "Hi",
    ]
    samples = []
    for turn in range(rounds + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        if turn:
            samples.append(time.perf_counter() - start)
    record(
        "load",
        [
            {
                "workload": "open and first token",
                "unit": "s",
                "median": statistics.median(samples),
                "samples": samples,
            }
        ],
    )


def conversion(gguf: str) -> None:
    """Converting the pinned GGUF: seconds and peak memory of the process."""
    with tempfile.TemporaryDirectory() as base:
        code = (
            "import sys, time, resource; from pathlib import Path; from headrace.artifact.convert import convert;"
            "t = time.perf_counter(); convert(Path(sys.argv[1]), Path(sys.argv[2]));"
            "print(time.perf_counter() - t, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, gguf, f"{base}/out"],
            check=True,
            capture_output=True,
            text=True,
        )
    seconds, peak = (float(v) for v in done.stdout.split())
    record(
        "load",
        [
            {
                "workload": "convert the GGUF",
                "unit": "s",
                "median": seconds,
                "samples": [seconds],
                "peak_bytes": peak,
            }
        ],
    )


def share(artifact: str) -> None:
    """Python's share of a greedy decode step: everything of `generate` that is not the native call."""
    from headrace.artifact.container import open_artifact
    from headrace.engine.engine import Engine
    from headrace.values import SamplingParams

    rows = []
    for label, params in (("greedy", SamplingParams(temperature=0, max_tokens=200)),
                          ("sampled, top_p 0.95", SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=200))):  # fmt: skip
        with Engine(open_artifact(Path(artifact)), max_context=512) as engine:
            engine.end_tokens = frozenset()
            native = 0.0
            run = engine._runner.run

            def timed(*arguments: Any, run: Any = run) -> None:
                nonlocal native
                start = time.perf_counter()
                run(*arguments)
                native += time.perf_counter() - start

            engine._runner.run = timed  # type: ignore[method-assign]
            begin = 0.0
            for number, _ in enumerate(engine.generate(PROMPT[:16], params)):
                if number == 8:
                    begin, native = time.perf_counter(), 0.0
            whole = time.perf_counter() - begin
        rows.append({"workload": f"Python's share of a decode step, {label}", "unit": "share", "median": 1 - native / whole,
                     "samples": [1 - native / whole], "step_ms": whole / 191 * 1000})  # fmt: skip
    record("load", rows)


def quality(exact: Contender, contenders: Sequence[Contender], artifact: str) -> None:
    """KL and perplexity against float32 with the same weights, on the same windows of text."""
    from bench.text import windows
    from headrace.text.tokenizer import Tokenizer

    texts = windows(Tokenizer.from_file(Path(artifact) / "tokenizer.json"))
    wanted = _log_probabilities(exact, texts)
    rows = [_figures(exact.label, texts, wanted, wanted)]
    rows += [_figures(c.label, texts, wanted, _log_probabilities(c, texts)) for c in contenders]
    record("quality", rows)


def _log_probabilities(
    contender: Contender, texts: list[list[int]]
) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    process = Process(contender, 2)
    out = []
    with tempfile.TemporaryDirectory() as base:
        for tokens in texts:
            process.ask(do="logits", tokens=tokens, to=f"{base}/logits.npy")
            logits = np.load(f"{base}/logits.npy").astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            out.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    process.close()
    return out


def _figures(label: str, texts: list[list[int]], wanted: Any, got: Any) -> dict[str, Any]:
    kl, top, nll = [], [], []
    for tokens, w, g in zip(texts, wanted, got, strict=True):
        if not np.isfinite(g).all():
            raise ValueError(f"{label}: a logit is not finite")
        kl.append((np.exp(w) * (w - g)).sum(axis=1).mean())
        top.append((w.argmax(axis=1) == g.argmax(axis=1)).mean())
        nll.append(-g[np.arange(len(tokens) - 1), tokens[1:]].mean())
    return {
        "engine": label,
        "kl": float(np.mean(kl)),
        "top1": float(np.mean(top)),
        "perplexity": float(np.exp(np.mean(nll))),
    }
