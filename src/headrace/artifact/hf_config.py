"""config.json of a Hugging Face or MLX directory as a typed configuration; every key is consumed or refused."""

from __future__ import annotations

from pathlib import Path

from headrace.artifact.naming import HF_FAMILIES, HF_HARMLESS
from headrace.artifact.sources import Consumed, natural, number_text
from headrace.errors import FileError, UnsupportedError
from headrace.models.config import MAX_LAYERS, DecoderConfig, ExpertsConfig, Llama3Scaling
from headrace.models.families import family


def read_config(path: Path, model_type: str, data: Consumed) -> DecoderConfig:
    """The configuration. Raises FileError or UnsupportedError that names the key."""
    traits = family(HF_FAMILIES[model_type])
    heads, hidden = natural(path, data, "num_attention_heads"), natural(path, data, "hidden_size")
    # What is not said has another default in some families: there it must be said.
    implied = model_type != "qwen3" and data.get("head_dim") is None
    head_dim = hidden // heads if implied else natural(path, data, "head_dim")
    context = natural(path, data, "max_position_embeddings")
    _refuse_variants(path, model_type, data, context)
    rope = _rope(path, data)
    num_layers = natural(path, data, "num_hidden_layers")
    experts = _experts(path, model_type, data, num_layers) if traits.experts else None
    # Families with experts differ in what they take where nothing is said: there it must be.
    eps, theta = (None, None) if traits.experts else (1e-6, 10000.0)
    config = DecoderConfig(
        vocab_size=natural(path, data, "vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=natural(
            path, data, "num_key_value_heads", heads if model_type in ("llama", "olmoe") else None
        ),
        head_dim=head_dim,
        ffn_size=_ffn_size(path, data, experts),
        context=context,
        norm_eps=number_text(path, data, "rms_norm_eps", eps),
        rope_theta=number_text(path, rope, "rope_theta", data.get("rope_theta", theta)),
        tied=_flag(path, data, "tie_word_embeddings"),
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
        rope_scaling=_scaling(path, rope),
        qk_norm_whole=traits.qk_norm_whole,
        experts=experts,
    )
    unasked = [k for k in data.unasked() if k not in HF_HARMLESS]
    if unasked:
        raise UnsupportedError(
            f"{path}: key {unasked[0]!r} is not understood: a variant of {model_type}?"
        )
    return config


def _experts(path: Path, model_type: str, data: Consumed, num_layers: int) -> ExpertsConfig:
    """Keys and defaults are those of transformers."""
    plain = model_type in ("mixtral", "olmoe")
    size = "intermediate_size" if plain else "moe_intermediate_size"
    shared = model_type == "qwen2_moe"
    return ExpertsConfig(
        num_experts=_num_experts(path, data),
        top_k=natural(path, data, "num_experts_per_tok"),
        ffn_size=natural(path, data, size),
        normalise=model_type == "mixtral" or _flag(path, data, "norm_topk_prob"),
        shared_ffn_size=natural(path, data, "shared_expert_intermediate_size") if shared else 0,
        dense_layers=() if plain else _dense_layers(path, data, num_layers),
    )


def _num_experts(path: Path, data: Consumed) -> int:
    """One number under two names: families and versions differ in which they write."""
    keys = [k for k in ("num_experts", "num_local_experts") if data.get(k) is not None]
    counts = {natural(path, data, key) for key in keys or ["num_experts"]}
    if len(counts) > 1:
        raise FileError(path, "key 'num_local_experts'", "is not what num_experts says")
    return counts.pop()


def _dense_layers(path: Path, data: Consumed, num_layers: int) -> tuple[int, ...]:
    step = natural(path, data, "decoder_sparse_step", 1)
    listed = data.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(i) is not int for i in listed):
        raise FileError(path, "key 'mlp_only_layers'", f"{listed!r:.60} is not a list of layers")
    layers = range(min(num_layers, MAX_LAYERS))  # more are refused later
    return tuple(i for i in layers if i in listed or (i + 1) % step)


def _ffn_size(path: Path, data: Consumed, experts: ExpertsConfig | None) -> int:
    """Of ordinary layers; where there are none, that of an expert, so that no buffer is wider than needed."""
    size = natural(path, data, "intermediate_size")
    return experts.ffn_size if experts and not experts.dense_layers else size


def _flag(path: Path, data: Consumed, key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise FileError(path, f"key {key!r}", f"{value!r:.60} is not true or false")
    return value


def _refuse_variants(path: Path, model_type: str, data: Consumed, context: int) -> None:
    biased = family(HF_FAMILIES[model_type]).qkv_bias
    plain: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "attention_bias": (True, None) if biased else (False, None),
        "qkv_bias": (biased, None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1.0, None),
        "use_sliding_window": (False, None),
        "rope_interleaved": (False, None),
        "clip_qkv": (None,),
        "is_encoder_decoder": (False, None),
        "add_cross_attention": (False, None),
        "auto_map": (None,),  # code of the checkpoint's own
    }
    if not family(HF_FAMILIES[model_type]).dense_layers:
        plain["mlp_only_layers"] = ([], None)
    for key, accepted in plain.items():
        value = data.get(key)
        if value not in accepted:
            raise UnsupportedError(f"{path}: {key} = {value!r:.60} is not supported")
    kinds = data.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedError(
            f"{path}: layer_types = {kinds!r:.60} is not supported: full_attention"
        )
    names = data.get("architectures") or []
    if not isinstance(names, list) or any(not str(n).endswith("ForCausalLM") for n in names):
        raise UnsupportedError(
            f"{path}: architectures = {names!r:.60} is not supported: …ForCausalLM"
        )
    # A Mistral that does not say has a window of 4096.
    window = data.get("sliding_window", 4096 if model_type == "mistral" else None)
    if model_type.startswith("qwen"):  # these have a switch, use_sliding_window, and it is off
        return
    if window is not None and (type(window) is not int or window < context):
        raise UnsupportedError(
            f"{path}: a sliding window of {window!r:.60} is not supported below the context, {context}"
        )


def _rope(path: Path, data: Consumed) -> Consumed:
    """rope_parameters (newer) or rope_scaling (older) as one mapping."""
    value = data.get("rope_parameters") or data.get("rope_scaling") or {}
    data.get("rope_scaling")
    if not isinstance(value, dict):
        raise FileError(path, "rope_scaling", "is not an object")
    return Consumed(value)


def _scaling(path: Path, rope: Consumed) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope.get("type")
    if kind == "default":
        scaling = None
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=number_text(path, rope, "factor"),
            low_freq_factor=number_text(path, rope, "low_freq_factor"),
            high_freq_factor=number_text(path, rope, "high_freq_factor"),
            original_context=natural(path, rope, "original_max_position_embeddings"),
        )
    else:
        raise UnsupportedError(
            f"{path}: rope scaling {kind!r:.60} is not supported: default, llama3"
        )
    if rope.unasked():
        raise UnsupportedError(f"{path}: rope key {rope.unasked()[0]!r} is not understood")
    return scaling
