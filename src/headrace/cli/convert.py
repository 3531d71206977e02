"""`headrace convert`: a checkpoint to an artifact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from headrace.cli import progress


def convert(
    source: Path,
    target: Path,
    *,
    bits: Literal["4", "8"] = "4",
    group: Literal["32", "64"] = "32",
    embed_bits: Literal["4", "8"] = "8",
) -> int:
    """Convert a GGUF file or a model directory (safetensors, MLX) into an artifact.

    The same source gives the same bytes on every machine. Weights that are quantised already keep
    their codes.

    Parameters
    ----------
    source
        A GGUF file (the first, if it is split), or a directory with config.json.
    target
        The artifact's directory; it appears when it is complete, and replaces an artifact but nothing else.
    bits
        Bits of a weight that the source holds as floats.
    group
        How many such weights share a scale.
    embed_bits
        Bits of the embedding and the head, where the source holds them as floats.
    """
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
