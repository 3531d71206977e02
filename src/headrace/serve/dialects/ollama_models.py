"""What Ollama's clients ask about models: lists, details, whether anybody is there."""

from __future__ import annotations

from datetime import UTC, datetime

from headrace.serve.dialect import Card, Context, served_name
from headrace.serve.dialects import ollama_wire as wire
from headrace.serve.failure import RequestError
from headrace.serve.request import Json

NEVER = "2200-01-01T00:00:00Z"  # when the model is unloaded; the command line shows "Forever"


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def _details(card: Card) -> Json:
    return {
        "parent_model": "",
        "format": "headrace",
        "family": card.family,
        "families": [card.family],
        "parameter_size": _count(card.num_parameters),
        "quantization_level": card.quantization,
    }


def _count(number: int) -> str:
    """8030261248 as 8.0B, 134515008 as 134.52M."""
    if number >= 10**9:
        return f"{number / 10**9:.1f}B"
    return f"{number / 10**6:.2f}M" if number >= 10**6 else f"{number / 10**3:.2f}K"


def _listed(name: str, card: Card) -> Json:
    # The command line prints the first twelve digits of the digest.
    return {
        "name": name,
        "model": name,
        "digest": card.digest or "0" * 64,
        "details": _details(card),
    }


def tags(_body: None, context: Context) -> Json:
    card = context.card
    more = {"modified_at": time_text(card.created), "size": card.size_bytes}
    return {"models": [{**_listed(name, card), **more} for name in card.names]}


def ps(_body: None, context: Context) -> Json:
    """`size` is memory that the plan gives the model now; nothing of it is a graphics card's."""
    card = context.card
    plan = {
        "source": card.memory.source,
        "target_gb": card.memory.target_gb,
        "memory_limit_gb": card.memory.limit_gb,
        "expert_pool_gb": card.memory.pool_gb,
    }
    entry = _listed(card.name, card)
    entry["details"] = {**entry["details"], "memory_plan": plan}
    more = {
        "size": card.resident_bytes,
        "size_vram": 0,
        "expires_at": NEVER,
        "context_length": card.context_window,
    }
    return {"models": [{**entry, **more}]}


def show(body: wire.ShowBody, context: Context) -> Json:
    card, name = context.card, body.model or body.name
    if not name:
        raise RequestError("model is missing", place="model")
    served = served_name(name, card, status=404)
    return {
        "modelfile": f"FROM {served}\n",
        "parameters": "",
        "template": card.template,
        "modified_at": time_text(card.created),
        "details": _details(card),
        "model_info": {
            **{f"{card.family}.{key}": value for key, value in card.architecture.items()},
            "general.architecture": card.family,
            "general.parameter_count": card.num_parameters,
            f"{card.family}.context_length": card.context_window,
        },
        "capabilities": _capabilities(card),
        "max_context_tokens": card.context_window,
        "est_prefill_s_at_max_context": card.full_prefill_seconds,
        "context_policy": card.context_policy,
    }


def _capabilities(card: Card) -> list[str]:
    own = {"vision": card.vision, "thinking": card.reasoning}
    return ["completion", "tools", *(name for name, has in own.items() if has)]


def version(_body: None, context: Context) -> Json:
    return {"version": context.card.version}


def root(_body: None, context: Context) -> Json:
    """What Ollama's clients ask to see whether anybody is there; some look for its sentence."""
    return {"server": "headrace", "status": "Ollama is running"}
