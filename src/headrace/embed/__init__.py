"""The frame-loop API: sequences that move on a few layers a call, in memory that the caller gives (docs/embed.md)."""

from __future__ import annotations

from headrace.embed import errors
from headrace.embed.adapter import Adapter
from headrace.embed.decode import DecodeParams, decode_params, decode_step, decode_step_v2
from headrace.embed.errors import EmbedError
from headrace.embed.memory import ALIGNMENT, aligned
from headrace.embed.model import Model, TokenStream
from headrace.embed.outcome import DeadEnd, Gone, MidToken, Outcome, Refused, Token
from headrace.embed.pool import KVPool, kv_block_size, kv_pool_overhead
from headrace.embed.prefill import prefill
from headrace.embed.prefix import Prefix
from headrace.embed.schema import Schema
from headrace.embed.sequence import Sequence
from headrace.embed.state import seq_state_size
from headrace.embed.timeline import Hidden, SequenceStats
from headrace.embed.workspace import Workspace, workspace_size
from headrace.engine.damped import DampedParams
from headrace.kernels.program import ParallelFor

__all__ = [
    "ALIGNMENT",
    "Adapter",
    "DampedParams",
    "DeadEnd",
    "DecodeParams",
    "EmbedError",
    "Gone",
    "Hidden",
    "KVPool",
    "MidToken",
    "Model",
    "Outcome",
    "ParallelFor",
    "Prefix",
    "Refused",
    "Schema",
    "Sequence",
    "SequenceStats",
    "Token",
    "TokenStream",
    "Workspace",
    "aligned",
    "decode_params",
    "decode_step",
    "decode_step_v2",
    "errors",
    "kv_block_size",
    "kv_pool_overhead",
    "prefill",
    "seq_state_size",
    "workspace_size",
]
