"""headrace with experts on disk: loaded by its memory plan, as `headrace run` does, or with single parts changed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import headrace
from bench.workers.protocol import Config, Reader, main
from headrace.artifact.container import open_artifact
from headrace.engine.engine import Engine
from headrace.engine.planned import stream_options
from headrace.experts.stream import StreamOptions
from headrace.memory.facts import plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.machine import read_machine


class HeadraceStream(Reader):
    """config: model (an artifact's path), threads, max_context, and of the memory options memory_gb or
    experts_per_layer (neither: a pool for all experts). lookahead (default True) and lanes change the stream alone."""

    def __init__(self, config: Config) -> None:
        artifact = open_artifact(Path(config["model"]))
        threads = int(config["threads"])
        plan = _plan(config, artifact, threads)
        options = _options(config, plan)
        self._engine = Engine(
            artifact,
            threads=threads,
            max_context=plan.window,
            chunk=plan.chunk_rows,
            experts=options,
        )
        self._engine.warm()
        self.vocab = self._engine.config.vocab_size
        self._sequence = self._engine.new_sequence()
        self._about = {
            "kernels": self._engine.backend.name,
            "identity": artifact.identity,
            "pool_slots": options.slots - options.reserve,
            "lookahead_slots": options.reserve,
            "sweep_slots": options.sweep_slots,
            "experts": plan.num_experts,
            "expert_bytes": plan.slot_bytes,
            "uses_per_token": self._engine.shape.top_k * len(artifact.records),
            "lanes": options.num_lanes,
            "ledger": dict(plan.ledger.rows()),
            "chunk_rows": plan.chunk_rows,
            "window": plan.window,
        }

    def facts(self) -> dict[str, Any]:
        return {"versions": {"headrace": headrace.__version__}, "settings": self._about}

    def counters(self) -> dict[str, float]:
        stats = self._engine.expert_stats()
        assert stats is not None, "the model has experts"
        return {**super().counters(), **asdict(stats)}

    def clear(self) -> None:
        self._sequence.rewind(0)

    def read(self, tokens: list[int]) -> None:
        self._engine.read(self._sequence, tokens)


def _plan(config: Config, artifact: Any, threads: int) -> Plan:
    window = int(config["max_context"])
    per_layer = config.get("experts_per_layer")
    if config.get("memory_gb") is None and per_layer is None:
        experts = {"experts_per_layer": artifact.records[0].num_experts}
    else:
        experts = {"experts_per_layer": per_layer, "memory_gb": config.get("memory_gb")}
    options = PlanOptions(max_context=window, **experts)
    return plan_model(artifact, options, read_machine(), threads=threads).for_loading()


def _options(config: Config, plan: Plan) -> StreamOptions:
    """Those of the plan; without lookahead its slots go to the pool."""
    options = stream_options(plan)
    if not config.get("lookahead", True):
        options = replace(options, reserve=0)
    lanes = config.get("lanes")
    return options if lanes is None else replace(options, num_lanes=int(lanes))


if __name__ == "__main__":
    main(HeadraceStream)
