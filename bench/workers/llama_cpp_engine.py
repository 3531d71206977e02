"""llama.cpp through the C functions of llama-cpp-python: nothing of Python's is in its way.

A step is one decode call and llama.cpp's own greedy sampler.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workers.protocol import Config, Engine, main

CONTEXT = 2048
BATCH = 512
KV_TYPES = {"f16": 1, "q8_0": 8}  # GGML_TYPE_*
FLASH = {"auto": -1, "on": 1}


class LlamaCpp(Engine):
    """config: model (a GGUF), threads, kv ("f16", llama.cpp's default, or "q8_0"), repack (default True: weights may
    be copied into buffers in another order; False: they are used where the file is mapped)."""

    def __init__(self, config: Config) -> None:
        self._lib: Any = importlib.import_module("llama_cpp")
        self._log: list[str] = []
        self._keep = self._lib.llama_log_callback(self._hear)
        self._lib.llama_log_set(self._keep, None)
        self._lib.llama_backend_init()
        self._kv = str(config.get("kv", "f16"))
        self._threads = int(config["threads"])
        self._model = self._load(str(config["model"]), bool(config.get("repack", True)))
        self._context = self._open()
        self._memory = self._lib.llama_get_memory(self._context)
        self._sampler = self._lib.llama_sampler_init_greedy()
        self.vocab = int(
            self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))
        )

    def facts(self) -> dict[str, Any]:
        system = self._lib.llama_print_system_info().decode()
        build = re.findall(r"(\w+) = 1", system)
        lines = "".join(self._log)
        found = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", lines)
        buffers = [f"{name} {size} MiB" for name, size in found]
        settings = {"kv": self._kv, "build": build, "weight_buffers": buffers, "n_batch": BATCH}
        return {
            "versions": {"llama-cpp-python": metadata.version("llama_cpp_python")},
            "settings": settings,
        }

    def rewind(self, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, 0, length, -1):
            raise RuntimeError(f"llama.cpp did not forget the tokens from {length} on")

    def read(self, tokens: list[int]) -> None:
        for at in range(0, len(tokens), BATCH):
            self._decode_tokens(tokens[at : at + BATCH])

    def step(self) -> None:
        self._decode_tokens([int(self._lib.llama_sampler_sample(self._sampler, self._context, -1))])

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        assert len(tokens) <= BATCH
        self._lib.llama_memory_clear(self._memory, True)
        batch = self._lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        self._check(self._lib.llama_decode(self._context, batch))
        self._lib.llama_batch_free(batch)
        pointer = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(pointer, shape=(len(tokens), self.vocab)).copy()

    def _load(self, path: str, repack: bool) -> Any:
        params = self._lib.llama_model_default_params()
        params.use_extra_bufts = repack
        model = self._lib.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise RuntimeError(f"llama.cpp did not load the model: {''.join(self._log)[-500:]}")
        return model

    def _open(self) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, BATCH, BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.type_k = params.type_v = KV_TYPES[self._kv]
        params.flash_attn_type = FLASH["auto" if self._kv == "f16" else "on"]
        params.no_perf = True
        self.adapt(params)
        context = self._lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp made no context: {''.join(self._log)[-500:]}")
        return context

    def adapt(self, params: Any) -> None:
        """Change the parameters of the context."""

    def _decode_tokens(self, tokens: list[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        self._check(
            self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(array, len(tokens)))
        )
        self._lib.llama_synchronize(self._context)

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _hear(self, level: int, text: bytes, data: Any) -> None:
        self._log.append(text.decode("utf-8", "replace"))


if __name__ == "__main__":
    main(LlamaCpp)
