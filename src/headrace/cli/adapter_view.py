"""What `headrace inspect` shows of an adapter's artifact: its manifest, which needs no base; every byte is hashed."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.artifact.adapter import (
    WEIGHTS_NAME,
    AdapterManifest,
    is_adapter,
    read_adapter_manifest,
    read_weights,
)
from headrace.artifact.adapter_places import MODULES


def is_one(path: str) -> bool:
    """Whether a path is an adapter's artifact."""
    return is_adapter(Path(path).expanduser())


def shown(path: Path, *, json: bool) -> str:
    """The text. Raises FileError, UnsupportedError."""
    manifest = read_adapter_manifest(path)
    read_weights(path / WEIGHTS_NAME, manifest)
    facts = describe(path, manifest)
    return json_text.dumps(facts, indent=1) if json else "\n".join(_lines(facts))


def describe(path: Path, manifest: AdapterManifest) -> dict[str, Any]:
    """Sizes in bytes."""
    return {
        "path": str(path),
        "kind": "adapter",
        "identity": manifest.identity,
        "base": manifest.base,
        "bytes": manifest.nbytes,
        "source": dict(manifest.source),
        "targets": {
            name: {"rank": t.rank, "alpha": t.alpha, "scale": t.scale}
            for name, t in sorted(manifest.targets.items(), key=lambda item: _order(item[0]))
        },
        "verified": True,
    }


def _order(name: str) -> tuple[int, int]:
    """Layers by number, modules as they come in a layer."""
    _, layer, module = name.split(".")
    return int(layer), list(MODULES).index(module)


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"path {facts['path']}"
    yield f"identity {facts['identity']}"
    yield f"adapter of the model {facts['base']}"
    yield f"size {facts['bytes']:,} bytes"
    yield f"source {facts['source']['kind']} sha256 {facts['source']['sha256']}"
    yield "modules"
    for name, t in facts["targets"].items():
        yield f"  {name} rank {t['rank']}, alpha {t['alpha']}, scale {t['scale']}"
    yield "verified: every byte has its hash"
