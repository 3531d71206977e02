"""headrace's server as `headrace serve` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import headrace
from bench.workers.protocol import Config, main
from bench.workers.server_process import ServerProcess, free_port


def make(config: Config) -> ServerProcess:
    """config: model (an artifact's path), threads, slots, context (positions of each)."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "headrace", "serve", str(Path(config["model"]))),
        *("--port", str(port), "--threads", str(config["threads"])),
        *("--parallel", str(config["slots"]), "--max-context", str(config["context"])),
        "--no-prefix-cache",
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    versions = {"headrace": headrace.__version__}
    return ServerProcess(process, port, "/v1/models", versions, {"slots": config["slots"]})


if __name__ == "__main__":
    main(make)
