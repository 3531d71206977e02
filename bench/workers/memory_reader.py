"""How fast the machine reads memory: one pass over a buffer by all threads, with the faster of two readers.

NumPy's maximum of bytes and the C library's memchr for a byte that is absent are both vector loops that do
almost nothing but load, and both release the GIL.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workers.protocol import begin, serve

PASSES = 3
Bytes = NDArray[np.uint8]
Reader = Callable[[Bytes], Any]


class Memory:
    """Buffers are kept, since their pages must exist before they are read."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._buffers: dict[int, Bytes] = {}

    def read(self, nbytes: int) -> dict[str, Any]:
        """Seconds of the fastest pass over a buffer of this size."""
        if nbytes not in self._buffers:
            self._buffers[nbytes] = np.ones(nbytes, np.uint8)
        parts = np.array_split(self._buffers[nbytes], self._threads)
        return {"seconds": min(self._pass(r, parts) for r in readers() for _ in range(PASSES))}

    def _pass(self, reader: Reader, parts: list[Bytes]) -> float:
        start = time.perf_counter()
        list(self._pool.map(reader, parts))
        return time.perf_counter() - start


def readers() -> list[Reader]:
    library = ctypes.CDLL(None)
    library.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    library.memchr.restype = ctypes.c_void_p
    return [lambda part: part.max(), lambda part: library.memchr(part.ctypes.data, 0, part.nbytes)]


if __name__ == "__main__":
    config, out = begin()
    memory = Memory(int(config["threads"]))
    serve(out, {"versions": {"numpy": np.__version__}, "settings": {}}, {"read": memory.read})
