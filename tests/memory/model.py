"""Facts of models to plan for."""

from __future__ import annotations

from headrace.memory.inputs import ModelFacts, Workspace
from headrace.memory.machine import Machine

GB = 10**9
MB = 10**6

MIXTURE = ModelFacts(
    dense_bytes=600 * MB,
    kv_bytes_per_token=20_000,
    context=131_072,
    workspace=Workspace(10 * MB, 60_000, 128),
    expert_slot_bytes=1_300_000,
    num_moe_layers=24,
    num_experts=128,
    top_k=8,
    text_bytes=20 * MB,
)
DENSE = ModelFacts(
    dense_bytes=100 * MB,
    kv_bytes_per_token=12_600,
    context=32_768,
    workspace=Workspace(2 * MB, 219_000, 128),
)
MACHINE = Machine(physical_bytes=64 * GB, available_bytes=60 * GB, cores=2)
