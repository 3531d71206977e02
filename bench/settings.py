"""What a benchmark may be told. One frozen value; the flags are its fields."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import ROOT


@dataclass(frozen=True)
class Settings:
    """gguf: the model; pulled and checked against its pin where None.

    peer_python: interpreters with llama-cpp-python, one for each build to compare. torch_python: one with
    torch, transformers and gguf. work: a folder for what is made on the way.
    """

    gguf: Path | None = None
    peer_python: tuple[Path, ...] = ()
    torch_python: Path = Path(sys.executable)
    work: Path = ROOT / "build" / "bench"
    results: Path = ROOT / "bench" / "results"
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 5
    steps: int = 64  # decode steps of one sample
    pause: float = 0.3  # seconds between samples, for the threads of the last one to stop spinning


def parse(program: str, arguments: Sequence[str] | None = None) -> Settings:
    """The settings of a command line."""
    parser = argparse.ArgumentParser(prog=program)
    default = Settings()
    add = parser.add_argument
    add("--gguf", type=Path, help="the model; pulled and checked if not given")
    add(
        "--peer-python", type=_program, action="append", help="an interpreter with llama-cpp-python"
    )
    add("--torch-python", type=_program, default=default.torch_python, help="one with transformers")
    add("--work", type=Path, default=default.work)
    add("--results", type=Path, default=default.results, help="folder of the recorded rows")
    add("--threads", type=int, nargs="+", default=list(default.threads))
    add("--rounds", type=int, default=default.rounds)
    add("--steps", type=int, default=default.steps)
    add("--pause", type=float, default=default.pause)
    given = vars(parser.parse_args(arguments))
    given["peer_python"] = tuple(given["peer_python"] or ())
    given["threads"] = tuple(given["threads"])
    given["work"].mkdir(parents=True, exist_ok=True)
    return Settings(**given)


def command(what: str, settings: Settings) -> str:
    """The command line without this machine's paths, to be recorded."""
    peers = " --peer-python PYTHON" * len(settings.peer_python)
    return f"python -m bench.{what}{peers} --rounds {settings.rounds}"


def _program(text: str) -> Path:
    """A path that is not resolved: an environment's interpreter is a link."""
    return Path(text).expanduser().absolute()
