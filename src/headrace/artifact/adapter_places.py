"""Where the modules of a LoRA adapter lie in a decoder: which rows of which projection they change."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.config import DecoderConfig, padded_rows, padded_width

# Short names of modules, and what Hugging Face calls them inside a layer.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Place:
    """A module [n, columns] as rows [offset, offset + n) of a projection of width k, columns padded to blocks."""

    name: str  # of the projection, as an Adapt has it
    offset: int
    n: int
    columns: int
    k: int


def place(c: DecoderConfig, layer: int, module: str) -> Place | None:
    """Where a module is; None where the layer has experts in its place."""
    hidden, ffn = c.hidden_size, c.ffn_size
    if module in ("gate", "up", "down") and c.experts is not None and c.has_experts(layer):
        return None
    match module:
        case "q":
            return Place("qkv", 0, c.q_size, hidden, hidden)
        case "k":
            return Place("qkv", c.q_size, c.kv_size, hidden, hidden)
        case "v":
            return Place("qkv", c.q_size + c.kv_size, c.kv_size, hidden, hidden)
        case "o":
            return Place("out", 0, hidden, c.q_size, c.q_size)
        case "gate":
            return Place("gate_up", 0, ffn, hidden, hidden)
        case "up":
            return Place("gate_up", padded_rows(ffn), ffn, hidden, hidden)
        case _:
            return Place("down", 0, hidden, ffn, padded_width(ffn))
