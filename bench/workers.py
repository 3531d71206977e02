"""One engine in one process, obeying lines on standard input: so that engines take turns on an idle machine.

Protocol: a JSON line {"do": "prefill" | "decode" | "logits", ...} in, a JSON line out. Run as
`python bench/workers.py ENGINE MODEL THREADS`; imports only what its engine needs, since a peer lives in an
environment of its own.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

Tokens = list[int]


class Worker(Protocol):
    """A loaded model."""

    def reset(self) -> None:
        """Forget everything that was read."""

    def read(self, tokens: Tokens) -> None:
        """Read tokens after what was read before."""

    def logits(self, tokens: Tokens) -> Any:
        """Logits after each token, as an array [len, vocab]."""

    def facts(self) -> dict[str, Any]:
        """Name, versions, settings."""


class Headrace:
    def __init__(self, model: str, threads: int, kernels: str | None) -> None:
        from pathlib import Path

        import headrace
        from headrace.artifact.container import open_artifact
        from headrace.engine.engine import Engine

        artifact = open_artifact(Path(model))
        self._engine = Engine(artifact, threads=threads, kernels=kernels, max_context=2048)
        self._bytes = sum(
            a.nbytes for k, a in artifact.tensors.items() if not k.startswith(("rope", "table"))
        )
        self._sequence = self._engine.new_sequence()
        self._version = headrace.__version__

    def reset(self) -> None:
        self._sequence.rewind(0)

    def read(self, tokens: Tokens) -> None:
        self._engine.read(self._sequence, tokens)

    def logits(self, tokens: Tokens) -> Any:
        return self._engine.logits(tokens) / 2.0**self._engine.fraction_bits

    def facts(self) -> dict[str, Any]:
        return {
            "version": self._version,
            "kernels": self._engine.backend.name,
            "weight_bytes": self._bytes,
        }


class LlamaCpp:
    def __init__(self, model: str, threads: int, kv: str | None) -> None:
        import llama_cpp

        kind = {None: 1, "f16": 1, "q8_0": 8}[kv]
        self._model = llama_cpp.Llama(
            model, n_ctx=2048, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            verbose=False, logits_all=False, type_k=kind, type_v=kind, flash_attn=kv == "q8_0",
        )  # fmt: skip
        self._make = lambda: llama_cpp.Llama(
            model, n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False,
            logits_all=True, type_k=kind, type_v=kind, flash_attn=kv == "q8_0",
        )  # fmt: skip
        self._info = llama_cpp.llama_print_system_info().decode()
        self._version = llama_cpp.__version__

    def reset(self) -> None:
        self._model.reset()

    def read(self, tokens: Tokens) -> None:
        self._model.eval(tokens)

    def logits(self, tokens: Tokens) -> Any:
        model = self._make()
        model.eval(tokens)
        return model.scores[: len(tokens)].copy()

    def facts(self) -> dict[str, Any]:
        return {"version": self._version, "build": self._info}


class Transformers:
    def __init__(self, model: str, threads: int, dtype: str | None) -> None:
        from pathlib import Path

        import torch
        import transformers

        torch.set_num_threads(threads)
        path = Path(model)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype or "float32")
        ).eval()
        self._version = f"{transformers.__version__}, torch {torch.__version__}"
        self._cache: Any = None

    def reset(self) -> None:
        self._cache = None

    def read(self, tokens: Tokens) -> None:
        with self._torch.inference_mode():
            ids = self._torch.tensor([tokens])
            out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._cache = out.past_key_values

    def logits(self, tokens: Tokens) -> Any:
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([tokens])).logits[0].float().numpy()

    def facts(self) -> dict[str, Any]:
        return {"version": self._version}


ENGINES = {"headrace": Headrace, "llama.cpp": LlamaCpp, "transformers": Transformers}


def obey(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Do one order. Seconds are wall time of the reading alone."""
    tokens: Tokens = order.get("tokens", [])
    if order["do"] == "facts":
        return worker.facts()
    if order["do"] == "logits":
        import numpy as np

        np.save(order["to"], np.asarray(worker.logits(tokens), dtype=np.float32))
        return {}
    worker.reset()
    if order["do"] == "prefill":
        start = time.perf_counter()
        worker.read(tokens)
        return {"seconds": time.perf_counter() - start, "tokens": len(tokens)}
    context, steps = order["context"], order["steps"]
    worker.read(tokens[:context])
    start = time.perf_counter()
    for token in tokens[context : context + steps]:
        worker.read([token])
    return {"seconds": time.perf_counter() - start, "tokens": steps}


def main() -> None:
    engine, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    worker = ENGINES[engine](model, threads, sys.argv[4] if len(sys.argv) > 4 else None)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(worker, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
