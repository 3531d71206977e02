"""Random-weight qwen3moe GGUF files of any size with a chosen routing skew: for I/O and memory work only.

    python -m bench.make_gguf TARGET --tokenizer SOURCE.gguf --layers 24 --hidden 1024 \\
        --experts 128 --top-k 8 --expert-ffn 704

Experts (stacked, as llama.cpp reads them) and attention are Q4_1 or Q4_0, embedding and head Q8_0, norms and routers
F32. The weights are distributed as those of `make_checkpoint`, so its words on skew hold here. Files are written in
pieces, so memory does not depend on the size. The tokenizer is that of another GGUF.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.make_checkpoint import CODE_DEVIATION, PIECE, Shape, embedding_rows, router_rows
from headrace.artifact.room import check_room

Array = NDArray[Any]
Rows = Callable[[int, int, np.random.Generator], Array]
BLOCK = 32  # values of one block of either format
BLOCK_BYTES = {"Q4_1": 20, "Q4_0": 18, "Q8_0": 34, "F32": 128}
FORMS = ("q4_1", "q4_0")
CONTEXT = 8192


@dataclass(frozen=True)
class Tensor:
    """shape: outermost first. rows(begin, end, rng): bytes u8[end - begin, bytes of a row]."""

    name: str
    form: str
    shape: tuple[int, ...]
    rows: Rows

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * BLOCK_BYTES[self.form] // BLOCK

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


def make(target: Path, shape: Shape, tokenizer: Path) -> int:
    """Write the file; returns the bytes of its tensors. shape: its layout is one of FORMS."""
    tensors = list(_tensors(shape))
    total = sum(t.nbytes for t in tensors)
    check_room(target, total)
    part = target.with_name(f"{target.name}.part")
    try:
        _write(part, shape, tensors, tokenizer)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
    return total


def vocabulary(tokenizer: Path) -> int:
    """Tokens of a GGUF's tokenizer."""
    from gguf import GGUFReader

    return len(GGUFReader(tokenizer).fields["tokenizer.ggml.tokens"].data)


def _write(path: Path, shape: Shape, tensors: list[Tensor], tokenizer: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "qwen3moe")
    _add_sizes(writer, shape)
    _add_tokenizer(writer, tokenizer)
    for t in tensors:
        kind, stored = GGMLQuantizationType[t.form], (*t.shape[:-1], t.row_bytes)
        dtype, given = (np.float32, t.shape) if t.form == "F32" else (np.uint8, stored)
        writer.add_tensor_info(t.name, given, np.dtype(dtype), t.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    for index, tensor in enumerate(tensors):
        _write_tensor(file, tensor, np.random.default_rng((shape.seed, index)))
        writer.write_padding(file, tensor.nbytes)
    writer.close()


def _write_tensor(file: Any, tensor: Tensor, rng: np.random.Generator) -> None:
    step = max(1, PIECE // tensor.shape[-1])
    for begin in range(0, tensor.num_rows, step):
        rows = tensor.rows(begin, min(tensor.num_rows, begin + step), rng)
        file.write(np.ascontiguousarray(rows).view(np.uint8).data)


def _add_sizes(writer: Any, s: Shape) -> None:
    writer.add_name("random mixture of experts")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(s.expert_ffn)
    writer.add_expert_feed_forward_length(s.expert_ffn)
    writer.add_expert_count(s.experts)
    writer.add_expert_used_count(s.top_k)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head_dim)
    writer.add_value_length(s.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_vocab_size(s.vocab)


def _add_tokenizer(writer: Any, source: Path) -> None:
    from gguf import GGUFReader, GGUFValueType

    for name, field in GGUFReader(source).fields.items():
        if not name.startswith("tokenizer."):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)


def _tensors(s: Shape) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", "Q8_0", (s.vocab, s.hidden), _q8(embedding_rows(s)))
    yield Tensor("output.weight", "Q8_0", (s.vocab, s.hidden), _q8(_normal(s, 2 / s.hidden**0.5)))
    yield _ones("output_norm", s.hidden)
    for layer in range(s.layers):
        yield from _layer(s, layer)


def _layer(s: Shape, layer: int) -> Iterator[Tensor]:
    at, share = f"blk.{layer}", math.sqrt(1 / (2 * s.layers))
    q_size, kv_size, unit = s.heads * s.head_dim, s.kv_heads * s.head_dim, 1 / math.sqrt(s.hidden)
    for name, size in (
        ("attn_norm", s.hidden), ("ffn_norm", s.hidden), ("attn_q_norm", s.head_dim), ("attn_k_norm", s.head_dim),
    ):  # fmt: skip
        yield _ones(f"{at}.{name}", size)
    for part, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        yield _linear(s, f"{at}.attn_{part}", (rows, s.hidden), unit)
    yield _linear(s, f"{at}.attn_output", (s.hidden, q_size), share / math.sqrt(q_size))
    router = router_rows(s, layer)
    yield Tensor(f"{at}.ffn_gate_inp.weight", "F32", (s.experts, s.hidden), _f32(router))
    # 0.35: the deviation of silu(gate) * up for normal gates; top_k outputs are averaged.
    down = share * math.sqrt(s.top_k / s.expert_ffn) / 0.35
    for part, n, k, deviation in (
        ("gate", s.expert_ffn, s.hidden, unit),
        ("up", s.expert_ffn, s.hidden, unit),
        ("down", s.hidden, s.expert_ffn, down),
    ):
        yield _linear(s, f"{at}.ffn_{part}_exps", (s.experts, n, k), deviation)


def _linear(s: Shape, name: str, shape: tuple[int, ...], deviation: float) -> Tensor:
    """Random codes with one scale, centred by an offset in Q4_1."""
    form = s.layout.upper()
    scale = np.float16(deviation / CODE_DEVIATION)
    fields = [scale, np.float16(-7.5 * float(scale))] if form == "Q4_1" else [scale]
    head = np.array(fields, "<f2").view(np.uint8)
    blocks = shape[-1] // BLOCK

    def rows(begin: int, end: int, rng: np.random.Generator) -> Array:
        out = np.empty((end - begin, blocks, BLOCK_BYTES[form]), np.uint8)
        out[:, :, : len(head)] = head
        codes = rng.integers(0, 1 << 32, (end - begin, blocks, 4), np.uint32)
        out[:, :, len(head) :] = codes.view(np.uint8)
        return out

    return Tensor(f"{name}.weight", form, shape, rows)


def _q8(values: Rows) -> Rows:
    """Blocks of a scale and 32 codes of 8 bits."""

    def rows(begin: int, end: int, rng: np.random.Generator) -> Array:
        found = values(begin, end, rng)
        blocks = found.astype(np.float32).reshape(len(found), -1, BLOCK)
        scale = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype("<f2")
        codes = np.rint(blocks / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=2)

    return rows


def _f32(values: Rows) -> Rows:
    return lambda begin, end, rng: values(begin, end, rng).astype("<f4")


def _normal(s: Shape, deviation: float) -> Rows:
    def rows(begin: int, end: int, rng: np.random.Generator) -> Array:
        return rng.standard_normal((end - begin, s.hidden), np.float32) * np.float32(deviation)

    return rows


def _ones(name: str, size: int) -> Tensor:
    rows = _f32(lambda begin, end, rng: np.ones(size))
    return Tensor(f"{name}.weight", "F32", (size,), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF with a tokenizer")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="of experts and attention")
    parser.add_argument("--skew", type=float, default=0.0)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    given = vars(parser.parse_args())
    target, tokenizer = given.pop("target"), given.pop("tokenizer")
    total = make(target, shape_of(tokenizer, **given), tokenizer)
    print(f"{target}: {total:,} bytes of tensors")


# The model of the benchmark "bigger than memory": 3,072 experts of 1.35 MB, 4.3 GB in all.
SIZES = {
    "layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "experts": 128, "top_k": 8,
    "expert_ffn": 704, "seed": 0,
}  # fmt: skip


def shape_of(tokenizer: Path, *, form: str = FORMS[0], skew: float = 0.0, **sizes: int) -> Shape:
    """A shape with a tokenizer's vocabulary; what is not given is as in SIZES."""
    rest: dict[str, Any] = {"family": "qwen3_moe", "layout": form, "shared_ffn": 0, "skew": skew}
    return Shape(vocab=vocabulary(tokenizer), **rest, **{**SIZES, **sizes})


if __name__ == "__main__":
    main()
