"""Runners of every tier over the small models of models.py, with caches that they can share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.kernels import program as p
from headrace.kernels.select import TIERS, select, unavailable
from kernels.models import Model

PAGES = 2  # of each sequence: 128 positions
SEQUENCES = 4
HERE = [tier for tier in TIERS if not unavailable()[tier]]  # reference last


def token(sequence: int, position: int) -> int:
    return (position * position * 7 + 11 * sequence + 3) % 64


def batch(rows: list[tuple[int, int]], wanted: list[int]) -> p.Batch:
    """Rows (sequence, position), and those of them whose logits are wanted."""
    sequences, positions = np.array(rows, np.int32).T
    tables = [np.arange(PAGES, dtype=np.int32) + PAGES * s for s in range(SEQUENCES)]
    return p.Batch(
        tokens=np.array([token(*row) for row in rows], np.int32),
        positions=np.ascontiguousarray(positions),
        sequences=np.ascontiguousarray(sequences),
        page_tables=tuple(tables),
        logit_rows=np.array(wanted, np.int32),
    )


def new_cache(model: Model) -> NDArray[np.uint8]:
    count, page_bytes = PAGES * SEQUENCES, model.program.shape.page_bytes
    return aligned(count * page_bytes).reshape(count, page_bytes)


def aligned(nbytes: int, fill: int = 0) -> NDArray[np.uint8]:
    """u8[nbytes] at a multiple of 64."""
    raw = np.full(nbytes + 64, fill, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:nbytes]


def compiled(
    model: Model, tier: str, threads: int = 1, capacity: int = 160, logit_capacity: int = 16
) -> p.Runner:
    backend = select(tier, threads=threads)
    runner = backend.compile(model.program, capacity=capacity, logit_capacity=logit_capacity)
    if model.layouts:
        runner.bind_slots(model.slots())
    return runner
