"""`headrace inspect`: what an artifact holds, for people and as JSON."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from headrace import locate
from headrace.artifact.census import format_bytes, format_name, num_parameters, tensor_facts
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.head import read_head
from headrace.cli import adapter_view, progress


def inspect(
    path: str,
    *,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    verify: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
) -> int:
    """Show a model's family, shapes, formats, sizes, identity, tokenizer and template; or an adapter's modules.

    Parameters
    ----------
    path
        An artifact, or anything else that `headrace run` takes; it is converted first. An adapter's artifact.
    json
        Print one JSON object.
    verify
        Also read every byte and compare it with its hash.
    """
    if adapter_view.is_one(path):
        print(adapter_view.shown(Path(path).expanduser(), json=json))
        return 0
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
        "parameters": num_parameters(artifact),
        "bytes": sum(f.nbytes for f in manifest.files.values()),
        "source": dict(manifest.source),
        "tokenizer": {
            "bos": manifest.tokenizer.bos,
            "add_bos": manifest.tokenizer.add_bos,
            "end": list(manifest.tokenizer.end),
        },
        "template": artifact.template,
        "experts": _experts(artifact),
        "draft_head_bytes": None if (head := read_head(artifact)) is None else head.nbytes,
        "files": {k: {"bytes": f.nbytes, "sha256": f.sha256} for k, f in manifest.files.items()},
        "tensors": {name: tensor_facts(artifact, name) for name in manifest.tensors},
    }


def _experts(artifact: Artifact) -> dict[str, Any] | None:
    """Sizes of expert records in bytes: of one, and of all layers together; None for a dense model."""
    if not artifact.records:
        return None
    records = artifact.records
    return {
        "layers": len(records),
        "experts": records[0].num_experts,
        "record_bytes": sorted({r.layout.nbytes for r in records}),
        "bytes": sum(r.num_experts * r.layout.nbytes for r in records),
    }


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
        yield f"  {name} {shape} {format_name(tensor)} {tensor['bytes']:,} bytes"
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
    if facts["experts"]:
        yield _expert_line(facts)
    if facts["draft_head_bytes"]:
        yield f"draft head {facts['draft_head_bytes']:,} bytes"
    yield "source " + ", ".join(f"{k} {_value(v)}" for k, v in facts["source"].items())
    yield (
        f"tokenizer bos {tokenizer['bos']} ({'added' if tokenizer['add_bos'] else 'not added'}),"
        f" end {', '.join(map(str, tokenizer['end'])) or 'none'}"
    )


def _expert_line(facts: dict[str, Any]) -> str:
    found, config = facts["experts"], facts["config"]["experts"]
    shared = config["shared_ffn_size"]
    sizes = " or ".join(f"{size:,}" for size in found["record_bytes"])
    return (
        f"experts {found['layers']} layers x {found['experts']}, {config['top_k']} used"
        f"{' and a shared one' if shared else ''}; records of {sizes} bytes, {found['bytes']:,} bytes in all"
    )


def _value(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _formats(tensors: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, nbytes in format_bytes(tensors.values()).most_common():
        yield f"  {name} {nbytes:,} bytes"


def _template(template: str | None) -> Iterator[str]:
    if template is None:
        yield "template none"
        return
    yield "template"
    yield from (f"  {line}" for line in template.splitlines())
