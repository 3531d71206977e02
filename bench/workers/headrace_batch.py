"""headrace with many generations at once, as its scheduler runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headrace
from bench.workers.protocol import Config, batch_prompts, main
from headrace.artifact.container import open_artifact
from headrace.engine.engine import Engine
from headrace.engine.scheduler import Scheduler, Ticket
from headrace.kernels.program import LOGIT_ROWS, LOGIT_ROWS_EACH
from headrace.values import SamplingParams


class HeadraceBatch:
    """config: model (an artifact's path), threads, sequences (most at a time), context (positions of each)."""

    def __init__(self, config: Config) -> None:
        artifact, most = open_artifact(Path(config["model"])), int(config["sequences"])
        self._engine = Engine(
            artifact,
            threads=int(config["threads"]),
            max_context=int(config["context"]),
            num_sequences=most,
            logit_rows=LOGIT_ROWS + LOGIT_ROWS_EACH * (most - 1),
        )
        self._engine.end_tokens = frozenset()
        self._engine.warm()
        self._identity = artifact.identity

    def facts(self) -> dict[str, Any]:
        settings = {"kernels": self._engine.backend.name, "identity": self._identity}
        return {"versions": {"headrace": headrace.__version__}, "settings": settings}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"decode": self._decode, "prefill": self._prefill}

    def _prefill(self, sequences: int, tokens: int) -> dict[str, Any]:
        """Seconds until every sequence has its first token."""
        start = time.perf_counter()
        self._run(self._tickets(sequences, tokens, 1), 1)
        return {"seconds": time.perf_counter() - start}

    def _decode(self, sequences: int, context: int, steps: int) -> dict[str, Any]:
        """Seconds until every sequence has so many tokens after the first."""
        running = self._tickets(sequences, context, steps + 1)
        scheduler, tickets = running
        counts = self._run(running, 1)
        assert counts == [1] * sequences, "they began together"
        start = time.perf_counter()
        self._run((scheduler, tickets), steps)
        return {"seconds": time.perf_counter() - start}

    def _tickets(
        self, sequences: int, length: int, max_tokens: int
    ) -> tuple[Scheduler, list[Ticket]]:
        scheduler, params = Scheduler(self._engine), SamplingParams(0.0, max_tokens=max_tokens)
        tickets = []
        for prompt in batch_prompts(sequences, length, self._engine.config.vocab_size):
            tickets.append(Ticket(self._engine.generation(prompt, params, reuse=False)))
            scheduler.submit(tickets[-1])
        return scheduler, tickets

    def _run(self, running: tuple[Scheduler, list[Ticket]], steps: int) -> list[int]:
        scheduler, tickets = running
        counts = [0] * len(tickets)
        while min(counts) < steps:
            scheduler.step()
            for i, ticket in enumerate(tickets):
                while ticket.pop() is not None:
                    counts[i] += 1
        return counts


if __name__ == "__main__":
    main(HeadraceBatch)
