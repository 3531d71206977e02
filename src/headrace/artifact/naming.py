"""What sources call things: tensors and configuration keys of each family, one table a source kind.

A tensor or key that no table names is refused by `sources.py`: an unknown variant of a known family must
not run slightly wrong.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    ignored: tuple[str, ...] = ()  # tensors that carry nothing headrace does not compute itself


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
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)

# model_type or general.architecture -> family. A GGUF of Mistral says llama.
HF_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

# GGUF rows of query and key heads are stored for interleaved rotation in these architectures.
GGUF_INTERLEAVED = frozenset({"llama"})

# Keys of `config.json` that say nothing about what is computed.
HF_HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
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
        "id2label",
        "label2id",
        "problem_type",
    ]
)

# Keys of a GGUF that say nothing about what is computed, as prefixes.
GGUF_HARMLESS = ("general.", "tokenizer.", "quantize.", "split.", "imatrix.")
