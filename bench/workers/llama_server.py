"""llama.cpp's own server, an executable that is given."""

from __future__ import annotations

import subprocess

from bench.workers.protocol import Config, main
from bench.workers.server_process import ServerProcess, free_port


def make(config: Config) -> ServerProcess:
    """config: program, model (a GGUF), threads, slots, context (positions of each). Prompts are not kept."""
    port, slots = free_port(), int(config["slots"])
    threads = str(config["threads"])
    command = [
        *(str(config["program"]), "--model", str(config["model"]), "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads, "--parallel", str(slots)),
        *("--ctx-size", str(slots * int(config["context"])), "--no-cache-prompt"),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    said = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True)
    version = " ".join(f"{said.stdout} {said.stderr}".split())[:80]
    return ServerProcess(process, port, "/v1/models", {"llama.cpp": version}, {"slots": slots})


if __name__ == "__main__":
    main(make)
