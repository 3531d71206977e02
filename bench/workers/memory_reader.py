"""How fast the machine reads memory: one pass over a buffer by all threads, with the faster of two readers.

NumPy's maximum of bytes reads one stream; a matrix-vector product reads several rows at a time, which keeps
more loads in flight. Both are vector loops that do little but load, and both release the GIL.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workers.protocol import begin, serve

PASSES = 3
COLUMNS = 4096
Floats = NDArray[np.float32]
Reader = Callable[[Floats], Any]


class Memory:
    """Buffers are kept, since their pages must exist before they are read."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._buffers: dict[int, Floats] = {}

    def read(self, nbytes: int) -> dict[str, Any]:
        """Seconds of the fastest pass over a buffer of this size."""
        if nbytes not in self._buffers:
            self._buffers[nbytes] = np.ones((nbytes // (4 * COLUMNS), COLUMNS), np.float32)
        buffer = self._buffers[nbytes]
        parts = np.array_split(buffer, self._threads)
        seconds = min(self._pass(r, parts) for r in readers() for _ in range(PASSES))
        return {"seconds": seconds * nbytes / buffer.nbytes}  # the buffer is whole rows

    def _pass(self, reader: Reader, parts: list[Floats]) -> float:
        start = time.perf_counter()
        list(self._pool.map(reader, parts))
        return time.perf_counter() - start


def readers() -> list[Reader]:
    vector = np.ones(COLUMNS, np.float32)
    return [lambda part: part.view(np.uint8).max(), lambda part: part @ vector]


if __name__ == "__main__":
    config, out = begin()
    memory = Memory(int(config["threads"]))
    serve(out, {"versions": {"numpy": np.__version__}, "settings": {}}, {"read": memory.read})
