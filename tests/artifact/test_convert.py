"""Conversion: what the artifact's weights differ by from the source's own, and that it is all or nothing."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

import tiny
from artifact import gguf_bytes as g
from headrace.artifact import container
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.convert import convert
from headrace.artifact.sources import ConvertOptions
from headrace.engine.engine import Engine
from headrace.errors import DiskFullError, FileError, HeadraceError, InputError, UnsupportedError
from headrace.values import SamplingParams
from models.weights import dequantized

Float = NDArray[np.float64]

# A K-quant row is a multiple of 256 elements.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOKENS = [
    *sorted(tiny.pre_tokenizers.ByteLevel.alphabet()),
    *tiny.SPECIAL,
    *(f"[unused{i}]" for i in range(13)),
]

# Largest difference of a weight between the source's own dequantised values and the artifact's, as a share
# of the row's largest magnitude. Codes are kept, so all but Q6_K lose only the rounding of 15-bit scales.
BOUNDS = {
    "F32": 0.0045, "F16": 0.0045, "BF16": 0.0045, "Q4_0": 4e-5, "Q4_1": 2e-4, "Q5_0": 4e-5, "Q5_1": 2e-4,
    "Q8_0": 4e-5, "Q6_K": 0.0045,
}  # fmt: skip


def gguf_file(
    path: Path, kind: str, settings: dict[str, Any], **extra: bytes
) -> tuple[Path, dict[str, Float]]:
    """A llama GGUF of random weights in one tensor type, and the values that it stands for."""
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers.": "blk.",
    }  # fmt: skip
    tensors, values = [], {}
    for name, array in tiny.state(settings).items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        quant = GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        raw = quantize(array, quant)
        values[name] = dequantize(raw, quant).astype(np.float64).reshape(array.shape)
        tensors.append((name, list(reversed(array.shape)), int(quant), raw.tobytes()))
    infos, data = g.pack_tensors(tensors)
    keys = g.llama_keys(settings, TOKENS) + list(extra.items())
    path.write_bytes(g.build(keys, infos, data))
    return path, values


def interleaved(rows: Float, heads: int) -> Float:
    """GGUF stores query and key rows for interleaved rotation; back to half-split."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def expected(values: dict[str, Float], settings: dict[str, Any], layer: int) -> dict[str, Float]:
    at = f"blk.{layer}"
    q = interleaved(values[f"{at}.attn_q.weight"], settings["num_attention_heads"])
    k = interleaved(values[f"{at}.attn_k.weight"], settings["num_key_value_heads"])
    return {
        "embed": values["token_embd.weight"],
        f"layers.{layer}.qkv": np.concatenate([q, k, values[f"{at}.attn_v.weight"]]),
        f"layers.{layer}.out": values[f"{at}.attn_output.weight"],
        f"layers.{layer}.gate_up": np.concatenate(
            [values[f"{at}.ffn_{p}.weight"] for p in ("gate", "up")]
        ),
        f"layers.{layer}.down": values[f"{at}.ffn_down.weight"],
    }


def difference(artifact: Artifact, wanted: dict[str, Float]) -> float:
    """Largest difference of any weight, as a share of its row's largest magnitude."""
    worst = 0.0
    for name, rows in wanted.items():
        got = dequantized(artifact, name)[:, : rows.shape[1]]
        assert np.isfinite(got).all()
        worst = max(worst, float((np.abs(got - rows) / np.abs(rows).max(1, keepdims=True)).max()))
    return worst


@pytest.mark.parametrize("kind", BOUNDS)
def test_gguf_weights_are_those_of_the_source(tmp_path: Path, kind: str) -> None:
    settings = tiny.config("llama", **WIDE)
    if kind == "Q6_K":
        pytest.importorskip("gguf")
        path, values = k_quant_file(tmp_path / "m.gguf", kind, settings)
    else:
        path, values = gguf_file(tmp_path / "m.gguf", kind, settings)
    artifact = convert(path, tmp_path / "out", ConvertOptions(bits=8))
    worst = difference(artifact, expected(values, settings, 1))
    print(f"{kind}: largest difference {worst:.2e} of the row's largest weight")
    assert worst < BOUNDS[kind]


def k_quant_file(path: Path, kind: str, settings: dict[str, Any]) -> tuple[Path, dict[str, Float]]:
    """A GGUF whose matrices are random bytes of a K type with sane scales (the library only reads them)."""
    source, values = gguf_file(path, "F32", settings)
    del source
    rng = np.random.default_rng(3)
    quant = GGMLQuantizationType[kind]
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    tensors = []
    for name, array in values.items():
        if array.ndim == 1:
            tensors.append((name, [len(array)], 0, array.astype(np.float32).tobytes()))
            continue
        raw = rng.integers(0, 256, (array.shape[0], array.shape[1] // 256, size), np.uint8)
        for at in halves:
            raw[..., at : at + 2] = (
                (0.001 + 0.001 * rng.random(raw.shape[:2]))
                .astype(np.float16)[..., None]
                .view(np.uint8)
            )
        values[name] = dequantize(raw.reshape(len(raw), -1), quant).astype(np.float64)
        tensors.append((name, list(reversed(array.shape)), int(quant), raw.tobytes()))
    infos, data = g.pack_tensors(tensors)
    path.write_bytes(g.build(g.llama_keys(settings, TOKENS), infos, data))
    return path, values


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_k_quants_keep_their_codes(tmp_path: Path, kind: str) -> None:
    settings = tiny.config("llama", **WIDE)
    path, values = k_quant_file(tmp_path / "m.gguf", kind, settings)
    artifact = convert(path, tmp_path / "out")
    worst = difference(artifact, expected(values, settings, 0))
    print(f"{kind}: largest difference {worst:.2e} of the row's largest weight")
    assert worst < 2e-4
    assert (
        artifact.manifest.tensors["layers.0.out"]["format"] == {"Q4_K": "q4m", "Q5_K": "q8m"}[kind]
    )


@pytest.mark.parametrize(("dtype", "bits", "group", "bound"), [
    ("F32", 4, 32, 0.07), ("F32", 8, 64, 0.0045), ("F16", 4, 64, 0.07), ("BF16", 8, 32, 0.0045),
])  # fmt: skip
def test_safetensors_are_quantised_on_the_way(
    tmp_path: Path, dtype: str, bits: int, group: int, bound: float
) -> None:
    settings = tiny.config("llama")
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    arrays = {}
    for name, array in tiny.state(settings).items():
        if dtype == "BF16":
            arrays[name] = (array.view(np.uint32) >> 16).astype(np.uint16)
        else:
            arrays[name] = array.astype(np.float16 if dtype == "F16" else np.float32)
    tiny.write_tensors(source / "model.safetensors", arrays)
    artifact = convert(source, tmp_path / "out", ConvertOptions(bits=bits, group=group))
    assert artifact.manifest.tensors["embed"]["format"] == "q8"
    assert artifact.manifest.tensors["layers.0.out"] == {
        "format": "q4m" if bits == 4 else "q8", "shape": [64, 128], "group": group,
    }  # fmt: skip
    wide = {
        k: (v.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else v
        for k, v in arrays.items()
    }
    wanted = {"layers.0.out": wide["model.layers.0.self_attn.o_proj.weight"].astype(np.float64)}
    worst = difference(artifact, wanted)
    print(f"{dtype} to {bits} bits in groups of {group}: largest difference {worst:.2e}")
    assert worst < bound
    assert (
        difference(artifact, {"embed": wide["model.embed_tokens.weight"].astype(np.float64)})
        < 0.0045
    )


def mlx_checkpoint(path: Path, bits: int, group: int, embed_bits: int) -> dict[str, Float]:
    """An MLX directory with random codes, scales and biases; returns what the weights stand for."""
    settings = tiny.config("llama")
    per_module = {"model.embed_tokens": {"bits": embed_bits, "group_size": group}}
    settings["quantization"] = {"bits": bits, "group_size": group, **per_module}
    tiny.write_checkpoint(
        path, "llama", quantization=settings["quantization"], intermediate_size=128
    )
    rng = np.random.default_rng(4)
    arrays: dict[str, NDArray[Any]] = {}
    values = {}
    for name, array in tiny.state(tiny.config("llama", intermediate_size=128)).items():
        if array.ndim == 1:
            arrays[name] = array
            continue
        b = embed_bits if "embed" in name else bits
        n, k = array.shape
        codes = rng.integers(0, 1 << b, (n, k), np.uint32)
        scales = (0.01 + 0.01 * rng.random((n, k // group))).astype(np.float16)
        biases = (-0.1 + 0.02 * rng.normal(size=(n, k // group))).astype(np.float16)
        words = codes.reshape(n, -1, 32 // b) << (np.arange(32 // b, dtype=np.uint32) * b)
        base = name.removesuffix(".weight")
        arrays[name] = np.bitwise_or.reduce(words, axis=-1)
        arrays[f"{base}.scales"], arrays[f"{base}.biases"] = scales, biases
        values[base] = np.repeat(scales, group, 1).astype(np.float64) * codes + np.repeat(
            biases, group, 1
        )
    tiny.write_tensors(path / "model.safetensors", arrays)
    return values


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (8, 32), (8, 64)])
def test_mlx_codes_are_kept(tmp_path: Path, bits: int, group: int) -> None:
    values = mlx_checkpoint(tmp_path / "src", bits, group, 8)
    artifact = convert(tmp_path / "src", tmp_path / "out")
    assert artifact.manifest.tensors["embed"] == {
        "format": "q8m",
        "shape": [272, 64],
        "group": group,
    }
    worst = difference(
        artifact,
        {
            "layers.1.down": values["model.layers.1.mlp.down_proj"],
            "embed": values["model.embed_tokens"],
        },
    )
    print(f"MLX {bits} bits in groups of {group}: largest difference {worst:.2e}")
    assert worst < 1e-4


def tree(path: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(path.iterdir())}


def test_converting_twice_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "qwen3")
    first = convert(source, tmp_path / "a")
    monkeypatch.setattr("headrace.artifact.convert.SLICE_ELEMENTS", 1 << 11)  # other slices
    second = convert(source, tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert first.identity == second.identity


def test_large_models_are_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    whole = convert(source, tmp_path / "a")
    monkeypatch.setattr("headrace.artifact.convert.MAX_FILE_BYTES", 20000)
    parts = convert(source, tmp_path / "b")
    assert len([f for f in parts.manifest.files if f.startswith("dense")]) > 3
    assert all(np.array_equal(whole.tensors[k], v) for k, v in parts.tensors.items())


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_progress_counts_every_row_and_every_byte(tmp_path: Path, name: str) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    convert(
        tiny.write_checkpoint(tmp_path / "src", name),
        tmp_path / "out",
        None,
        lambda step, done, total: seen.setdefault(step, []).append((done, total)),
    )
    assert list(seen) == ["convert", "verify"]
    for told in seen.values():
        assert told[-1][0] == told[-1][1] > 0
        assert [d for d, _ in told] == sorted(d for d, _ in told)
        assert len({total for _, total in told}) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    convert(source, tmp_path / "out")
    before = tree(tmp_path / "out")

    for step in ("convert", "verify"):

        def stop(what: str, done: int, total: int, step: str = step) -> None:
            if what == step:
                raise error

        with pytest.raises(error):
            convert(source, tmp_path / "out", ConvertOptions(bits=8), stop)
        assert tree(tmp_path / "out") == before
        assert {p.name for p in tmp_path.iterdir()} == {"src", "out"}
        with pytest.raises(error):
            convert(source, tmp_path / "fresh", None, stop)
        assert not (tmp_path / "fresh").exists()


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".out.partial-999999999-abc"
    stale.mkdir()
    (stale / "manifest.json").write_text("{}")
    convert(tiny.write_checkpoint(tmp_path / "src", "llama"), tmp_path / "out")
    assert not stale.exists()


def test_a_full_disk_is_refused_first_and_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(container.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match=r"needs [\d,]+ bytes, 1,000 are free"):
        convert(source, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"src"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"model_type": "gpt9"}, "'gpt9' is not supported: llama"),
    "unknown key": ({"clever_new_attention": True}, "clever_new_attention"),
    "attention bias": ({"attention_bias": True}, "attention_bias"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "rope kind": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "rope key": ({"rope_scaling": {"rope_type": "default", "odd": 1}}, "odd"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "heads as text": ({"num_attention_heads": "4"}, "num_attention_heads"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "huge context": ({"max_position_embeddings": 2**40}, "context"),
    "other shape": ({"hidden_size": 96}, "is ["),
    "more layers": ({"num_hidden_layers": 3}, "is missing"),
    "fewer layers": ({"num_hidden_layers": 1}, "not understood"),
    "untied without a head": ({"tie_word_embeddings": False}, "lm_head"),
    "end token outside": ({"eos_token_id": 5000}, "eos_token_id"),
    "other quantisation": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(tmp_path: Path, name: str) -> None:
    changes, cause = REFUSED[name]
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    settings = {**json.loads((source / "config.json").read_text()), **changes}
    (source / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out")
    assert cause in caught.value.message
    assert str(source) in caught.value.message or name in ("huge context",)
    assert not (tmp_path / "out").exists()


def test_an_active_sliding_window_is_refused(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "mistral", sliding_window=128)
    with pytest.raises(UnsupportedError, match="sliding window"):
        convert(source, tmp_path / "out")


def test_a_tensor_that_nobody_consumes_is_refused(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    arrays = tiny.state(tiny.config("llama")) | {
        "model.layers.0.self_attn.q_proj.bias": np.ones(128, np.float32)
    }
    tiny.write_tensors(source / "model.safetensors", arrays)
    with pytest.raises(InputError, match=r"q_proj\.bias"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, bad: float) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    arrays = tiny.state(tiny.config("llama"))
    arrays["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    tiny.write_tensors(source / "model.safetensors", arrays)
    with pytest.raises(FileError, match="not finite"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin"]
)
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, name: str) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    index = {"weight_map": {"model.norm.weight": name}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match="plain file name"):
        convert(source, tmp_path / "out")


def test_an_unknown_gguf_key_or_architecture_is_refused(tmp_path: Path) -> None:
    settings = tiny.config("llama", **WIDE)
    path, _ = gguf_file(
        tmp_path / "m.gguf", "Q8_0", settings, **{"llama.attention.clever": g.u32(1)}
    )
    with pytest.raises(UnsupportedError, match=r"llama\.attention\.clever"):
        convert(path, tmp_path / "out")
    infos, data = g.pack_tensors([("a", [32], 0, struct.pack("<32f", *range(32)))])
    path.write_bytes(g.build([("general.architecture", g.string("rwkv"))], infos, data))
    with pytest.raises(
        UnsupportedError,
        match=r"'rwkv' is not supported: llama, olmoe, qwen2, qwen2moe, qwen3, qwen3moe",
    ):
        convert(path, tmp_path / "out")


# ---- the trust boundary of an artifact -----------------------------------------------------------


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads((path / "manifest.json").read_text())
    change(body)
    (path / "manifest.json").write_text(json.dumps(body))


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a config value": (lambda b: b["config"].update(num_layers=7), "identity"),
    "another format": (lambda b: b.update(format=2), "format 2"),
    "another arithmetic": (lambda b: b["arithmetic"].update(version=9), "arithmetic version 9"),
    "fraction bits": (lambda b: b["arithmetic"].update(fraction_bits=60), "fraction_bits"),
    "an extra key": (lambda b: b.update(surprise=1), "surprise"),
    "a missing key": (lambda b: b.pop("tensors"), "tensors"),
    "a path": (lambda b: b["files"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}), "plain file name"),
    "no file sizes": (lambda b: b["files"].update({"tokenizer.json": 5}), "bytes and sha256"),
    "a huge shape": (lambda b: b["tensors"]["embed"].update(shape=[2**60, 64]), "not possible"),
    "an odd group": (lambda b: b["tensors"]["embed"].update(group=7), "not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest_is_refused(tmp_path: Path, name: str) -> None:
    change, cause = EDITS[name]
    tiny.make(tmp_path / "a")
    edit_manifest(tmp_path / "a", change)  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        open_artifact(tmp_path / "a")
    assert cause in caught.value.message
    assert "manifest.json" in caught.value.message


def test_flipped_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    tiny.make(tmp_path / "a")
    data = tmp_path / "a" / "dense-00001.safetensors"
    raw = data.read_bytes()
    data.write_bytes(raw[:-1])
    with pytest.raises(FileError, match="size"):
        open_artifact(tmp_path / "a")
    data.write_bytes(raw[:5000] + bytes([raw[5000] ^ 1]) + raw[5001:])
    with pytest.raises(FileError, match="sha256"):
        open_artifact(tmp_path / "a")
    data.unlink()
    with pytest.raises(FileError, match="missing"):
        open_artifact(tmp_path / "a")
    data.symlink_to("/etc/hostname")
    with pytest.raises(FileError, match="not a plain file"):
        open_artifact(tmp_path / "a")
    with pytest.raises(HeadraceError):
        open_artifact(tmp_path / "nothing")


def test_a_converted_gguf_generates(tmp_path: Path) -> None:
    path, _ = gguf_file(tmp_path / "m.gguf", "Q8_0", tiny.config("llama", **WIDE))
    with Engine(convert(path, tmp_path / "out"), max_context=64) as engine:
        tokens = list(engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=5)))
    assert [t.position for t in tokens] == [3, 4, 5, 6, 7][: len(tokens)]
