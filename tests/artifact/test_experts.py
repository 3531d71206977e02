"""Experts of an artifact: their weights are the source's, their records are checked, conversion is deterministic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

import tiny
from artifact import gguf_bytes as g
from artifact.test_convert import TOKENS, tree
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.artifact.packing import pack_router
from headrace.artifact.sources import ConvertOptions
from headrace.artifact.tensorfile import read_tensors
from headrace.errors import FileError, InputError
from models import weights

Float = NDArray[np.float64]
State = dict[str, NDArray[Any]]
ORDINARY = {"mixtral": ("w1", "w3", "w2")}
EXPERTS = "experts-00001.safetensors"


def block(name: str, layer: int) -> str:
    return f"model.layers.{layer}.{'block_sparse_moe' if name == 'mixtral' else 'mlp'}"


def count(settings: dict[str, Any]) -> int:
    return int(settings.get("num_experts") or settings["num_local_experts"])


def difference(found: tuple[Float, ...], wanted: list[Float]) -> float:
    """Largest difference of any weight as a share of its row's largest magnitude."""
    worst = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        peak = np.abs(theirs).max(1, keepdims=True)
        worst = max(worst, float((np.abs(ours - theirs) / peak).max()))
    return worst


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_experts_and_routers_are_those_of_the_source(tmp_path: Path, name: str) -> None:
    artifact = tiny.make(tmp_path / "a", name, ConvertOptions(bits=8))
    settings = tiny.config(name)
    state = tiny.state(settings)
    parts = ORDINARY.get(name, ("gate_proj", "up_proj", "down_proj"))
    dense = settings.get("mlp_only_layers", [])
    layers = [i for i in range(settings["num_hidden_layers"]) if i not in dense]
    assert [r.layer for r in artifact.records] == layers
    worst, router = 0.0, 0.0
    for layer in layers:
        at = block(name, layer)
        for e in range(count(settings)):
            wanted = [state[f"{at}.experts.{e}.{p}.weight"].astype(np.float64) for p in parts]
            worst = max(worst, difference(weights.expert(artifact, layer, e), wanted))
        rows = [state[f"{at}.gate.weight"]]
        if name == "qwen2_moe":
            rows.append(state[f"{at}.shared_expert_gate.weight"])
        every = np.concatenate(rows).astype(np.float64)
        router = max(router, difference((weights.router(artifact, layer),), [every]))
    print(f"{name}: largest difference {worst:.1e} of experts, {router:.1e} of routers")
    assert worst < 0.0045
    assert router < 2**-15


def test_router_codes_use_all_their_bits() -> None:
    rows = np.array([[1.0, -0.5], [0.0, 0.0], [32767.0, 1.0], [32767.6, 1.0], [-3e-20, 1e-20]])
    codes, exponents = pack_router(rows)
    assert exponents[[1, 2, 3]].tolist() == [0, 0, 1]
    assert codes[3, 0] == 16384
    peak = np.abs(codes).max(1)
    assert ((peak >= 1 << 14) | (peak == 0)).all()
    unit = np.ldexp(1.0, exponents)[:, None]
    assert (np.abs(codes * unit - rows) <= unit / 2).all()


# ---- forms of sources ----------------------------------------------------------------------------


def fused(state: State, settings: dict[str, Any]) -> State:
    """As transformers 5 holds them: all experts in one tensor, gate over up."""
    name, out = settings["model_type"], dict(state)
    parts = ORDINARY.get(name, ("gate_proj", "up_proj", "down_proj"))
    for layer in range(settings["num_hidden_layers"]):
        at, to = block(name, layer), f"model.layers.{layer}.mlp"
        if f"{at}.gate.weight" not in state:
            continue
        every = [
            [out.pop(f"{at}.experts.{e}.{p}.weight") for p in parts] for e in range(count(settings))
        ]
        out[f"{to}.gate.weight"] = out.pop(f"{at}.gate.weight")
        out[f"{to}.experts.gate_up_proj"] = np.stack([np.concatenate(e[:2]) for e in every])
        out[f"{to}.experts.down_proj"] = np.stack([e[2] for e in every])
    return out


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_fused_experts_give_the_same_bytes_as_one_tensor_an_expert(
    tmp_path: Path, name: str
) -> None:
    first = tiny.make(tmp_path / "a", name)
    source = tiny.write_checkpoint(tmp_path / "src", name)
    settings = tiny.config(name)
    tiny.write_tensors(source / "model.safetensors", fused(tiny.state(settings), settings))
    second = convert(source, tmp_path / "b")
    assert {k: v for k, v in tree(first.path).items() if k != "manifest.json"} == {
        k: v for k, v in tree(second.path).items() if k != "manifest.json"
    }


def affine(
    array: NDArray[Any], bits: int, group: int, rng: np.random.Generator
) -> tuple[State, Float]:
    """Random MLX codes, scales and biases in the shape of `array`, and what they stand for."""
    *outer, k = array.shape
    codes = rng.integers(0, 1 << bits, (*outer, k), np.uint32)
    scales = (0.002 + 0.004 * rng.random((*outer, k // group))).astype(np.float16)
    biases = (-0.03 + 0.02 * rng.normal(size=scales.shape)).astype(np.float16)
    per = 32 // bits
    words = codes.reshape(*outer, -1, per) << (np.arange(per, dtype=np.uint32) * bits)
    wide = np.repeat(scales.astype(np.float64), group, -1) * codes
    values = wide + np.repeat(biases.astype(np.float64), group, -1)
    return {"weight": np.bitwise_or.reduce(words, -1), "scales": scales, "biases": biases}, values


def mlx_checkpoint(
    path: Path, name: str, group: int = 32
) -> tuple[dict[str, Any], dict[str, Float]]:
    """4 bits, routers and the down projections of the last layer 8 bits by their own entries."""
    sizes = {"intermediate_size": 64} if name == "mixtral" else {"moe_intermediate_size": 64}
    settings = tiny.config(name, **sizes)
    settings["quantization"] = {"bits": 4, "group_size": group}
    rng = np.random.default_rng(7)
    arrays: State = {}
    values: dict[str, Float] = {}
    parts = ORDINARY.get(name, ("gate_proj", "up_proj", "down_proj"))
    state = tiny.state(settings)
    for layer in range(settings["num_hidden_layers"]):
        at = block(name, layer)
        for part, theirs in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            every = [state.pop(f"{at}.experts.{e}.{theirs}.weight") for e in range(count(settings))]
            state[f"{at}.switch_mlp.{part}.weight"] = np.stack(every)
    for full_name, array in state.items():
        module = full_name.removesuffix(".weight")
        if array.ndim == 1:
            arrays[full_name] = array
            continue
        last = f"layers.{settings['num_hidden_layers'] - 1}."
        bits = 8 if module.endswith(".gate") or (last in module and "down_proj" in module) else 4
        if bits == 8:
            settings["quantization"][module] = {"bits": 8, "group_size": group}
        triple, values[module] = affine(array, bits, group, rng)
        arrays |= {f"{module}.{k}": v for k, v in triple.items()}
    tiny.write_checkpoint(path, name, **sizes)
    (path / "config.json").write_text(json.dumps(settings))
    tiny.write_tensors(path / "model.safetensors", arrays)
    return settings, values


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_mlx_experts_keep_their_codes(tmp_path: Path, name: str) -> None:
    settings, values = mlx_checkpoint(tmp_path / "src", name)
    artifact = convert(tmp_path / "src", tmp_path / "out")
    worst = 0.0
    for layer in range(settings["num_hidden_layers"]):
        at = block(name, layer)
        every = [values[f"{at}.switch_mlp.{p}_proj"] for p in ("gate", "up", "down")]
        for e in range(count(settings)):
            found = weights.expert(artifact, layer, e)
            worst = max(worst, difference(found, [stack[e] for stack in every]))
        router = difference((weights.router(artifact, layer),), [values[f"{at}.gate"]])
        assert router < 2**-15
    print(f"MLX {name}: largest difference {worst:.1e}")
    assert worst < 1e-4
    formats = artifact.manifest.tensors
    assert formats["layers.0.experts.down"]["format"] == "q4m"
    assert formats["layers.1.experts.down"]["format"] == "q8m"


GGUF_ARCH = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
WIDE = {"intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "model.layers.": "blk.",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate.": "ffn_gate_inp.", "block_sparse_moe.gate.": "ffn_gate_inp.",
}  # fmt: skip


def gguf_file(
    path: Path, name: str, kind: str, *, stacked: bool = True, **extra: bytes
) -> tuple[dict[str, Any], dict[str, Float]]:
    """A GGUF of random weights in one tensor type, routers F32; and its values, experts by (part, layer)."""
    changes = {k: v for k, v in WIDE.items() if k in tiny.VARIANTS[name]}
    settings = tiny.config(name, **changes) | {"head_dim": 32}
    settings.pop("mlp_only_layers", None)
    arch = GGUF_ARCH[name]
    state: State = dict(tiny.state(settings))
    parts = ORDINARY.get(name, ("gate_proj", "up_proj", "down_proj"))
    for layer in range(settings["num_hidden_layers"]):
        for ours, theirs in zip(("gate", "up", "down"), parts, strict=True):
            at = block(name, layer)
            every = [state.pop(f"{at}.experts.{e}.{theirs}.weight") for e in range(count(settings))]
            if stacked:
                state[f"blk.{layer}.ffn_{ours}_exps.weight"] = np.stack(every)
            else:
                state |= {f"blk.{layer}.ffn_{ours}.{e}.weight": a for e, a in enumerate(every)}
    tensors, values = [], {}
    for full_name, array in state.items():
        for theirs, ours in GGUF_NAMES.items():
            full_name = full_name.replace(theirs, ours)
        if "_inp" in full_name and len(array) == 1:
            array = array[0]
        floats = array.ndim == 1 or "_inp" in full_name
        quant = GGMLQuantizationType["F32" if floats else kind]
        raw = quantize(array, quant)
        values[full_name] = dequantize(raw, quant).astype(np.float64).reshape(array.shape)
        tensors.append((full_name, list(reversed(array.shape)), int(quant), raw.tobytes()))
    infos, data = g.pack_tensors(tensors)
    keys = g.llama_keys(settings, TOKENS, arch)
    keys += [(f"{arch}.expert_count", g.u32(count(settings)))]
    keys += [(f"{arch}.expert_used_count", g.u32(settings["num_experts_per_tok"]))]
    if arch.startswith("qwen"):
        keys += [(f"{arch}.expert_feed_forward_length", g.u32(64))]
    if arch == "qwen2moe":
        keys += [(f"{arch}.expert_shared_feed_forward_length", g.u32(96))]
    path.write_bytes(g.build(keys + list(extra.items()), infos, data))
    return settings, values


def check_gguf(artifact: Artifact, settings: dict[str, Any], values: dict[str, Float]) -> float:
    worst = 0.0
    for layer in range(settings["num_hidden_layers"]):
        for e in range(count(settings)):
            wanted = []
            for part in ("gate", "up", "down"):
                stack = values.get(f"blk.{layer}.ffn_{part}_exps.weight")
                wanted.append(
                    values[f"blk.{layer}.ffn_{part}.{e}.weight"] if stack is None else stack[e]
                )
            worst = max(worst, difference(weights.expert(artifact, layer, e), wanted))
        rows = [values[f"blk.{layer}.ffn_gate_inp.weight"]]
        shared = values.get(f"blk.{layer}.ffn_gate_inp_shexp.weight")
        rows += [] if shared is None else [shared[None]]
        assert difference((weights.router(artifact, layer),), [np.concatenate(rows)]) < 2**-15
    return worst


@pytest.mark.parametrize(("name", "kind", "bound"), [
    ("mixtral", "Q4_0", 4e-5), ("qwen2_moe", "Q8_0", 4e-5), ("qwen3_moe", "Q4_1", 2e-4), ("olmoe", "F32", 0.0045),
])  # fmt: skip
def test_gguf_experts_are_those_of_the_source(
    tmp_path: Path, name: str, kind: str, bound: float
) -> None:
    settings, values = gguf_file(tmp_path / "m.gguf", name, kind)
    artifact = convert(tmp_path / "m.gguf", tmp_path / "out", ConvertOptions(bits=8))
    assert artifact.manifest.family == name
    assert artifact.manifest.config["experts"]["normalise"] == (name in ("mixtral", "qwen3_moe"))
    worst = check_gguf(artifact, settings, values)
    print(f"GGUF {name} {kind}: largest difference {worst:.1e}")
    assert worst < bound


def test_an_early_mixtral_gguf_with_a_tensor_an_expert_gives_the_same_records(
    tmp_path: Path,
) -> None:
    gguf_file(tmp_path / "a.gguf", "mixtral", "Q4_0")
    settings, values = gguf_file(tmp_path / "b.gguf", "mixtral", "Q4_0", stacked=False)
    first = convert(tmp_path / "a.gguf", tmp_path / "a")
    second = convert(tmp_path / "b.gguf", tmp_path / "b")
    assert check_gguf(second, settings, values) < 4e-5
    assert (first.path / EXPERTS).read_bytes() == (second.path / EXPERTS).read_bytes()


def test_a_gguf_and_a_checkpoint_of_one_model_have_one_configuration(tmp_path: Path) -> None:
    gguf_file(tmp_path / "m.gguf", "qwen3_moe", "F32")
    ours = convert(tmp_path / "m.gguf", tmp_path / "a").manifest.config
    theirs = tiny.make(tmp_path / "b", "qwen3_moe", moe_intermediate_size=64).manifest.config
    assert ours["experts"] == theirs["experts"]
    assert ours["ffn_size"] == theirs["ffn_size"]


# ---- what is refused -----------------------------------------------------------------------------

KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "clipped projections": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    "a router's scale": ("mixtral", {"router_scale": 2.0}, "router_scale"),
    "other scores": ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func"),
    "scaled experts": ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
    "groups": ("qwen3_moe", {"n_group": 8}, "n_group"),
    "no experts": ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    "two counts": ("mixtral", {"num_experts": 4}, "num_local_experts"),
    "more experts used": ("mixtral", {"num_experts_per_tok": 9}, "top_k 9"),
    "a window": ("mixtral", {"sliding_window": 128}, "sliding window"),
    "no bias": ("qwen2_moe", {"qkv_bias": False}, "qkv_bias"),
    "step as text": ("qwen3_moe", {"decoder_sparse_step": "1"}, "decoder_sparse_step"),
    "layers as text": ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers"),
    "normalising as text": ("olmoe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    "dense layers in mixtral": ("mixtral", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "experts in a dense family": ("llama", {"num_local_experts": 8}, "num_local_experts"),
    "another step": ("qwen3_moe", {"decoder_sparse_step": 2}, "is missing"),
    "fewer experts": ("mixtral", {"num_local_experts": 7}, "is [8, 64], not [7, 64]"),
    "more experts": ("mixtral", {"num_local_experts": 9}, "is [8, 64], not [9, 64]"),
    "another width": ("mixtral", {"intermediate_size": 64}, "is ["),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_what_is_not_understood_is_refused(tmp_path: Path, name: str) -> None:
    variant, changes, cause = KEYS[name]
    source = tiny.write_checkpoint(tmp_path / "src", variant)
    settings = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out")
    assert cause in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("expert", "cause"), [(7, "is missing"), (8, "not understood")])
def test_an_expert_too_few_or_too_many_is_refused(tmp_path: Path, expert: int, cause: str) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "mixtral")
    state: State = dict(tiny.state(tiny.config("mixtral")))
    name = f"{block('mixtral', 1)}.experts.{expert}.w2.weight"
    if expert == 7:
        del state[name]
    else:
        state[name] = state[f"{block('mixtral', 1)}.experts.0.w2.weight"]
    tiny.write_tensors(source / "model.safetensors", state)
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out")
    assert name.removesuffix(".weight") in caught.value.message
    assert cause in caught.value.message


@pytest.mark.parametrize(("shape", "cause"), [
    ((7, 128, 48), r"is not \[8, n, k\]"), ((8, 128, 32), r"not \[8, 128, 48\]"), ((8, 48), r"is not \[8, n, k\]"),
    ((1 << 40, 0, 48), r"is not \[8, n, k\]"),
])  # fmt: skip
def test_stacks_of_another_shape_are_refused(
    tmp_path: Path, shape: tuple[int, ...], cause: str
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "olmoe")
    settings = tiny.config("olmoe")
    state = fused(tiny.state(settings), settings)
    name = "model.layers.1.mlp.experts.down_proj"
    state[name] = np.zeros(shape, np.float32)
    tiny.write_tensors(source / "model.safetensors", state)
    with pytest.raises(FileError, match=rf"{re.escape(name)}.*{cause}"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(("key", "value"), [
    ("llama.expert_gating_func", g.u32(2)), ("llama.expert_weights_scale", g.f32(2.5)),
    ("llama.expert_weights_norm", g.value(7, b"\0")), ("llama.expert_group_count", g.u32(8)),
])  # fmt: skip
def test_gguf_keys_that_change_routing_are_refused(tmp_path: Path, key: str, value: bytes) -> None:
    gguf_file(tmp_path / "m.gguf", "mixtral", "Q8_0", **{key: value})
    with pytest.raises(InputError, match=key.replace(".", r"\.")):
        convert(tmp_path / "m.gguf", tmp_path / "out")


# ---- the trust boundary --------------------------------------------------------------------------


def test_converting_twice_gives_the_same_bytes_whatever_the_slices_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "qwen2_moe")
    first = convert(source, tmp_path / "a")
    monkeypatch.setattr("headrace.artifact.convert.SLICE_ELEMENTS", 1 << 11)
    assert convert(source, tmp_path / "b").identity == first.identity
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    monkeypatch.setattr("headrace.artifact.convert.MAX_FILE_BYTES", 100_000)
    parts = convert(source, tmp_path / "c")
    assert len({r.path for r in parts.records}) == len(parts.records) == 2
    for one, two in zip(first.records, parts.records, strict=True):
        size = one.num_experts * one.layout.nbytes
        both = [np.fromfile(r.path, np.uint8, size, offset=r.offset) for r in (one, two)]
        assert np.array_equal(*both)


def test_files_of_tensors_that_belong_to_something_else_are_named(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "mixtral")
    plain = convert(source, tmp_path / "a")
    assert "unread" not in plain.manifest.source
    (source / "mtp.safetensors").write_bytes(b"a draft head")
    beside = convert(source, tmp_path / "b")
    assert beside.manifest.source == {**plain.manifest.source, "unread": ["mtp.safetensors"]}


def test_smolmoe_keeps_its_codes(smolmoe_source: Path, smolmoe: Artifact) -> None:
    raw = read_tensors(smolmoe_source / "model.safetensors")
    at = "model.layers.17.block_sparse_moe.switch_mlp"

    def values(name: str) -> Float:
        words = raw[f"{name}.weight"].data
        codes = ((words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).reshape(
            *words.shape[:-1], -1
        )
        scale, bias = (
            np.repeat((raw[f"{name}.{p}"].data.astype(np.uint32) << 16).view(np.float32), 64, -1)
            for p in ("scales", "biases")
        )
        return codes.astype(np.float64) * scale + bias

    every = [values(f"{at}.{p}_proj") for p in ("gate", "up", "down")]
    worst = max(
        difference(weights.expert(smolmoe, 17, e), [stack[e] for stack in every]) for e in range(24)
    )
    router = values("model.layers.17.block_sparse_moe.gate")
    gap = difference((weights.router(smolmoe, 17),), [router])
    print(f"smolmoe: largest difference {worst:.1e} of experts, {gap:.1e} of the router")
    assert worst < 1e-4
    assert gap < 2**-15
    assert smolmoe.manifest.source["unread"] == ["mtp.safetensors"]


MEASURE = """
import sys
from pathlib import Path
from headrace.artifact.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]))
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
"""


def test_memory_of_conversion_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """250 MB of experts and a tenth of that: the peaks are nearly the same."""
    peaks = []
    for layers in (1, 10):
        source = tmp_path / f"src{layers}"
        changes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": layers}
        settings = tiny.config("mixtral", **changes)
        tiny.write_checkpoint(
            source, "mixtral", **{**changes, "num_hidden_layers": 1, "num_local_experts": 1}
        )
        (source / "config.json").write_text(json.dumps(settings))
        tiny.write_tensors(source / "model.safetensors", fused(tiny.state(settings), settings))
        command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / f"out{layers}")]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=dict(os.environ)
        )
        peaks.append(int(done.stdout))
    print(f"peaks {peaks} MB")
    assert peaks[1] < peaks[0] + 100
    assert peaks[1] < 400
