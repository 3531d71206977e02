"""AirLLM on the processor: the model of transformers whose layers it loads one after another."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from bench.workers.protocol import Config, Reader, main


class AirLLM(Reader):
    """config: model (a Hugging Face checkpoint), shards (where it writes its copy by layers), threads."""

    def __init__(self, config: Config) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(int(config["threads"]))
        airllm = importlib.import_module("airllm")
        self._transformers: Any = importlib.import_module("transformers")
        self._model = airllm.AutoModel.from_pretrained(
            config["model"], device="cpu", layer_shards_saving_path=config["shards"]
        )
        self._cache, self._length = self._transformers.DynamicCache(), 0
        self.vocab = int(self._model.config.vocab_size)

    def facts(self) -> dict[str, Any]:
        versions = {name: metadata.version(name) for name in ("airllm", "transformers", "torch")}
        return {"versions": versions, "settings": {"dtype": str(self._model.running_dtype)}}

    def clear(self) -> None:
        self._cache, self._length = self._transformers.DynamicCache(), 0

    def read(self, tokens: list[int]) -> None:
        with self._torch.no_grad():
            self._model(self._torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        self._length += len(tokens)


if __name__ == "__main__":
    main(AirLLM)
