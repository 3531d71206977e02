"""What a loaded model is, as the card that dialects tell from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.artifact.census import format_bytes, num_parameters, tensor_facts
from headrace.artifact.container import Artifact
from headrace.llm import LLM
from headrace.memory.inputs import GB
from headrace.serve.dialect import Card, Memory
from headrace.text.tools.formats import Format

_SHOWN = (
    "hidden_size",
    "ffn_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
)


def card(
    llm: LLM,
    name: str,
    format: Format,
    *,
    created: int,
    version: str,
    max_prefill_wait: float | None,
) -> Card:
    """name: what clients call the model; created: Unix seconds."""
    artifact = llm.artifact
    config = artifact.manifest.config
    return Card(
        name=name,
        family=artifact.manifest.family,
        context_window=llm.engine.context,
        model_window=int(config["context"]),
        created=created,
        adapters=tuple(llm.adapters),
        digest=artifact.identity,
        num_parameters=num_parameters(artifact),
        size_bytes=sum(file.nbytes for file in artifact.manifest.files.values()),
        quantization=_quantization(artifact),
        architecture=_architecture(config),
        template=artifact.template or "",
        vision=False,
        reasoning=format.think is not None or format.shape == "channels",
        version=version,
        max_prefill_wait=max_prefill_wait,
    )


def now(card: Card, llm: LLM, full_prefill_seconds: float | None) -> Card:
    """A card with what changes while the model is served."""
    plan, given_back = llm.plan, llm.given_back
    adaptive = plan.source in ("auto", "memory_limit_gb")
    sized = adaptive or plan.source == "memory_gb"
    memory = Memory(
        "auto" if adaptive else "--" + plan.source.replace("_", "-"),
        (plan.target_bytes - given_back) / GB if sized else None,
        None if plan.limit_bytes is None else plan.limit_bytes / GB,
        (plan.pool_slots * plan.slot_bytes - given_back) / GB,
    )
    resident = plan.ledger.total - given_back
    return replace(
        card,
        resident_bytes=resident,
        memory=memory,
        full_prefill_seconds=None
        if full_prefill_seconds is None
        else round(full_prefill_seconds, 1),
    )


def _quantization(artifact: Artifact) -> str:
    """The format that most bytes of the weights have."""
    facts = (tensor_facts(artifact, name) for name in artifact.manifest.tensors)
    common = format_bytes(facts).most_common(1)
    return common[0][0] if common else ""


def _architecture(config: Mapping[str, object]) -> dict[str, int | str]:
    found = {key: config[key] for key in _SHOWN if key in config}
    return {key: value for key, value in found.items() if isinstance(value, int | str)}
