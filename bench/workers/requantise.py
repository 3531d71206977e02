"""Requantises a GGUF to Q4_0 with llama.cpp's own function and its defaults."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import Any

from bench.workers.protocol import begin, serve

Q4_0 = 2  # LLAMA_FTYPE_MOSTLY_Q4_0


def main() -> None:
    """config: source, target. The target appears only when it is complete."""
    config, out = begin()
    lib: Any = importlib.import_module("llama_cpp")
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = Q4_0, True
    partial = Path(config["target"]).with_suffix(".partial")
    code = lib.llama_model_quantize(
        config["source"].encode(), str(partial).encode(), ctypes.byref(params)
    )
    if code != 0:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    partial.rename(config["target"])
    serve(out, {}, {})


if __name__ == "__main__":
    main()
