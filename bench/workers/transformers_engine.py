"""transformers on the CPU with the GGUF's dequantised weights."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workers.protocol import Config, Engine, main


class Transformers(Engine):
    """config: model (a GGUF), threads, dtype ("float32" or "bfloat16")."""

    def __init__(self, config: Config) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(int(config["threads"]))
        self._torch.set_grad_enabled(False)
        self._dtype = str(config.get("dtype", "float32"))
        path = Path(config["model"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(self._torch, self._dtype)
        ).eval()
        self.vocab = int(self._model.config.vocab_size)
        self._past: Any = None
        self._next: Any = None

    def facts(self) -> dict[str, Any]:
        versions = {name: metadata.version(name) for name in ("torch", "transformers", "gguf")}
        capability = self._torch.backends.cpu.get_cpu_capability()
        attention = self._model.config._attn_implementation
        settings = {"dtype": self._dtype, "cpu_capability": capability, "attention": attention}
        return {"versions": versions, "settings": settings}

    def rewind(self, length: int) -> None:
        if length == 0:
            self._past = None
        elif surplus := self._past.get_seq_length() - length:
            self._past.crop(-surplus)

    def read(self, tokens: list[int]) -> None:
        self._forward(self._torch.tensor([tokens]))

    def step(self) -> None:
        self._forward(self._next)

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        out = self._model(self._torch.tensor([tokens]), use_cache=False).logits[0]
        array: NDArray[np.float32] = out.float().numpy()
        return array

    def _forward(self, ids: Any) -> None:
        out = self._model(ids, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        self._past = out.past_key_values
        self._next = out.logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main(Transformers)
