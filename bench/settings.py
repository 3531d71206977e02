"""What a benchmark may be told. One frozen value; the flags are its fields."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import ROOT

PARTS = (
    *("speed", "quality", "load", "profile", "stream", "ablations"),
    *("constrain", "speculate", "adapters", "reuse", "batch", "serve", "report"),
)


@dataclass(frozen=True)
class Settings:
    """gguf: the model; pulled and checked against its pin where None. q4_0: llama.cpp's requantised file,
    made where None.

    llama_python: interpreters with llama-cpp-python, one for each build to compare. torch_python: one with
    torch, transformers and gguf. work: a folder for what is made on the way, on the disk that is measured.
    mixture: the GGUF of the model that is bigger than memory; made where None.
    headed: a checkpoint with a head that drafts, on which drafters are compared; they are not where None.
    small_mixture: an artifact or a checkpoint of a mixture that fits memory, for the part batch; none where None.
    llama_server: llama.cpp's own server, an executable, for the part serve; none where None.
    schemas: a folder of JSON schemas to compile, and what it is called; none are where None.
    """

    gguf: Path | None = None
    q4_0: Path | None = None
    llama_python: tuple[Path, ...] = ()
    torch_python: Path | None = None
    work: Path = ROOT / "build" / "bench"
    results: Path = ROOT / "bench" / "results"
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 5
    steps: int = 48  # decode steps of one sample
    pause: float = 0.3  # seconds between samples, for the threads of the last one to stop spinning
    mixture: Path | None = None
    neurostream_python: Path | None = None
    airllm_python: Path | None = None
    limit_gb: float | None = None  # of the model that is bigger than memory; None: a quarter of it
    stream_steps: tuple[int, ...] = (256, 1000)
    stream_rounds: int = 3
    stream_seconds: float = 240.0  # after which a sample of a peer ends early
    ablation_steps: int = 128
    disk_seconds: float = 2.0  # of one sample of raw reads
    headed: Path | None = None
    schemas: Path | None = None
    schemas_name: str = "schemas"
    schemas_limit: int = 1500
    small_mixture: Path | None = None
    llama_server: Path | None = None


def parse(arguments: Sequence[str] | None = None) -> tuple[tuple[str, ...], Settings]:
    """The parts to run and the settings, of a command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure, record, report.")
    default = Settings()
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} or all (the default)")
    add("--gguf", type=Path, help="the model; pulled and checked if not given")
    add("--q4-0", type=Path, help="llama.cpp's Q4_0 of it; made if not given")
    add("--llama-python", type=_program, action="append", help="a Python with llama-cpp-python")
    add("--torch-python", type=_program, help="a Python with transformers, torch and gguf")
    add("--neurostream-python", type=_program, help="a Python with neurostream")
    add("--airllm-python", type=_program, help="a Python with airllm")
    add("--mixture", type=Path, help="a GGUF bigger than memory; made if not given")
    add("--limit-gb", type=float, help="memory that it may use; a quarter of it if not given")
    add("--stream-steps", type=int, nargs="+", default=list(default.stream_steps))
    add("--stream-rounds", type=int, default=default.stream_rounds)
    add("--stream-seconds", type=float, default=default.stream_seconds)
    add("--ablation-steps", type=int, default=default.ablation_steps)
    add("--disk-seconds", type=float, default=default.disk_seconds)
    add("--headed", type=Path, help="a checkpoint with a head that drafts")
    add("--schemas", type=Path, help="a folder of JSON schemas, with or without instances")
    add("--schemas-name", default=default.schemas_name, help="what the page calls them")
    add("--schemas-limit", type=int, default=default.schemas_limit)
    add("--small-mixture", type=Path, help="a mixture that fits memory, for the part batch")
    add("--llama-server", type=_program, help="llama.cpp's own server, for the part serve")
    add("--work", type=Path, default=default.work, help="where files are made")
    add("--results", type=Path, default=default.results, help="folder of the recorded rows")
    add("--threads", type=int, nargs="+", default=list(default.threads))
    add("--rounds", type=int, default=default.rounds)
    add("--steps", type=int, default=default.steps)
    add("--pause", type=float, default=default.pause)
    given = vars(parser.parse_args(arguments))
    parts = _parts(parser, given.pop("parts"))
    given["llama_python"] = tuple(given["llama_python"] or ())
    given["threads"] = tuple(given["threads"])
    given["stream_steps"] = tuple(given["stream_steps"])
    return parts, Settings(**given)


def command(part: str, settings: Settings) -> str:
    """The command line without this machine's paths, to be recorded."""
    peers = " --llama-python LLAMA/bin/python" * len(settings.llama_python)
    for name in ("torch", "neurostream", "airllm"):
        if getattr(settings, f"{name}_python"):
            peers += f" --{name}-python {name.upper()}/bin/python"
    if part == "constrain" and settings.schemas is not None:
        peers += f" --schemas SCHEMAS --schemas-limit {settings.schemas_limit}"
    if part == "speculate" and settings.headed is not None:
        peers += " --headed CHECKPOINT"
    if part == "batch" and settings.small_mixture is not None:
        peers += " --small-mixture MIXTURE"
    if part == "serve" and settings.llama_server is not None:
        peers += " --llama-server LLAMA-SERVER" + " --q4-0 Q4_0" * (settings.q4_0 is not None)
    if part not in ("stream", "ablations"):
        return f"python -m bench {part}{peers} --rounds {settings.rounds}"
    limit = "" if settings.limit_gb is None else f" --limit-gb {settings.limit_gb:g}"
    return f"python -m bench {part}{peers}{limit} --stream-rounds {settings.stream_rounds}"


def _parts(parser: argparse.ArgumentParser, given: list[str]) -> tuple[str, ...]:
    unknown = [part for part in given if part not in (*PARTS, "all")]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a part; parts: {', '.join(PARTS)}, all")
    return PARTS if not given or "all" in given else tuple(p for p in PARTS if p in given)


def _program(text: str) -> Path:
    """A path that is not resolved: an environment's interpreter is a link."""
    return Path(text).expanduser().absolute()


def own_python() -> Path:
    """The interpreter that runs headrace: this one."""
    return Path(sys.executable)
