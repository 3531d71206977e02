"""Adapters as files: what a PEFT folder becomes, what is refused, and what damage is found."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import loras
import tiny
from headrace.arith import ops
from headrace.artifact.adapter import Adapter, open_adapter, read_adapter_manifest
from headrace.artifact.adapter_convert import convert_adapter
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.manifest import canonical
from headrace.errors import AdapterMismatchError, AdapterShapeError, FileError, UnsupportedError
from headrace.kernels.layout import unpack
from headrace.models.config import DecoderConfig

Get = Callable[[str], Artifact]
A_NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B_NAME = A_NAME.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def base(tiny_artifact: Get) -> Artifact:
    return tiny_artifact("qwen3")


@pytest.fixture(scope="module")
def config(base: Artifact) -> DecoderConfig:
    return DecoderConfig.from_json(base.manifest.config)


def weights(w: ops.Weight) -> NDArray[np.float64]:
    """What a packed weight without minimums stands for."""
    return np.ldexp(
        np.repeat(w.scales, w.group, 1) * w.codes * w.mantissa[:, None].astype(float),
        w.exponent[:, None],
    )


def products(adapter: Adapter) -> dict[tuple[int, str, int], NDArray[np.float64]]:
    """b @ a of every pair, by layer, projection and first row."""
    return {
        (*key, pair.offset): weights(unpack(pair.b))[:, : pair.a.n] @ weights(unpack(pair.a))
        for key, each in adapter.pairs.items()
        for pair in each
    }


def test_a_pair_is_what_peft_would_add(
    base: Artifact, config: DecoderConfig, tmp_path: Path
) -> None:
    """Every module in its rows, times alpha / rank, within what eight bits leave of it."""
    tensors = loras.state(config, rank=5)
    source = loras.write(tmp_path / "peft", tensors, loras.config(rank=5, alpha=20))
    adapter = convert_adapter(source, tmp_path / "adapter", base)
    rows = {
        "q": 0,
        "k": config.q_size,
        "v": config.q_size + config.kv_size,
        "o": 0,
        "gate": 0,
        "up": 112,
        "down": 0,
    }
    names = {
        "q": "qkv",
        "k": "qkv",
        "v": "qkv",
        "o": "out",
        "gate": "gate_up",
        "up": "gate_up",
        "down": "down",
    }
    found = products(adapter)
    assert len(found) == 7 * config.num_layers
    for layer in range(config.num_layers):
        for module, peft in loras.MODULES.items():
            name = f"base_model.model.model.layers.{layer}.{peft}"
            wanted = 4 * (
                tensors[f"{name}.lora_B.weight"].astype(float) @ tensors[f"{name}.lora_A.weight"]
            )
            got = found[layer, names[module], rows[module]]
            n, k = wanted.shape
            assert np.abs(got[:, :k] - wanted).max() < 0.02 * np.abs(wanted).max()
            assert not got[n:].any()
            assert not got[:, k:].any()


def test_the_same_source_gives_the_same_bytes(
    base: Artifact, config: DecoderConfig, tmp_path: Path
) -> None:
    source = loras.write(tmp_path / "peft", loras.state(config))
    one, two = (convert_adapter(source, tmp_path / name, base) for name in ("one", "two"))
    for name in ("manifest.json", "adapter.safetensors"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()
    moved = loras.write(tmp_path / "renamed", loras.state(config))
    assert (
        convert_adapter(moved, tmp_path / "two", base).identity == one.identity
    )  # and replaces it
    assert open_adapter(one.path, base).identity == one.identity


@pytest.mark.parametrize(
    ("prefix", "middle"),
    [("base_model.model.model.", ".default"), ("model.", ""), ("", ""), ("base_model.model.", "")],
)
def test_names_that_peft_and_others_write(
    base: Artifact, config: DecoderConfig, tmp_path: Path, prefix: str, middle: str
) -> None:
    tensors = loras.state(config, prefix=prefix, middle=middle)
    adapter = convert_adapter(loras.write(tmp_path / "peft", tensors), tmp_path / "adapter", base)
    plain = convert_adapter(
        loras.write(tmp_path / "plain", loras.state(config)), tmp_path / "other", base
    )
    assert adapter.manifest.sha256 == plain.manifest.sha256
    assert adapter.manifest.targets == plain.manifest.targets


def test_scale_is_part_of_the_identity(
    base: Artifact, config: DecoderConfig, tmp_path: Path
) -> None:
    tensors, found = loras.state(config), []
    for number, settings in enumerate(
        [loras.config(alpha=8), loras.config(alpha=16), loras.config(alpha=8, use_rslora=True),
         loras.config(alpha=8.0)]
    ):  # fmt: skip
        source = loras.write(tmp_path / f"peft{number}", tensors, settings)
        found.append(convert_adapter(source, tmp_path / f"adapter{number}", base))
    scales = [a.manifest.targets["layers.0.q"].scale for a in found]
    assert scales == ["2.0", "4.0", "4.0", "2.0"]  # 8 / 4, 16 / 4, 8 / sqrt(4)
    assert len({a.identity for a in found[:3]}) == 3
    assert found[1].manifest.sha256 == found[2].manifest.sha256 != found[0].manifest.sha256
    assert found[0].manifest.sha256 == found[3].manifest.sha256


def test_patterns_of_ranks_and_alphas(
    base: Artifact, config: DecoderConfig, tmp_path: Path
) -> None:
    tensors = loras.state(config, ("q", "v"), rank=4)
    for side, shape in (("A", (40, 64)), ("B", (config.kv_size, 40))):
        name = f"base_model.model.model.layers.1.self_attn.v_proj.lora_{side}.weight"
        tensors[name] = np.full(shape, 0.01, np.float32)
    settings = loras.config(
        rank=4,
        alpha=8,
        rank_pattern={"layers.1.self_attn.v_proj": 40},
        alpha_pattern={
            "^model.layers.0.self_attn.q_proj": 2,
            "v_proj": 20,
            "layers.1.self_attn.v_proj": 7,
        },
    )
    source = loras.write(tmp_path / "peft", tensors, settings)
    targets = convert_adapter(source, tmp_path / "adapter", base).manifest.targets
    got = {name: (t.rank, float(t.alpha), float(t.scale)) for name, t in targets.items()}
    assert got == {
        "layers.0.q": (4, 2, 0.5), "layers.0.v": (4, 20, 5), "layers.1.q": (4, 8, 2), "layers.1.v": (40, 20, 0.5),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["random", "one huge", "tiny", "ones"])
def test_inner_values_cannot_clip(base: Artifact, tmp_path: Path, kind: str) -> None:
    """Not even of the vector that is worst for a row; and they keep at least 20 bits of it."""
    rng = np.random.default_rng(1)
    a = rng.normal(size=(6, 64)).astype(np.float32)
    if kind == "one huge":
        a[3, 7] = 3e4
    elif kind == "tiny":
        a *= 1e-20
    elif kind == "ones":
        a[:] = 1
    tensors = {A_NAME: a, B_NAME: np.ones((128, 6), np.float32)}
    source = loras.write(tmp_path / "peft", tensors, loras.config(rank=6))
    pair = convert_adapter(source, tmp_path / "adapter", base).pairs[0, "qkv"][0]
    down, best = unpack(pair.a), 0
    for row in range(6):
        signs = np.where(down.codes[row] < 0, -127, 127)
        inner = ops.project(ops.Block(signs, np.full(2, 16513), 0), down, 0)
        assert inner.clipped == 0
        best = max(best, int(np.abs(inner.values).max()))
    assert best >= 1 << 28


REFUSED_SETTINGS: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "LOHA"},
    "bias": {"bias": "lora_only"},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "layer_replication": {"layer_replication": [[0, 2]]},
    "lora_bias": {"lora_bias": True},
    "init_lora_weights": {"init_lora_weights": "pissa_niter_4"},
    "trainable_token_indices": {"trainable_token_indices": [1]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "something_new": {"something_new": {"a": 1}},
    "r:": {"r": 0},
    "lora_alpha": {"lora_alpha": "8"},
    "use_rslora": {"use_rslora": "yes"},
    "alpha_pattern": {"alpha_pattern": {"(a+)+": 3}},
    "rank_pattern": {"rank_pattern": {"q_proj": 4.5}},
}


CONTRADICTIONS: list[dict[str, Any]] = [
    {"alpha_pattern": {"x_proj": 3}},
    {"rank_pattern": {"q_proj": 4, "layers.7.self_attn.q_proj": 4}},
    {"layers_to_transform": 0},
    {"layers_to_transform": [1]},
    {"layers_to_transform": "all"},
    {"layers_to_transform": [True]},
    {"exclude_modules": ["k_proj", "q_proj"]},
    {"exclude_modules": "model.layers.1.mlp.up_proj"},
    {"exclude_modules": ".*mlp.*"},
    {"exclude_modules": "(a+)+"},
    {"exclude_modules": [1]},
]
AGREEMENTS: list[dict[str, Any]] = [
    {"layers_to_transform": [0, 1, 9], "layers_pattern": "layers"},
    {"layers_to_transform": None, "exclude_modules": None},
    {"exclude_modules": ["lm_head", "proj"]},
    {"exclude_modules": ".*visual.*"},
    {"alpha_pattern": {"q_proj": 8, "layers.0.self_attn.q_proj": 8}},
]


@pytest.mark.parametrize("settings", CONTRADICTIONS, ids=str)
def test_settings_that_contradict_the_tensors_are_refused(
    base: Artifact, config: DecoderConfig, tmp_path: Path, settings: dict[str, Any]
) -> None:
    source = loras.write(tmp_path / "peft", loras.state(config), loras.config(**settings))
    with pytest.raises(UnsupportedError, match=next(iter(settings))):
        convert_adapter(source, tmp_path / "adapter", base)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("settings", AGREEMENTS, ids=str)
def test_settings_that_agree_with_the_tensors(
    base: Artifact, config: DecoderConfig, tmp_path: Path, settings: dict[str, Any]
) -> None:
    source = loras.write(tmp_path / "peft", loras.state(config), loras.config(**settings))
    convert_adapter(source, tmp_path / "adapter", base)


@pytest.mark.parametrize("word", REFUSED_SETTINGS)
def test_settings_that_are_refused(
    base: Artifact, config: DecoderConfig, tmp_path: Path, word: str
) -> None:
    source = loras.write(
        tmp_path / "peft", loras.state(config), loras.config(**REFUSED_SETTINGS[word])
    )
    with pytest.raises((UnsupportedError, FileError), match=word):
        convert_adapter(source, tmp_path / "adapter", base)
    assert not (tmp_path / "adapter").exists()


ONE = np.ones((4, 64), np.float32)
REFUSED_TENSORS: dict[str, str] = {
    "model.embed_tokens.lora_embedding_A": "the embedding",
    "lm_head.lora_A.weight": "the head",
    "model.layers.0.self_attn.q_proj.lora_magnitude_vector": "DoRA",
    "model.layers.0.mlp.experts.3.gate_proj.lora_A.weight": "experts",
    "model.layers.0.block_sparse_moe.gate.lora_A.weight": "experts or of their router",
    "model.layers.0.mlp.gate.lora_A.weight": "a router",
    "model.layers.0.mlp.shared_expert.up_proj.lora_A.weight": "a shared expert",
    "model.layers.0.self_attn.q_proj.lora_B.bias": "a bias",
    "model.layers.0.input_layernorm.weight": "a norm",
    "model.layers.0.self_attn.rotary.lora_A.weight": "is not understood",
    "model.layers.00.self_attn.q_proj.lora_A.weight": "is not understood",
}


@pytest.mark.parametrize("name", REFUSED_TENSORS)
def test_tensors_that_are_refused(
    base: Artifact, config: DecoderConfig, tmp_path: Path, name: str
) -> None:
    tensors = loras.state(config) | {f"base_model.model.{name}": ONE}
    source = loras.write(tmp_path / "peft", tensors)
    with pytest.raises(UnsupportedError, match=REFUSED_TENSORS[name]) as error:
        convert_adapter(source, tmp_path / "adapter", base)
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({A_NAME: np.ones((4, 96), np.float32)}, r"lora_A.*\[4, 96\], the base needs \[4, 64\]"),
        ({B_NAME: np.ones((64, 4), np.float32)}, r"lora_B.*\[64, 4\], the base needs \[128, 4\]"),
        ({A_NAME: np.ones((8, 64), np.float32)}, r"lora_A.*\[8, 64\], but its rank is 4"),
        ({B_NAME: np.ones((128, 8), np.float32)}, r"lora_B.*\[128, 8\], but its rank is 4"),
        ({A_NAME: np.ones(64, np.float32)}, "no matrix of floats"),
        ({A_NAME: np.ones((4, 64), np.uint8)}, "no matrix of floats"),
    ],
)
def test_shapes_are_the_bases(
    base: Artifact, config: DecoderConfig, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    source = loras.write(tmp_path / "peft", loras.state(config) | changes)
    with pytest.raises(AdapterShapeError, match=words):
        convert_adapter(source, tmp_path / "adapter", base)


def test_what_else_is_wrong_with_a_source(
    base: Artifact, config: DecoderConfig, tmp_path: Path
) -> None:
    good = loras.state(config)

    def refused(tensors: dict[str, Any], words: str) -> None:
        source = loras.write(tmp_path / "peft", tensors)
        with pytest.raises((FileError, UnsupportedError), match=words):
            convert_adapter(source, tmp_path / "adapter", base)

    refused({k: v for k, v in good.items() if k != B_NAME}, "has no lora_B")
    refused(good | {A_NAME.replace(".weight", ".other.weight"): ONE}, "is there twice")
    refused(good | {A_NAME: ONE * math.nan}, "not finite")
    refused(
        good | {A_NAME: ONE * np.float32(1e-38), B_NAME: np.full((128, 4), 1e-38, np.float32)},
        "too large or too small",
    )
    refused(
        good
        | {
            A_NAME.replace("layers.0", "layers.7"): ONE,
            B_NAME.replace("layers.0", "layers.7"): good[B_NAME],
        },
        "layer 7, the base has 2",
    )
    middle = {k.replace(".weight", ".one.weight"): v for k, v in good.items() if "layers.0" in k}
    refused({k: v for k, v in good.items() if "layers.1" in k} | middle, "several adapters")
    refused({}, "there are none")
    (tmp_path / "peft" / "adapter_model.safetensors").unlink()
    (tmp_path / "peft" / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedError, match="pickle"):
        convert_adapter(tmp_path / "peft", tmp_path / "adapter", base)
    assert not (tmp_path / "adapter").exists()


def test_experts_in_place_of_an_mlp(tiny_artifact: Get, tmp_path: Path) -> None:
    mixture, dense = tiny_artifact("mixtral"), tiny_artifact("llama")
    c = DecoderConfig.from_json(dense.manifest.config)
    source = loras.write(tmp_path / "peft", loras.state(c, ("q", "gate")))
    with pytest.raises(AdapterShapeError, match=r"gate_proj.*has experts in that layer"):
        convert_adapter(source, tmp_path / "adapter", mixture)


def test_the_base_is_the_one_that_it_was_made_for(
    base: Artifact, tiny_artifact: Get, tmp_path: Path
) -> None:
    adapter = loras.make(tmp_path / "adapter", base)
    with pytest.raises(AdapterMismatchError) as error:
        open_adapter(adapter.path, tiny_artifact("llama"))
    assert base.identity[:16] in str(error.value)
    with pytest.raises(UnsupportedError, match="an adapter, not a model"):
        open_artifact(adapter.path)
    with pytest.raises(FileError, match="this is a model"):
        open_adapter(base.path, base)


def test_nothing_else_is_replaced(base: Artifact, config: DecoderConfig, tmp_path: Path) -> None:
    source = loras.write(tmp_path / "peft", loras.state(config))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "manifest.json").write_text("{}")
    (tmp_path / "there" / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match="not replaced"):
        convert_adapter(source, tmp_path / "there", base)


@pytest.fixture
def made(base: Artifact, tmp_path: Path) -> Path:
    return loras.make(tmp_path / "adapter", base, ("q", "down")).path


def test_every_damaged_byte_is_found(base: Artifact, made: Path) -> None:
    for name in ("manifest.json", "adapter.safetensors"):
        good = (made / name).read_bytes()
        for at in [*range(0, len(good), max(1, len(good) // 40)), len(good) - 1]:
            bad = bytearray(good)
            bad[at] ^= 4
            (made / name).write_bytes(bad)
            with pytest.raises((FileError, UnsupportedError)):
                open_adapter(made, base)
        for cut in (0, 1, len(good) // 2, len(good) - 2):
            (made / name).write_bytes(good[:cut])
            with pytest.raises(FileError):
                open_adapter(made, base)
        (made / name).write_bytes(good + b" ")
        if name != "manifest.json":
            with pytest.raises(FileError, match="size"):
                open_adapter(made, base)
        (made / name).unlink()
        with pytest.raises(FileError, match="missing"):
            open_adapter(made, base)
        (made / name).write_bytes(good)
    open_adapter(made, base)


def resign(made: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody who knows how identities are made."""
    body = json.loads((made / "manifest.json").read_text())
    change(body)
    body.pop("identity", None)
    body["identity"] = hashlib.sha256(canonical(body)).hexdigest()
    (made / "manifest.json").write_text(json.dumps(body))


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (lambda b: b.update(format=2), "format version 2"),
    "arithmetic": (lambda b: b["arithmetic"].update(version=9), "arithmetic version 9"),
    "more": (lambda b: b.update(more=1), "more"),
    "base": (lambda b: b.update(base="00"), "not a SHA-256"),
    "name": (lambda b: b["targets"].update({"layers.0.x": b["targets"]["layers.0.q"]}), "layers.0.x"),
    "path": (lambda b: b["targets"].update({"../q": b["targets"]["layers.0.q"]}), "not the name"),
    "layer": (lambda b: b["targets"].update({"layers.9.q": b["targets"]["layers.0.q"]}), "none of the base"),
    "rank": (lambda b: b["targets"]["layers.0.q"].update(rank=0), "rank 0"),
    "huge rank": (lambda b: b["targets"]["layers.0.q"].update(rank=10**9), "rank 1000000000"),
    "another rank": (lambda b: b["targets"]["layers.0.q"].update(rank=64), "layers.0.q.a"),
    "scale": (lambda b: b["targets"]["layers.0.q"].update(scale="nan"), "not a number"),
    "no targets": (lambda b: b.update(targets={}), "targets"),
    "one less": (lambda b: b["targets"].pop("layers.1.q"), "belongs to no module"),
    "one more": (lambda b: b["targets"].update({"layers.0.k": b["targets"]["layers.0.q"]}), "is missing"),
    "source": (lambda b: b.update(source={"kind": "x", "sha256": "0" * 64}), "source"),
    "size": (lambda b: b["file"].update(bytes=1 << 50), "needs bytes"),
    "another size": (lambda b: b["file"].update(bytes=1 << 20), "the manifest says"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_manifests_that_lie(base: Artifact, made: Path, name: str) -> None:
    change, words = HOSTILE[name]
    resign(made, change)
    with pytest.raises((FileError, UnsupportedError), match=words):
        open_adapter(made, base)


def test_values_that_rules_do_not_allow(base: Artifact, made: Path) -> None:
    """A file with a right hash, whose exponents are beyond their range."""
    adapter = open_adapter(made, base)
    arrays = {
        f"layers.{layer}.{module}.{side}.{part}": getattr(getattr(pair, side), part)
        for module, name in (("q", "qkv"), ("down", "down"))
        for layer in range(2)
        for pair in adapter.pairs[layer, name]
        for side in "ab"
        for part in ("codes", "scales", "row")
    }
    kinds = {"codes": "U8", "scales": "I16", "row": "I32"}
    names = {n: kinds[n.rpartition(".")[2]] for n in arrays}
    row = arrays["layers.1.q.b.row"].copy()
    row[1, 0] = 1000
    for changed, words in ((row, "exponent 1000"), (row[:, :16].copy(), "not I32")):
        path = made / "adapter.safetensors"
        path.unlink()
        tiny.write_tensors(path, arrays | {"layers.1.q.b.row": changed}, names)
        raw = path.read_bytes()
        facts = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        resign(made, lambda body, facts=facts: body.update(file=facts))  # type: ignore[misc]
        with pytest.raises(FileError, match=words):
            open_adapter(made, base)


def test_what_was_opened_is_what_is_used(base: Artifact, made: Path) -> None:
    """A file that is written to afterwards changes nothing of an adapter that is in memory."""
    adapter = open_adapter(made, base)
    before = products(adapter)
    (made / "adapter.safetensors").write_bytes(b"\0" * adapter.manifest.nbytes)
    after = products(adapter)
    assert all(np.array_equal(before[key], after[key]) for key in before)
    assert read_adapter_manifest(made).identity == adapter.identity
