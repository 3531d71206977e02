"""`headrace convert`: a checkpoint to an artifact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from headrace import locate
from headrace.cli import progress
from headrace.errors import InputError


def convert(
    source: Path,
    target: Path,
    *,
    bits: Literal["4", "8"] = "4",
    group: Literal["32", "64"] = "32",
    embed_bits: Literal["4", "8"] = "8",
    base: str | None = None,
) -> int:
    """Convert a GGUF file or a model directory (safetensors, MLX) into an artifact; or a PEFT folder with its base.

    The same source gives the same bytes on every machine. Weights that are quantised already keep
    their codes.

    Parameters
    ----------
    source
        A GGUF file (the first, if it is split), a directory with config.json, or one with adapter_config.json.
    target
        The artifact's directory; it appears when it is complete, and replaces an artifact but nothing else.
    bits
        Bits of a weight that the source holds as floats.
    group
        How many such weights share a scale.
    embed_bits
        Bits of the embedding and the head, where the source holds them as floats.
    base
        The model that a LoRA adapter is for: what headrace run takes as a model.
    """
    from headrace.artifact.peft import is_peft

    if is_peft(source):
        return _adapter(source, target, base)
    if base is not None:
        raise InputError(f"{source} is no PEFT folder: --base is for those")
    from headrace.artifact.convert import convert as convert_artifact
    from headrace.artifact.sources import ConvertOptions

    options = ConvertOptions(bits=int(bits), group=int(group), embed_bits=int(embed_bits))
    with progress.shown() as report:
        artifact = convert_artifact(
            source,
            target,
            options,
            lambda step, done, total: report(f"{step} {source.name}", done, total),
        )
    print(
        f"{artifact.path}: {artifact.manifest.family}, identity {artifact.identity}",
        file=sys.stderr,
    )
    return 0


def _adapter(source: Path, target: Path, base: str | None) -> int:
    from headrace.artifact.adapter_convert import convert_adapter
    from headrace.artifact.container import open_artifact

    if base is None:
        raise InputError(
            f"{source} is an adapter: its base is needed",
            hint="give --base MODEL, as for headrace run",
        )
    with progress.shown() as report:
        found = locate.locate(base, progress=report)
    adapter = convert_adapter(source, target, open_artifact(found))
    print(
        f"{target}: adapter of {len(adapter.manifest.targets)} modules, {adapter.nbytes:,} bytes,"
        f" identity {adapter.identity}",
        file=sys.stderr,
    )
    return 0
