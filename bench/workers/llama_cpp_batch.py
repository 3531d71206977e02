"""llama.cpp with many sequences at once, as its server runs its parallel slots: one batch a step, one KV cache.

A step is one decode call over one token of every sequence, and llama.cpp's own greedy sampler for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.workers.llama_cpp_engine import BATCH, LlamaCpp
from bench.workers.protocol import Config, batch_prompts, main


class LlamaCppBatch(LlamaCpp):
    """config: as LlamaCpp's, and sequences (most at a time), context (positions of each)."""

    def __init__(self, config: Config) -> None:
        self._most, self._positions = int(config["sequences"]), int(config["context"])
        super().__init__(config)
        self._batch = self._lib.llama_batch_init(BATCH, 0, 1)

    def adapt(self, params: Any) -> None:
        params.n_ctx = self._most * self._positions
        params.n_seq_max = self._most
        params.kv_unified = True

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"decode": self._steps, "prefill": self._prompts}

    def _prompts(self, sequences: int, tokens: int) -> dict[str, Any]:
        """Seconds until every sequence has its first token."""
        start = time.perf_counter()
        self._read_prompts(sequences, tokens)
        return {"seconds": time.perf_counter() - start}

    def _steps(self, sequences: int, context: int, steps: int) -> dict[str, Any]:
        """Seconds until every sequence has so many tokens after the first."""
        picked = self._read_prompts(sequences, context)
        start = time.perf_counter()
        for at in range(context, context + steps):
            self._read([(token, at, s) for s, token in enumerate(picked)], range(sequences))
            picked = [self._pick(s) for s in range(sequences)]
        return {"seconds": time.perf_counter() - start}

    def _read_prompts(self, sequences: int, length: int) -> list[int]:
        """The first token of every sequence, by its number."""
        self._lib.llama_memory_clear(self._memory, True)
        prompts = batch_prompts(sequences, length, self.vocab)
        rows = [
            (token, at, s) for s, prompt in enumerate(prompts) for at, token in enumerate(prompt)
        ]
        picked: list[int] = []
        for begin in range(0, len(rows), BATCH):
            part = rows[begin : begin + BATCH]
            ends = [i for i, (_, at, _) in enumerate(part) if at == length - 1]
            self._read(part, ends)
            picked += [self._pick(i) for i in ends]
        return picked

    def _read(self, rows: list[tuple[int, int, int]], wanted: Any) -> None:
        batch, wanted = self._batch, set(wanted)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, i in wanted
        self._check(self._lib.llama_decode(self._context, batch))
        self._lib.llama_synchronize(self._context)

    def _pick(self, row: int) -> int:
        return int(self._lib.llama_sampler_sample(self._sampler, self._context, row))


if __name__ == "__main__":
    main(LlamaCppBatch)
