"""Computes the recorded fingerprints; run as a script, writes tests/fingerprints.json.

The file changes only together with the arithmetic's version (src/headrace/arith/numbers.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import tiny
from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.artifact.container import Artifact, open_artifact
from headrace.engine.engine import Engine
from headrace.values import SamplingParams

RECORDED = Path(__file__).resolve().parent.parent / "fingerprints.json"
PROMPT = [(17 * i * i + 29 * i + 3) % 256 for i in range(40)]
PARAMS = SamplingParams(temperature=0.8, top_k=40, seed=7, max_tokens=16)


def fingerprint(artifact: Artifact, kernels: str | None = None, threads: int | None = None) -> str:
    """The fingerprint of one fixed sampled generation."""
    with Engine(artifact, kernels=kernels, threads=threads, max_context=128) as engine:
        for _ in engine.generate(PROMPT, PARAMS):
            pass
        assert engine.stats is not None
        return engine.stats.fingerprint


def weights_sha256(artifact: Artifact) -> str:
    """The hash of the packed weights, experts included: the same bytes on every machine."""
    files = artifact.manifest.files
    hashes = [files[name].sha256 for name in sorted(files) if name.endswith(".safetensors")]
    return hashes[0] if len(hashes) == 1 else sha256("\n".join(hashes).encode()).hexdigest()


def record(default_model: Path) -> dict[str, object]:
    prints = {"smollm2:135m": fingerprint(open_artifact(default_model))}
    weights = {"smollm2:135m": weights_sha256(open_artifact(default_model))}
    with tempfile.TemporaryDirectory() as base:
        for name in (*tiny.FAMILIES, *tiny.MIXTURES):
            artifact = tiny.make(Path(base) / name, name)
            prints[f"tiny-{name}"] = fingerprint(artifact)
            weights[f"tiny-{name}"] = weights_sha256(artifact)
    return {"arithmetic": ARITHMETIC_VERSION, "fingerprints": prints, "weights": weights}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n")
