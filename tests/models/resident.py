"""Runs a model with all its experts in memory, without an engine: a backend, slots that hold everything, one pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.container import Artifact
from headrace.kernels.program import PAGE_TOKENS, READY, Backend, Batch, ExpertSlots, Program, Route
from headrace.kernels.reference import ReferenceBackend
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program


def program_of(artifact: Artifact) -> Program:
    """The program of an artifact with or without experts."""
    manifest = artifact.manifest
    return build_program(
        DecoderConfig.from_json(manifest.config),
        manifest.tensors,
        artifact.tensors,
        manifest.fraction_bits,
        {r.layer: r.layout for r in artifact.records},
    )


def all_slots(artifact: Artifact) -> ExpertSlots:
    """Slots with every expert of every layer, in order."""
    count = sum(r.num_experts for r in artifact.records)
    width = max(r.layout.nbytes for r in artifact.records)
    experts = artifact.records[0].num_experts
    raw = np.zeros(count * width + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    memory = raw[start : start + count * width].reshape(count, width)
    table = np.full((artifact.manifest.config["num_layers"], experts), -1, np.int32)
    slot = 0
    for r in artifact.records:
        nbytes = r.layout.nbytes
        data = np.fromfile(r.path, np.uint8, r.num_experts * nbytes, offset=r.offset)
        memory[slot : slot + r.num_experts, :nbytes] = data.reshape(r.num_experts, nbytes)
        table[r.layer] = np.arange(slot, slot + r.num_experts)
        slot += r.num_experts
    return ExpertSlots(memory, table, np.full(count, READY, np.uint8), np.zeros(count, np.uint8))


def run(
    artifact: Artifact, tokens: list[int], backend: Backend | None = None
) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
    """One pass of `backend` (the reference) over `tokens`.

    Returns logits after each token, i32[len, vocab], and of every layer with experts the chosen ones, i32[len, top_k].
    """
    program = program_of(artifact)
    count = len(tokens)
    runner = (backend or ReferenceBackend()).compile(program, capacity=count, logit_capacity=count)
    if artifact.records:
        runner.bind_slots(all_slots(artifact))
    pages = -(-count // PAGE_TOKENS)
    cache = np.zeros((pages, program.shape.page_bytes), np.uint8)
    rows = np.arange(count, dtype=np.int32)
    ids, table = np.array(tokens, np.int32), np.arange(pages, dtype=np.int32)
    batch = Batch(ids, rows, np.zeros(count, np.int32), (table,), rows)
    routes, at = [], 0
    stops = [i + 1 for i, op in enumerate(program.ops) if isinstance(op, Route)]
    for stop in [*stops, len(program.ops)]:
        assert runner.run(at, stop, batch, cache) == stop
        routes.append(runner.routes().copy())
        at = stop
    out = runner.logits(count).copy()
    runner.close()
    return out, routes[: len(stops)]
