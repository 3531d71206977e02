"""What speed a plan lets one expect from measured disk and memory. Nothing is guessed where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.memory.inputs import ModelFacts
from headrace.memory.ledger import Plan


@dataclass(frozen=True)
class Estimate:
    """Decode of one token: bytes that are touched, bytes that come from disk, tokens a second.

    It supposes that experts are used evenly, which real routing beats, and that reading and computing do not
    overlap. decode_rate is None where a needed speed was not measured.
    """

    touched_bytes: int
    streamed_bytes: int
    decode_rate: float | None


def estimate(
    plan: Plan, facts: ModelFacts, *, disk_bytes_per_s: int | None, memory_bytes_per_s: int | None
) -> Estimate:
    """The expected decode of a plan."""
    experts = facts.num_moe_layers * facts.top_k * facts.expert_slot_bytes
    missing = facts.num_slots - plan.pool_slots
    streamed = experts * missing // facts.num_slots if facts.num_slots else 0
    touched = facts.dense_bytes + experts
    if not memory_bytes_per_s or (streamed and not disk_bytes_per_s):
        return Estimate(touched, streamed, None)
    seconds = touched / memory_bytes_per_s
    if streamed and disk_bytes_per_s:
        seconds += streamed / disk_bytes_per_s
    return Estimate(touched, streamed, 1 / seconds if seconds else None)
