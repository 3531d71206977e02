"""Builds GGUF files byte by byte, so that tests can lie in any field."""

from __future__ import annotations

import struct
from typing import Any

ALIGN = 32


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: bytes) -> bytes:
    return struct.pack("<I", kind) + content


def u32(v: int) -> bytes:
    return value(4, struct.pack("<I", v))


def f32(v: float) -> bytes:
    return value(6, struct.pack("<f", v))


def string(v: str) -> bytes:
    return value(8, text(v))


def array(kind: int, count: int, content: bytes) -> bytes:
    return value(9, struct.pack("<IQ", kind, count) + content)


def strings(values: list[str]) -> bytes:
    return array(8, len(values), b"".join(text(v) for v in values))


def info(name: str, dims: list[int], kind: int, offset: int, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return (
        text(name)
        + struct.pack("<I", count)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def build(
    keys: list[tuple[str, bytes]],
    infos: list[bytes],
    data: bytes,
    *,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(infos) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    head += b"".join(text(k) + v for k, v in keys) + b"".join(infos)
    return head + b"\0" * (-len(head) % ALIGN) + data


def pack_tensors(tensors: list[tuple[str, list[int], int, bytes]]) -> tuple[list[bytes], bytes]:
    """Tensor infos and their data, aligned."""
    infos, data = [], b""
    for name, dims, kind, raw in tensors:
        infos.append(info(name, dims, kind, len(data)))
        data += raw + b"\0" * (-len(raw) % ALIGN)
    return infos, data


def llama_keys(
    settings: dict[str, Any], tokens: list[str], arch: str = "llama"
) -> list[tuple[str, bytes]]:
    """Metadata of a model with the sizes of a tests/tiny.py configuration."""
    return [
        ("general.architecture", string(arch)),
        (f"{arch}.context_length", u32(settings["max_position_embeddings"])),
        (f"{arch}.embedding_length", u32(settings["hidden_size"])),
        (f"{arch}.block_count", u32(settings["num_hidden_layers"])),
        (f"{arch}.feed_forward_length", u32(settings["intermediate_size"])),
        (f"{arch}.attention.head_count", u32(settings["num_attention_heads"])),
        (f"{arch}.attention.head_count_kv", u32(settings["num_key_value_heads"])),
        (f"{arch}.attention.key_length", u32(settings["head_dim"])),
        (f"{arch}.attention.value_length", u32(settings["head_dim"])),
        (f"{arch}.attention.layer_norm_rms_epsilon", f32(settings["rms_norm_eps"])),
        (f"{arch}.rope.freq_base", f32(settings["rope_theta"])),
        ("tokenizer.ggml.model", string("gpt2")),
        ("tokenizer.ggml.pre", string("smollm")),
        ("tokenizer.ggml.tokens", strings(tokens)),
        (
            "tokenizer.ggml.token_type",
            array(5, len(tokens), struct.pack(f"<{len(tokens)}i", *_types(tokens))),
        ),
        ("tokenizer.ggml.merges", strings([])),
        ("tokenizer.ggml.eos_token_id", u32(258)),
        ("tokenizer.ggml.bos_token_id", u32(256)),
        ("tokenizer.ggml.add_bos_token", value(7, b"\0")),
    ]


def _types(tokens: list[str]) -> list[int]:
    return [3 if t.startswith("<|") else 1 for t in tokens]
