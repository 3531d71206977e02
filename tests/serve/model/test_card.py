"""What is told of the model while it is served."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.llm import LLM
from headrace.memory.inputs import GB, PlanOptions
from headrace.serve.dialect import Memory
from headrace.serve.model.backend import ModelBackend
from headrace.serve.model.describe import now
from headrace.serve.model.pace import Pace
from serve.model.asking import NAME, Asked, Server, messages, user
from serve.scripted import CARD


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        (PlanOptions(), Memory("auto", 1.5, None, 0.75)),
        (PlanOptions(memory_gb=2.0), Memory("--memory-gb", 1.5, None, 0.75)),
        (PlanOptions(memory_limit_gb=3.0), Memory("auto", 1.5, 3.0, 0.75)),
        (PlanOptions(pool_gb=1.0), Memory("--pool-gb", None, None, 0.75)),
        (PlanOptions(experts_per_layer=4), Memory("--experts-per-layer", None, None, 0.75)),
    ],
)
def test_memory_is_told_as_it_is_now(wild: LLM, options: PlanOptions, memory: Memory) -> None:
    """Half a gigabyte was given back to others."""
    limit = options.memory_limit_gb
    plan = replace(
        wild.plan,
        source=options.source,
        target_bytes=2 * GB,
        limit_bytes=limit and round(limit * GB),
        pool_slots=10,
        slot_bytes=GB // 8,
    )
    llm: Any = SimpleNamespace(plan=plan, given_back=GB // 2)
    told = now(CARD, llm, 12.34)
    assert told.memory == memory
    assert told.resident_bytes == plan.ledger.total - GB // 2
    assert told.full_prefill_seconds == 12.3


def test_ollamas_lists_tell_the_plan_and_the_wait(wild: LLM, wild_server: Server) -> None:
    backend: ModelBackend = wild_server.backend
    backend._worker.pace = Pace()
    shown = wild_server.http.post("/api/show", json={"model": NAME}).json()
    assert shown["est_prefill_s_at_max_context"] is None
    assert messages(wild_server, Asked(user("x" * 300), 2), stream=False).new == 2
    shown = wild_server.http.post("/api/show", json={"model": NAME}).json()
    assert shown["est_prefill_s_at_max_context"] >= 0
    (entry,) = wild_server.http.get("/api/ps").json()["models"]
    assert entry["size"] == wild.plan.ledger.total
    assert entry["details"]["memory_plan"] == {
        "source": "auto",
        "target_gb": wild.plan.target_bytes / GB,
        "memory_limit_gb": None,
        "expert_pool_gb": 0.0,
    }
