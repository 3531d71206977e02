"""What sources call things: tensors and configuration keys of each family, one table a source kind.

A tensor or key that no table names is refused by `sources.py`: an unknown variant of a known family must
not run slightly wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ExpertNames:
    """Full names of a layer's router and experts; `{i}` is the layer, `{e}` the expert.

    Without `{e}` a tensor holds all experts, [E, n, k]; where gate and up are one, gate's rows come first.
    """

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class SharedNames:
    """A shared expert and the gate of its output."""

    router: str  # [hidden] or [1, hidden]
    gate_up: tuple[str, str]
    down: str


@dataclass(frozen=True)
class Names:
    """Source tensor names of the canonical tensors; `{i}` is the layer. Several parts are joined in order."""

    embed: str
    head: str
    norm: str
    attention_norm: str
    qkv: tuple[str, str, str]
    q_norm: str
    k_norm: str
    out: str
    mlp_norm: str
    gate_up: tuple[str, str]
    down: str
    experts: tuple[ExpertNames, ...]  # what experts may be called; the first that is there
    shared: SharedNames
    ignored: tuple[str, ...] = ()  # tensors that carry nothing headrace does not compute itself


_HF_MLP = "model.layers.{i}.mlp"
_HF_MIXTRAL = "model.layers.{i}.block_sparse_moe"


def _each(block: str, gate: str, up: str, down: str) -> ExpertNames:
    """One tensor an expert."""
    names = (f"{block}.experts.{{e}}.{n}.weight" for n in (gate, up, down))
    return ExpertNames(f"{block}.gate.weight", *names)


def _stacked(block: str) -> ExpertNames:
    """MLX: one tensor for all experts."""
    names = (f"{block}.switch_mlp.{n}_proj.weight" for n in ("gate", "up", "down"))
    return ExpertNames(f"{block}.gate.weight", *names)


def _fused(block: str) -> ExpertNames:
    """transformers 5 in memory: gate and up in one tensor for all experts."""
    both, down = f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"
    return ExpertNames(f"{block}.gate.weight", both, both, down)


GGUF = Names(
    embed="token_embd",
    head="output",
    norm="output_norm",
    attention_norm="blk.{i}.attn_norm",
    qkv=("blk.{i}.attn_q", "blk.{i}.attn_k", "blk.{i}.attn_v"),
    q_norm="blk.{i}.attn_q_norm",
    k_norm="blk.{i}.attn_k_norm",
    out="blk.{i}.attn_output",
    mlp_norm="blk.{i}.ffn_norm",
    gate_up=("blk.{i}.ffn_gate", "blk.{i}.ffn_up"),
    down="blk.{i}.ffn_down",
    experts=tuple(
        ExpertNames(
            "blk.{i}.ffn_gate_inp.weight",
            *(f"blk.{{i}}.ffn_{part}{kind}.weight" for part in ("gate", "up", "down")),
        )
        for kind in ("_exps", ".{e}")  # files of early Mixtrals have a tensor an expert
    ),
    shared=SharedNames(
        router="blk.{i}.ffn_gate_inp_shexp.weight",
        gate_up=("blk.{i}.ffn_gate_shexp", "blk.{i}.ffn_up_shexp"),
        down="blk.{i}.ffn_down_shexp",
    ),
)

HUGGING_FACE = Names(
    embed="model.embed_tokens",
    head="lm_head",
    norm="model.norm",
    attention_norm="model.layers.{i}.input_layernorm",
    qkv=tuple(f"model.layers.{{i}}.self_attn.{p}_proj" for p in "qkv"),  # type: ignore[arg-type]
    q_norm="model.layers.{i}.self_attn.q_norm",
    k_norm="model.layers.{i}.self_attn.k_norm",
    out="model.layers.{i}.self_attn.o_proj",
    mlp_norm="model.layers.{i}.post_attention_layernorm",
    gate_up=("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"),
    down="model.layers.{i}.mlp.down_proj",
    experts=(
        _each(_HF_MIXTRAL, "w1", "w3", "w2"),
        _each(_HF_MLP, "gate_proj", "up_proj", "down_proj"),
        *(form(block) for form in (_stacked, _fused) for block in (_HF_MIXTRAL, _HF_MLP)),
    ),
    shared=SharedNames(
        router=f"{_HF_MLP}.shared_expert_gate.weight",
        gate_up=(f"{_HF_MLP}.shared_expert.gate_proj", f"{_HF_MLP}.shared_expert.up_proj"),
        down=f"{_HF_MLP}.shared_expert.down_proj",
    ),
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)


@dataclass(frozen=True)
class HeadNames:
    """A head that drafts the token after the next (multi-token prediction): a file beside the checkpoint's own.

    names: of its one layer and its norm. fc: joins [normed embedding, normed state], in this order.
    """

    file: str
    names: Names
    fc: str
    embed_norm: str
    hidden_norm: str


def _inside(prefix: str, names: Names) -> Names:
    """The names of a model's layers under another prefix."""

    def moved(name: str) -> str:
        return name.replace("model.", prefix, 1)

    return replace(
        names,
        norm=moved(names.norm),
        attention_norm=moved(names.attention_norm),
        qkv=tuple(map(moved, names.qkv)),  # type: ignore[arg-type]
        q_norm=moved(names.q_norm),
        k_norm=moved(names.k_norm),
        out=moved(names.out),
        mlp_norm=moved(names.mlp_norm),
        gate_up=tuple(map(moved, names.gate_up)),  # type: ignore[arg-type]
        down=moved(names.down),
        ignored=tuple(map(moved, names.ignored)),
    )


MTP = HeadNames(
    file="mtp.safetensors",
    names=_inside("mtp.", HUGGING_FACE),
    fc="mtp.fc",
    embed_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
)

# model_type or general.architecture -> family. A GGUF of Mistral or Mixtral says llama.
HF_FAMILIES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "mixtral": "mixtral",
    "qwen2_moe": "qwen2_moe", "qwen3_moe": "qwen3_moe", "olmoe": "olmoe",
}  # fmt: skip
GGUF_FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "olmoe": "olmoe",
}  # fmt: skip

# GGUF rows of query and key heads are stored for interleaved rotation in these architectures.
GGUF_INTERLEAVED = frozenset({"llama"})

# Keys of `config.json` that say nothing about what is computed.
HF_HARMLESS = frozenset(
    [
        "_name_or_path",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
        "initializer_range",
        "is_llama_config",
        "model_type",
        "pretraining_tp",
        "transformers_version",
        "use_cache",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers.js_config",
        "quantization",
        "quantization_config",
        "name_or_path",
        "unk_token_id",
        "task_specific_params",
        "tokenizer_class",
        "_attn_implementation_autoset",
        "chunk_size_feed_forward",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "id2label",
        "label2id",
        "problem_type",
    ]
)

# Keys of a GGUF that say nothing about what is computed, as prefixes.
GGUF_HARMLESS = ("general.", "tokenizer.", "quantize.", "split.", "imatrix.")
