"""`headrace inspect`: what an artifact holds, for people and as JSON."""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from headrace import locate
from headrace.artifact.container import Artifact, open_artifact
from headrace.cli import progress


def inspect(
    path: str,
    *,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    verify: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Show a model's family, shapes, formats, sizes, identity, tokenizer and template.

    Parameters
    ----------
    path
        An artifact, or anything else that `headrace run` takes; it is converted first.
    json
        Print one JSON object.
    verify
        Also read every byte and compare it with its hash.
    """
    with progress.shown() as report:
        found = locate.locate(path, progress=report)
    facts = describe(open_artifact(found, verify=verify))
    facts["verified"] = verify
    print(_as_json(facts) if json else "\n".join(_lines(facts)))
    return 0


def describe(artifact: Artifact) -> dict[str, Any]:
    """Everything that `inspect` shows. Sizes in bytes."""
    manifest = artifact.manifest
    return {
        "path": str(artifact.path),
        "identity": artifact.identity,
        "family": manifest.family,
        "fraction_bits": manifest.fraction_bits,
        "config": dict(manifest.config),
        "parameters": sum(t["shape"][0] * t["shape"][1] for t in manifest.tensors.values()),
        "bytes": sum(f.nbytes for f in manifest.files.values()),
        "source": dict(manifest.source),
        "tokenizer": {
            "bos": manifest.tokenizer.bos,
            "add_bos": manifest.tokenizer.add_bos,
            "end": list(manifest.tokenizer.end),
        },
        "template": artifact.template,
        "files": {k: {"bytes": f.nbytes, "sha256": f.sha256} for k, f in manifest.files.items()},
        "tensors": {name: _tensor(artifact, name) for name in manifest.tensors},
    }


def _tensor(artifact: Artifact, name: str) -> dict[str, Any]:
    parts = (artifact.tensors.get(f"{name}.{p}") for p in ("codes", "scales", "mins", "row"))
    nbytes = sum(array.nbytes for array in parts if array is not None)
    return {**artifact.manifest.tensors[name], "bytes": nbytes}


def _as_json(facts: dict[str, Any]) -> str:
    return json_text.dumps(facts, indent=1)


def _lines(facts: dict[str, Any]) -> Iterator[str]:
    yield from _head(facts)
    yield "config"
    yield from (f"  {key} {value}" for key, value in facts["config"].items() if value is not None)
    yield "formats"
    yield from _formats(facts["tensors"])
    yield "tensors"
    for name, tensor in facts["tensors"].items():
        shape = "x".join(str(size) for size in tensor["shape"])
        yield f"  {name} {shape} {_format(tensor)} {tensor['bytes']:,} bytes"
    yield "files"
    for name, file in facts["files"].items():
        yield f"  {name} {file['bytes']:,} bytes sha256 {file['sha256']}"
    if facts["verified"]:
        yield f"verified: every byte of {len(facts['files'])} files has its hash"
    yield from _template(facts["template"])


def _head(facts: dict[str, Any]) -> Iterator[str]:
    tokenizer = facts["tokenizer"]
    yield f"path {facts['path']}"
    yield f"identity {facts['identity']}"
    yield f"family {facts['family']}"
    yield f"size {facts['parameters'] / 1e6:,.1f} M weights, {facts['bytes']:,} bytes"
    yield "source " + ", ".join(f"{k} {v}" for k, v in facts["source"].items())
    yield (
        f"tokenizer bos {tokenizer['bos']} ({'added' if tokenizer['add_bos'] else 'not added'}),"
        f" end {', '.join(map(str, tokenizer['end'])) or 'none'}"
    )


def _format(tensor: dict[str, Any]) -> str:
    return f"{tensor['format']}/{tensor['group']}"


def _formats(tensors: dict[str, dict[str, Any]]) -> Iterator[str]:
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[_format(tensor)] += tensor["bytes"]
    for name, nbytes in sizes.most_common():
        yield f"  {name} {nbytes:,} bytes"


def _template(template: str | None) -> Iterator[str]:
    if template is None:
        yield "template none"
        return
    yield "template"
    yield from (f"  {line}" for line in template.splitlines())
