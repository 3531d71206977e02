"""What is compared: each system by name, with the interpreter and the file that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import model
from bench.process import Worker
from bench.settings import Settings, own_python

HEADRACE = "headrace"
REFERENCE = "float32"
LLAMA_MODULE = "llama_cpp_engine"


@dataclass(frozen=True, eq=False)
class System:
    """A worker module with its configuration, under the name that rows carry.

    max_rounds: for a system so slow that a sample in every round would only take time.
    """

    name: str
    module: str
    python: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    max_rounds: int | None = None

    def start(self, threads: int, prefix: Sequence[str] = ()) -> Worker:
        return Worker(self.python, self.module, self.config, threads, prefix)


def headrace(settings: Settings) -> System:
    artifact = str(model.kept_artifact(settings))
    return System(HEADRACE, "headrace_engine", own_python(), {"model": artifact})


def llama_systems(settings: Settings, *, kv_variants: bool = False) -> list[System]:
    """Every llama.cpp build on the same GGUF and on its own Q4_0."""
    return [s for python in settings.llama_python for s in _llama(settings, python, kv_variants)]


def _llama(settings: Settings, python: Path, kv_variants: bool) -> list[System]:
    source = {"model": str(model.gguf(settings))}
    requantised = {"model": str(model.requantised(settings, python))}
    build = build_name(System("", LLAMA_MODULE, python, source))
    found = [System(f"{build} Q4_1", LLAMA_MODULE, python, source)]
    if kv_variants:
        config = {**source, "kv": "q8_0"}
        found.append(System(f"{build} Q4_1, KV q8_0", LLAMA_MODULE, python, config))
    return [*found, System(f"{build} Q4_0", LLAMA_MODULE, python, requantised)]


def build_name(system: System) -> str:
    """Named by the best instruction set that the build says it uses."""
    with system.start(threads=1) as worker:
        build = worker.facts["settings"]["build"]
    sets = {"AMX_INT8": "AMX", "AVX512_VNNI": "AVX-512", "AVX2": "AVX2", "DOTPROD": "NEON"}
    name = next((short for flag, short in sets.items() if flag in build), "portable")
    return f"llama.cpp ({name})"


def transformers_systems(settings: Settings) -> list[System]:
    """In float32 and, for speed, bfloat16."""
    if settings.torch_python is None:
        return []
    source, python = {"model": str(model.gguf(settings))}, settings.torch_python
    module = "transformers_engine"
    return [
        System(f"transformers {dtype}", module, python, {**source, "dtype": dtype}, max_rounds=3)
        for dtype in ("float32", "bfloat16")
    ]
