"""Random-weight mixture-of-experts checkpoints of any size with a chosen routing skew: for I/O and memory work only.

    python -m bench.make_checkpoint TARGET --tokenizer DIR --family qwen3_moe --layers 24 --hidden 1024 \\
        --experts 128 --top-k 8 --expert-ffn 512 --layout mlx4 --skew 1.0

Layouts: `bf16` (Hugging Face, a tensor an expert) and `mlx4` (MLX affine, 4 bits, groups of 64, stacked experts;
embedding, head, norms and routers bf16). Files are written in pieces, so memory does not depend on the size.

Skew: every embedding row is noise of variance 1 plus one fixed sign vector u, and layers add noise of total variance 1,
so a normed hidden state keeps a known component along u. A router's row e is noise plus u times -skew * ln(rank of e),
ranks shuffled in every layer; the noise of the logits has the deviation of a Gumbel variable, so expert e is the
likeliest with a probability of about rank^-skew. 0 is uniform, 1 is Zipf. The head is random and untied: draw tokens
with a temperature of 1, since greedy tokens soon repeat and with them their experts.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import BLOCK
from headrace.artifact.hf_config import read_config
from headrace.artifact.room import check_room
from headrace.artifact.sources import Consumed
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec
from headrace.errors import InputError, SettingError

Array = NDArray[Any]
PIECE = 1 << 23  # elements written at once
SHARD_BYTES = 4 << 30
GROUP = 64
CODE_DEVIATION = math.sqrt((16**2 - 1) / 12)  # of uniform 4-bit codes
GUMBEL_DEVIATION = math.pi / math.sqrt(6)
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


@dataclass(frozen=True)
class Shape:
    """What is made. Sizes in elements; skew is the exponent of the experts' frequencies by rank."""

    family: str
    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int
    layout: str
    skew: float
    seed: int = 0

    @property
    def block(self) -> str:
        return "block_sparse_moe" if self.family == "mixtral" else "mlp"


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: its place in the file, and its rows [begin, end) on demand."""

    spec: TensorSpec
    rows: Callable[[int, int, np.random.Generator], Array]

    @property
    def num_rows(self) -> int:
        return math.prod(self.spec.shape[:-1])

    @property
    def width(self) -> int:
        return self.spec.shape[-1]


def check(s: Shape) -> None:
    """Refuse what could not be converted. Raises InputError."""
    widths = {
        "hidden": s.hidden,
        "heads times head-dim": s.heads * s.head_dim,
        "expert-ffn": s.expert_ffn,
    }
    group = GROUP if s.layout == "mlx4" else BLOCK
    if s.family == "qwen2_moe":
        widths["shared-ffn"] = s.shared_ffn
    for name, width in widths.items():
        if width < 1 or width % group:
            raise SettingError(f"{name} is {width}; it must be a multiple of {group}")
    if s.kv_heads < 1 or s.heads % s.kv_heads:
        raise SettingError(f"{s.heads} heads cannot share {s.kv_heads} kv-heads")
    if not 1 <= s.top_k <= s.experts:
        raise SettingError(f"top-k is {s.top_k}; it must be 1 to {s.experts}, the experts")
    if s.layers < 1:
        raise SettingError(f"layers is {s.layers}; it must be at least 1")
    read_config(Path("config.json"), s.family, Consumed(config(s)))


def make(target: Path, shape: Shape, tokenizer: Path) -> int:
    """Write the checkpoint; returns the bytes of its tensors. `tokenizer`: a directory with tokenizer.json.

    Raises InputError for a shape that could not be converted, before anything is written.
    """
    check(shape)
    tensors = list(_tensors(shape))
    total = sum(t.spec.nbytes for t in tensors)
    check_room(target, total)
    target.mkdir(parents=True)
    for name in ("tokenizer.json", "chat_template.jinja"):
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, target / name)
    (target / "config.json").write_text(json.dumps(config(shape), indent=1))
    _write(target, tensors, shape.seed)
    return total


def config(s: Shape) -> dict[str, Any]:
    """config.json in the words of the family."""
    out: dict[str, Any] = {
        "model_type": s.family, "vocab_size": s.vocab, "hidden_size": s.hidden, "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "hidden_act": "silu",
        "intermediate_size": s.expert_ffn, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "tie_word_embeddings": False, "num_experts_per_tok": s.top_k,
        "bos_token_id": 0, "eos_token_id": [],
    }  # fmt: skip
    if s.head_dim * s.heads != s.hidden or s.family == "qwen3_moe":
        out["head_dim"] = s.head_dim
    out["num_local_experts" if s.family == "mixtral" else "num_experts"] = s.experts
    if s.family != "mixtral":
        out["norm_topk_prob"] = s.family == "qwen3_moe"
    if s.family.startswith("qwen"):
        out["moe_intermediate_size"] = s.expert_ffn
    if s.family == "qwen2_moe":
        out["shared_expert_intermediate_size"] = s.shared_ffn
    if s.layout == "mlx4":
        out["quantization"] = {"bits": 4, "group_size": GROUP}
    return out


def signs(s: Shape) -> Array:
    """u: the fixed vector of -1 and 1 that every embedding row has in it."""
    return np.where(np.random.default_rng(s.seed).random(s.hidden) < 0.5, -1.0, 1.0)


def embedding_rows(s: Shape) -> Callable[[int, int, np.random.Generator], Array]:
    """Rows of the embedding, float64[end - begin, hidden]."""
    u = signs(s)
    return lambda begin, end, rng: rng.standard_normal((end - begin, s.hidden), np.float32) + u


def _tensors(s: Shape) -> Iterator[Tensor]:
    spec = TensorSpec("model.embed_tokens.weight", "BF16", (s.vocab, s.hidden))
    yield Tensor(spec, _as_bf16(embedding_rows(s)))
    yield _normal("lm_head.weight", s.vocab, s.hidden, 2 / math.sqrt(s.hidden))
    yield _ones("model.norm.weight", s.hidden)
    for layer in range(s.layers):
        yield from _layer(s, layer)


def _layer(s: Shape, layer: int) -> Iterator[Tensor]:
    at, share = f"model.layers.{layer}", math.sqrt(1 / (2 * s.layers))
    q_size, kv_size, unit = s.heads * s.head_dim, s.kv_heads * s.head_dim, 1 / math.sqrt(s.hidden)
    yield _ones(f"{at}.input_layernorm.weight", s.hidden)
    yield _ones(f"{at}.post_attention_layernorm.weight", s.hidden)
    for part, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        yield from _linear(s, f"{at}.self_attn.{part}_proj", rows, s.hidden, unit)
        if s.family == "qwen2_moe":
            name = f"{at}.self_attn.{part}_proj.bias"
            yield Tensor(TensorSpec(name, "BF16", (rows,)), _constant(rows, 0.0))
    if s.family in ("qwen3_moe", "olmoe"):
        whole = s.family == "olmoe"
        yield _ones(f"{at}.self_attn.q_norm.weight", q_size if whole else s.head_dim)
        yield _ones(f"{at}.self_attn.k_norm.weight", kv_size if whole else s.head_dim)
    yield from _linear(s, f"{at}.self_attn.o_proj", s.hidden, q_size, share / math.sqrt(q_size))
    name = f"{at}.{s.block}.gate.weight"
    yield Tensor(TensorSpec(name, "BF16", (s.experts, s.hidden)), _as_bf16(router_rows(s, layer)))
    # 0.35: the deviation of silu(gate) * up for normal gates; top_k outputs are averaged.
    down = share * math.sqrt(s.top_k / s.expert_ffn) / 0.35
    for part, n, k, deviation in (
        ("gate", s.expert_ffn, s.hidden, unit),
        ("up", s.expert_ffn, s.hidden, unit),
        ("down", s.hidden, s.expert_ffn, down),
    ):
        yield from _experts(s, f"{at}.{s.block}", part, n, k, deviation)
    if s.family == "qwen2_moe":
        yield _normal(f"{at}.mlp.shared_expert_gate.weight", 1, s.hidden, unit)
        for part, n, k in (
            ("gate", s.shared_ffn, s.hidden), ("up", s.shared_ffn, s.hidden), ("down", s.hidden, s.shared_ffn),
        ):  # fmt: skip
            deviation = share / 0.35 / math.sqrt(k) if part == "down" else unit
            yield from _linear(s, f"{at}.mlp.shared_expert.{part}_proj", n, k, deviation)


def _experts(s: Shape, at: str, part: str, n: int, k: int, deviation: float) -> Iterator[Tensor]:
    if s.layout == "mlx4":
        yield from _affine(f"{at}.switch_mlp.{part}_proj", (s.experts, n), k, deviation)
        return
    name = (
        {"gate": "w1", "up": "w3", "down": "w2"}[part] if s.family == "mixtral" else f"{part}_proj"
    )
    for expert in range(s.experts):
        yield _normal(f"{at}.experts.{expert}.{name}.weight", n, k, deviation)


def router_rows(s: Shape, layer: int) -> Callable[[int, int, np.random.Generator], Array]:
    """Rows of a router, float64[end - begin, hidden], whose logits are Zipf's logarithms plus noise.

    The hidden state's noise has variance 1 + layer / layers.
    """
    noise, u = 1 + (layer + 0.5) / s.layers, signs(s)
    rms = math.sqrt(noise + 1)
    rank = np.random.default_rng((s.seed, layer)).permutation(s.experts) + 1
    bias = -s.skew * np.log(rank) * rms / s.hidden  # a normed state times u is hidden / rms
    deviation = GUMBEL_DEVIATION * rms / math.sqrt(noise * s.hidden)

    def rows(begin: int, end: int, rng: np.random.Generator) -> Array:
        random = rng.standard_normal((end - begin, s.hidden)) * deviation
        # Noise alone must not see u, or it would be a skew of its own.
        random -= np.outer(random @ u / s.hidden, u)
        return random + np.outer(bias[begin:end], u)

    return rows


def _linear(s: Shape, name: str, n: int, k: int, deviation: float) -> Iterator[Tensor]:
    if s.layout == "mlx4":
        yield from _affine(name, (n,), k, deviation)
    else:
        yield _normal(f"{name}.weight", n, k, deviation)


def _affine(name: str, outer: tuple[int, ...], k: int, deviation: float) -> Iterator[Tensor]:
    """Random codes; one scale of four significant bits, so that 7.5 times it is exact in bf16."""
    mantissa, exponent = math.frexp(deviation / CODE_DEVIATION)
    scale = math.ldexp(round(mantissa * 16), exponent - 4)

    def words(begin: int, end: int, rng: np.random.Generator) -> Array:
        return rng.integers(0, 1 << 32, (end - begin, k // 8), np.uint32)

    yield Tensor(TensorSpec(f"{name}.weight", "U32", (*outer, k // 8)), words)
    for part, value in (("scales", scale), ("biases", -7.5 * scale)):
        spec = TensorSpec(f"{name}.{part}", "BF16", (*outer, k // GROUP))
        yield Tensor(spec, _constant(k // GROUP, value))


def _normal(name: str, n: int, k: int, deviation: float) -> Tensor:
    def rows(begin: int, end: int, rng: np.random.Generator) -> Array:
        return _bf16(rng.standard_normal((end - begin, k), np.float32) * np.float32(deviation))

    return Tensor(TensorSpec(name, "BF16", (n, k)), rows)


def _ones(name: str, size: int) -> Tensor:
    return Tensor(TensorSpec(name, "BF16", (size,)), _constant(size, 1.0))


def _constant(width: int, value: float) -> Callable[[int, int, np.random.Generator], Array]:
    return lambda begin, end, rng: _bf16(np.full((end - begin, width), value))


def _as_bf16(
    rows: Callable[[int, int, np.random.Generator], Array],
) -> Callable[[int, int, np.random.Generator], Array]:
    return lambda begin, end, rng: _bf16(rows(begin, end, rng))


def _bf16(values: Array) -> Array:
    """Truncated to 16 bits."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _write(target: Path, tensors: list[Tensor], seed: int) -> None:
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.spec.nbytes for t in shards[-1]) + tensor.spec.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    weight_map = {}
    index = 0  # of a tensor: what is random depends on it, not on how tensors are shared out
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update({t.spec.name: name for t in shard})
        with (target / name).open("wb") as file:
            writer = TensorFileWriter(file, [t.spec for t in shard])
            for tensor in shard:
                _write_tensor(writer, tensor, np.random.default_rng((seed, index)))
                index += 1
    text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    (target / "model.safetensors.index.json").write_text(text)


def _write_tensor(writer: TensorFileWriter, tensor: Tensor, rng: np.random.Generator) -> None:
    row_bytes = tensor.spec.nbytes // tensor.num_rows
    step = max(1, PIECE // tensor.width)
    for begin in range(0, tensor.num_rows, step):
        end = min(tensor.num_rows, begin + step)
        writer.write(tensor.spec.name, tensor.rows(begin, end, rng), begin * row_bytes)


def vocabulary(tokenizer: Path) -> int:
    """Tokens of a tokenizer.json, added ones included."""
    body = json.loads((tokenizer / "tokenizer.json").read_text())
    vocab = body["model"]["vocab"]
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return 1 + max([*ids, *(t["id"] for t in body.get("added_tokens", []))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="an artifact or checkpoint")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument("--layout", choices=("bf16", "mlx4"), default="mlx4")
    parser.add_argument("--skew", type=float, default=0.0)
    sizes = {
        "layers": 24, "hidden": 1024, "heads": 16, "kv-heads": 4, "head-dim": 64, "experts": 128, "top-k": 8,
        "expert-ffn": 512, "shared-ffn": 1024, "seed": 0,
    }  # fmt: skip
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    target, tokenizer = given.pop("target"), given.pop("tokenizer")
    try:
        total = make(target, Shape(vocab=vocabulary(tokenizer), **given), tokenizer)
    except InputError as error:
        parser.error(error.message)
    print(f"{target}: {total:,} bytes of tensors")


if __name__ == "__main__":
    main()
