"""neurostream: its model and its cache, without its sampling."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from bench.workers.protocol import Config, Reader, main


class NeuroStream(Reader):
    """config: model (a GGUF), threads, arena and cache (bytes of its two budgets)."""

    def __init__(self, config: Config) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(int(config["threads"]))
        api = importlib.import_module("neurostream.api")
        self._settings = {"arena_bytes": config["arena"], "cache_bytes": config["cache"]}
        self._stream = api.NeuroStream.load(
            config["model"],
            mem_budget=int(config["arena"]),
            ram_budget=int(config["cache"]),
            device="cpu",
        )
        self._new_cache = lambda: api.KVCache(self._stream.cfg.n_layer)
        self._cache, self._length = self._new_cache(), 0
        self.vocab = int(self._stream.cfg.vocab_size)

    def facts(self) -> dict[str, Any]:
        versions = {name: metadata.version(name) for name in ("neurostream", "torch")}
        return {"versions": versions, "settings": self._settings}

    def clear(self) -> None:
        self._cache, self._length = self._new_cache(), 0

    def read(self, tokens: list[int]) -> None:
        with self._torch.no_grad():
            self._stream.model.forward(
                self._torch.tensor(tokens), self._cache, start_pos=self._length
            )
        self._length += len(tokens)


if __name__ == "__main__":
    main(NeuroStream)
