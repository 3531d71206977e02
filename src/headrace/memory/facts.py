"""Facts of a model from its manifest and the head beside it: no weight is opened. The one road from an artifact to a
plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headrace import config
from headrace.artifact.container import TOKENIZER_NAME, Artifact
from headrace.artifact.head import head_size
from headrace.artifact.manifest import MANIFEST_NAME, Manifest, read_manifest
from headrace.artifact.records import layer_layout
from headrace.errors import FileError, InputError
from headrace.kernels.program import (
    LOGIT_ROWS,
    LOGIT_ROWS_EACH,
    MAX_PAIRS,
    PAGE_TOKENS,
    SITES,
    ModelShape,
)
from headrace.memory.inputs import POSITION_BYTES, ModelFacts, PlanOptions, Workspace
from headrace.memory.ledger import Plan, Refusal
from headrace.memory.machine import Machine
from headrace.memory.plan import plan
from headrace.models.config import DecoderConfig
from headrace.models.decoder import model_shape

TEXT_FACTOR = 16  # a tokenizer in memory beside its file
_TILE, _BLOCK = 16, 32
_MAX_QUERIES, _SCORE_BUDGET = 24, 64 * 1024  # of one attention call (src/native/workspace.h)
DRAFT_ROWS = 128  # of a pass of a draft model
HEAD_ROWS = 64  # of a pass of a head that drafts


def plan_model(
    source: Path | Manifest | Artifact,
    options: PlanOptions,
    machine: Machine,
    *,
    threads: int | None = None,
    beside_bytes: int = 0,
    draft: Path | Artifact | None = None,
) -> Plan | Refusal:
    """The plan of a model on a machine: what every command shows, and what loading gets.

    threads: as in `kernel_threads`. beside_bytes: workspace that is kept for something else. draft: a draft model that
    is loaded beside it. Raises SettingError, and FileError or UnsupportedError for a manifest that cannot be used.
    """
    threads = kernel_threads(threads, machine)
    facts = model_facts(source, threads=threads)
    if draft is not None:
        facts = with_draft(facts, model_facts(draft, threads=threads))
    workspace = replace(facts.workspace, fixed=facts.workspace.fixed + beside_bytes)
    return plan(machine, replace(facts, workspace=workspace), options)


def with_draft(facts: ModelFacts, draft: ModelFacts) -> ModelFacts:
    """Facts of a model with a draft model beside it, whose experts are all in memory and whose context is as long."""
    own, beside = facts.workspace, draft.workspace
    return replace(
        facts,
        dense_bytes=facts.dense_bytes
        + draft.dense_bytes
        + draft.num_slots * draft.expert_slot_bytes,
        kv_bytes_per_token=facts.kv_bytes_per_token + draft.kv_bytes_per_token,
        text_bytes=facts.text_bytes + draft.text_bytes,
        workspace=replace(
            own,
            fixed=own.fixed + beside.nbytes(DRAFT_ROWS, 0),
            per_position=own.per_position + beside.per_position,
        ),
    )


def kernel_threads(threads: int | None, machine: Machine) -> int:
    """Threads of the kernels: as given, else the settings', else one for each processor. Raises SettingError."""
    if threads is None:
        threads = config.load().threads
    return machine.cores if threads is None else config.check_threads(threads)


def model_facts(source: Path | Manifest | Artifact, *, threads: int) -> ModelFacts:
    """Facts of an artifact (or its directory, or its manifest) for that many kernel threads."""
    place, manifest = _manifest(source)
    try:
        decoder = DecoderConfig.from_json(manifest.config)
    except InputError as error:
        raise FileError(place, "config", error.message) from None
    shape = model_shape(decoder, manifest.fraction_bits)
    layers = [i for i in range(decoder.num_layers) if decoder.has_experts(i)]
    files = manifest.files
    dense = (n for n in files if n.startswith("dense-") and n.endswith(".safetensors"))
    facts = ModelFacts(
        dense_bytes=sum(files[name].nbytes for name in dense),
        kv_bytes_per_token=-(-shape.page_bytes // PAGE_TOKENS),
        context=decoder.context,
        workspace=workspace(shape, threads),
        expert_slot_bytes=max((_record_bytes(place, manifest, i) for i in layers), default=0),
        num_moe_layers=len(layers),
        num_experts=shape.num_experts if layers else 0,
        top_k=shape.top_k if layers else 0,
        text_bytes=TEXT_FACTOR * files[TOKENIZER_NAME].nbytes if TOKENIZER_NAME in files else 0,
    )
    head = None if isinstance(source, Manifest) else head_size(place.parent)
    return facts if head is None else _with_head(facts, decoder, shape.fraction_bits, *head)


def _with_head(
    facts: ModelFacts, decoder: DecoderConfig, fraction_bits: int, nbytes: int, ffn_size: int
) -> ModelFacts:
    """Facts of a model with the head that drafts: one layer more on one thread, and the states of two passes."""
    config = replace(decoder, num_layers=1, experts=None, ffn_size=ffn_size)
    shape = model_shape(config, fraction_bits)
    own, beside = facts.workspace, workspace(shape, 1)
    spare = (LOGIT_ROWS + 1) * shape.vocab * 4  # it has one row of logits
    return replace(
        facts,
        dense_bytes=facts.dense_bytes + nbytes,
        kv_bytes_per_token=facts.kv_bytes_per_token + -(-shape.page_bytes // PAGE_TOKENS),
        workspace=replace(
            own,
            fixed=own.fixed + beside.nbytes(HEAD_ROWS, 0) - spare,
            per_row=own.per_row + 2 * 4 * shape.hidden,
            per_position=own.per_position + beside.per_position,
        ),
    )


def _record_bytes(place: Path, manifest: Manifest, layer: int) -> int:
    try:
        return layer_layout(manifest, layer).nbytes
    except KeyError as error:
        raise FileError(place, f"weight {error.args[0]!r}", "is missing") from None


def workspace(shape: ModelShape, threads: int) -> Workspace:
    """What a native runner allocates (src/native/workspace.cpp, experts.cpp), as coefficients."""
    widest = max(shape.hidden, shape.q_size, shape.ffn_width)
    buffers = shape.hidden + shape.qkv_size + shape.q_size + 2 * shape.ffn_rows
    logits = (LOGIT_ROWS + 2) * shape.vocab * 4  # with a copy that is picked from, and its order
    mixture = mixture_workspace(shape)
    return replace(
        mixture,
        fixed=mixture.fixed
        + logits
        + threads * (_attention_bytes(shape, 0) + 16 * max(widest, shape.expert_width)),
        per_row=mixture.per_row
        + 4 * (buffers + bool(shape.top_k) * shape.hidden)
        + _vector_bytes(widest)
        + 8 * len(SITES) * (threads + 1)  # clips, by thread and as they were before a run
        + 16,
        # With a row's worth for what its sampler and its grammar hold.
        per_sequence=4 * (LOGIT_ROWS_EACH + 1) * shape.vocab,
        per_position=POSITION_BYTES + threads * _attention_bytes(shape, _TILE) // _TILE,
    )


def _vector_bytes(k: int) -> int:
    """One quantised vector."""
    return k + 3 * 2 * (k // _BLOCK) + 4


def mixture_workspace(shape: ModelShape, max_pairs: int = MAX_PAIRS) -> Workspace:
    """What layers with experts need (Mixture::nbytes of experts.cpp; a runner of one row takes less)."""
    if not shape.top_k:
        return Workspace()
    vectors = _vector_bytes(shape.hidden) + _vector_bytes(shape.expert_width)
    return Workspace(
        fixed=2 * (64 + 3 * 2 * 64),  # kernels may read past the end of either kind of vectors
        per_row=4 + 16 * shape.top_k,
        per_pair=vectors + 4 * (2 * shape.expert_rows + shape.hidden),
        pairs_per_row=shape.top_k,
        max_pairs=max_pairs,
        sums_per_row=8 * shape.hidden,
    )


def _attention_bytes(shape: ModelShape, positions: int) -> int:
    """Scratch of one thread for that many positions of scores, or without any (attention_bytes of workspace.cpp)."""
    heads = min(_MAX_QUERIES, shape.num_heads // max(1, shape.num_kv_heads))
    blocks = shape.head_dim // _BLOCK
    if positions:
        return positions // _TILE * (heads * _TILE * 4 + (blocks + 1) // 2 * 128 + 16)

    def scratch(rows: int, visible: int) -> int:
        tiles = visible // _TILE + 2
        query = (2 + 2 * blocks + 15) // 16 * 64 + shape.head_dim + 64 + (tiles + 1) * _TILE * 4
        return query * rows + tiles * ((blocks + 1) // 2 * 128 + 16) + 8 * 64

    return scratch(heads, _TILE) + scratch(_MAX_QUERIES, 2 * _TILE) + 4 * _SCORE_BUDGET


def _manifest(source: Path | Manifest | Artifact) -> tuple[Path, Manifest]:
    if isinstance(source, Manifest):
        return Path(MANIFEST_NAME), source
    if isinstance(source, Artifact):
        return source.path / MANIFEST_NAME, source.manifest
    path = source / MANIFEST_NAME if source.is_dir() else source
    return path, read_manifest(path)
