"""headrace's server, as `headrace serve` runs it, and its generations without HTTP beside it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import headrace
from bench.workers.protocol import Config, free_port, main
from headrace.llm import LLM

STARTS = 120.0  # seconds that a server may take


class HeadraceServer:
    """config: model (an artifact's path), threads, slots, context (positions of each)."""

    def __init__(self, config: Config) -> None:
        self._config, self._port = config, free_port()
        slots, context = str(config["slots"]), str(config["context"])
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "headrace", "serve", str(config["model"])),
                *("--port", str(self._port), "--parallel", slots, "--max-context", context),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + STARTS
        while time.monotonic() < end and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the server did not start")

    def facts(self) -> dict[str, Any]:
        settings = {"url": f"http://127.0.0.1:{self._port}", "slots": self._config["slots"]}
        return {"versions": {"headrace": headrace.__version__}, "settings": settings}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"close": self._close}

    def _close(self) -> dict[str, Any]:
        self._process.terminate()
        return {"code": self._process.wait()}


class HeadraceDirect:
    """The same model in this process: config as above."""

    def __init__(self, config: Config) -> None:
        self._llm = LLM(
            config["model"], parallel=int(config["slots"]), max_context=int(config["context"])
        )

    def facts(self) -> dict[str, Any]:
        settings = {"kernels": self._llm.engine.backend.name}
        return {"versions": {"headrace": headrace.__version__}, "settings": settings}

    def commands(self) -> dict[str, Callable[..., dict[str, Any]]]:
        return {"answer": self._answer}

    def _answer(self, prompts: list[str], max_tokens: int) -> dict[str, Any]:
        """Seconds and tokens of greedy answers to all prompts at a time."""

        def one(prompt: str) -> int:
            done = self._llm.generate(prompt, temperature=0.0, max_tokens=max_tokens, reuse=False)
            return done.stats.new_tokens

        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            tokens = sum(pool.map(one, prompts))
        return {"seconds": time.perf_counter() - start, "tokens": tokens}


if __name__ == "__main__":
    main(HeadraceDirect if "--direct" in sys.argv else HeadraceServer)
