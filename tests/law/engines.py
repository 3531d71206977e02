"""Engines of small models, opened for one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import unavailable


@contextmanager
def opened(
    artifact: Artifact,
    kernels: str | None = None,
    threads: int = 2,
    chunk: int = 512,
    context: int = 256,
    num_sequences: int = 2,
    experts: StreamOptions | None = None,
) -> Iterator[Engine]:
    """Skips the test where the processor has not this tier."""
    if reason := unavailable().get(kernels or "", ""):
        pytest.skip(f"tier {kernels}: {reason}")
    with Engine(
        artifact,
        kernels=kernels,
        chunk=chunk,
        threads=threads,
        max_context=context,
        num_sequences=num_sequences,
        experts=experts,
    ) as engine:
        yield engine
