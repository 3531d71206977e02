"""The generations of `headrace_server` without a server: tickets of one scheduler, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import headrace
from bench.workers.protocol import Config, main
from headrace.llm import LLM
from headrace.options import How
from headrace.values import Message, SamplingParams


class HeadraceDirect:
    """config: model (an artifact's path), threads, slots, context (positions of each)."""

    def __init__(self, config: Config) -> None:
        self._llm = LLM(
            config["model"],
            threads=int(config["threads"]),
            parallel=int(config["slots"]),
            max_context=int(config["context"]),
        )

    def facts(self) -> dict[str, Any]:
        settings = {"kernels": self._llm.engine.backend.name}
        return {"versions": {"headrace": headrace.__version__}, "settings": settings}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"answer": self._answer}

    def _answer(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        """Seconds and tokens of greedy answers to all prompts at a time."""
        turns, params = self._llm.turns, SamplingParams(0.0, max_tokens=max_tokens)
        how: How = {"reuse": False, "shared_prefix_tokens": 0}
        start = time.perf_counter()
        tickets = []
        for prompt in prompts:
            ids = self._llm.chat_ids([Message("user", prompt)])
            tickets.append(self._llm.ticket(ids, params, how))
            turns.submit(tickets[-1])
        text = [self._llm.tokenizer.stream() for _ in tickets]
        count = 0
        while not all(ticket.over for ticket in tickets):
            turns.step(lambda: False)
            for ticket, written in zip(tickets, text, strict=True):
                while (token := ticket.pop()) is not None:
                    written.push(token.id)
                    count += 1
        return {"seconds": time.perf_counter() - start, "tokens": count}


if __name__ == "__main__":
    main(HeadraceDirect)
