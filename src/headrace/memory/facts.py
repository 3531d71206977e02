"""Facts of a model from its manifest alone: no weight is opened. The one road from an artifact to a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.artifact.container import TOKENIZER_NAME, Artifact
from headrace.artifact.manifest import MANIFEST_NAME, Manifest, read_manifest
from headrace.errors import FileError
from headrace.kernels.program import PAGE_TOKENS, ModelShape
from headrace.memory.inputs import ModelFacts, PlanOptions, Workspace
from headrace.memory.ledger import Plan, Refusal
from headrace.memory.machine import Machine
from headrace.memory.plan import plan

Entries = Mapping[str, Mapping[str, Any]]
RecordBytes = Callable[[Entries], int]  # entries of one expert -> bytes of its record

NUM_EXPERTS_KEY, TOP_K_KEY = "num_experts", "top_k"
TEXT_FACTOR = 16  # a tokenizer in memory beside its file
_TILE, _BLOCK = 16, 32
_MAX_QUERIES, _SCORE_BUDGET = 24, 64 * 1024  # of one attention call (src/native/runner.cpp)
_POSITION_BYTES = 128  # a token id in the lists of a prompt, a sequence and an answer


def plan_model(
    source: Path | Manifest | Artifact,
    options: PlanOptions,
    machine: Machine,
    *,
    record_bytes: RecordBytes | None = None,
) -> Plan | Refusal:
    """The plan of a model on a machine: the one function that both `doctor` and loading call.

    Raises FileError, UnsupportedError for a manifest that cannot be used.
    """
    facts = model_facts(source, threads=machine.cores, record_bytes=record_bytes)
    return plan(machine, facts, options)


def model_facts(
    source: Path | Manifest | Artifact, *, threads: int, record_bytes: RecordBytes | None = None
) -> ModelFacts:
    """Facts of an artifact (or its directory, or its manifest) for that many kernel threads.

    record_bytes: how many bytes one expert's record takes, padding included; it gets the entries of one
    layer's experts by the part behind `experts.`.
    """
    place, manifest = _manifest(source)
    config = _Config(place, manifest.config)
    shape = _shape(config, manifest.fraction_bits)
    context = config.integer("context", 1 << 24)
    layers = expert_entries(manifest.tensors)
    slot = num_experts = top_k = 0
    if layers:
        if record_bytes is None:
            raise FileError(place, "tensors", "experts, and nothing tells the size of a record")
        slot = max(record_bytes(entries) for entries in layers.values())
        num_experts, top_k = (config.integer(k, 1 << 16) for k in (NUM_EXPERTS_KEY, TOP_K_KEY))
    files = manifest.files
    dense = (n for n in files if n.startswith("dense-") and n.endswith(".safetensors"))
    return ModelFacts(
        dense_bytes=sum(files[name].nbytes for name in dense),
        kv_bytes_per_token=-(-shape.page_bytes // PAGE_TOKENS),
        context=context,
        workspace=workspace(shape, context, threads),
        expert_slot_bytes=slot,
        num_moe_layers=len(layers),
        num_experts=num_experts,
        top_k=top_k,
        text_bytes=TEXT_FACTOR * files[TOKENIZER_NAME].nbytes if TOKENIZER_NAME in files else 0,
    )


def expert_entries(tensors: Entries) -> dict[int, dict[str, Mapping[str, Any]]]:
    """Manifest entries `layers.<L>.experts.<part>` as {L: {part: entry}}; empty for a dense model."""
    out: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for name, entry in tensors.items():
        words = name.split(".")
        if len(words) == 4 and words[0] == "layers" and words[2] == "experts":
            out[int(words[1])][words[3]] = entry
    return dict(out)


def workspace(shape: ModelShape, context: int, threads: int) -> Workspace:
    """What a native runner allocates (src/native/runner.cpp), as coefficients.

    Its attention scratch is as long as the model's own context, whatever the window is.
    """
    widest = max(shape.hidden, shape.q_size, shape.ffn_width)
    buffers = shape.hidden + shape.qkv_size + shape.q_size + 2 * shape.ffn_rows + shape.vocab
    activation = widest + 3 * 2 * (widest // _BLOCK) + 4
    logits = 2 * shape.vocab * 4  # a copy that is picked from, and its order
    return Workspace(
        fixed=logits + threads * (_attention_bytes(shape, context) + 16 * widest),
        per_row=4 * buffers + activation + 16,
        per_position=_POSITION_BYTES,
    )


def _attention_bytes(shape: ModelShape, positions: int) -> int:
    """Scratch of one thread (attention_bytes of runner.cpp), rounded up."""
    heads = min(_MAX_QUERIES, shape.num_heads // max(1, shape.num_kv_heads))
    blocks = shape.head_dim // _BLOCK

    def scratch(rows: int, visible: int) -> int:
        tiles = visible // _TILE + 2
        query = (2 + 2 * blocks + 15) // 16 * 64 + shape.head_dim + 64 + (tiles + 1) * _TILE * 4
        return query * rows + tiles * ((blocks + 1) // 2 * 128 + 16) + 8 * 64

    return scratch(heads, positions) + scratch(_MAX_QUERIES, 2 * _TILE) + 4 * _SCORE_BUDGET


def _manifest(source: Path | Manifest | Artifact) -> tuple[Path, Manifest]:
    if isinstance(source, Manifest):
        return Path(MANIFEST_NAME), source
    if isinstance(source, Artifact):
        return source.path / MANIFEST_NAME, source.manifest
    path = source / MANIFEST_NAME if source.is_dir() else source
    return path, read_manifest(path)


class _Config:
    """Typed reading of a manifest's configuration; every refusal names the key."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._config = config

    def integer(self, key: str, most: int) -> int:
        value = self._config.get(key)
        if type(value) is not int or not 1 <= value <= most:
            raise FileError(self._path, f"config {key!r}", f"{value!r:.40} is not 1 to {most}")
        return value


def _shape(config: _Config, fraction_bits: int) -> ModelShape:
    size = config.integer("ffn_size", 1 << 18)
    return ModelShape(
        hidden=config.integer("hidden_size", 1 << 14),
        num_layers=config.integer("num_layers", 1 << 10),
        num_heads=config.integer("num_heads", 1 << 10),
        num_kv_heads=config.integer("num_kv_heads", 1 << 10),
        head_dim=config.integer("head_dim", 1 << 9),
        ffn_rows=-(-size // _TILE) * _TILE,
        ffn_width=-(-size // _BLOCK) * _BLOCK,
        vocab=config.integer("vocab_size", 1 << 20),
        fraction_bits=fraction_bits,
    )
