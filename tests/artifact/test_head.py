"""A head that drafts, from a checkpoint's file to one beside the artifact: no part of its identity, never trusted."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.convert import convert
from headrace.artifact.head import HEAD_NAME, head_size, read_head
from headrace.artifact.packing import AffineRows
from headrace.artifact.parts import Layout, Part, columns
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec, read_tensors
from headrace.errors import FileError
from headrace.kernels.layout import unpack
from headrace.models.decoder import first_rows, packed_weight

Tensors = dict[str, NDArray[Any]]
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "olmoe")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.make(tmp_path_factory.mktemp("head") / "a", "llama", head=1)


def values(weight: Any) -> NDArray[np.float64]:
    """A logical weight as floats [n, k]."""
    w = unpack(weight)
    groups = np.repeat(w.scales, w.group, 1) * w.codes
    if w.mins is not None:
        groups = groups + (np.repeat(w.mins, w.group, 1) << w.min_shift[:, None])
    return np.ldexp(groups * w.mantissa[:, None].astype(np.float64), w.exponent[:, None])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", family)
    plain = convert(source, tmp_path / "plain")
    assert read_head(plain) is None
    assert head_size(plain.path) is None
    raw = tiny.head_state(json.loads((source / "config.json").read_text()), 3)
    tiny.write_head(source, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = convert(source, tmp_path / "made")
    unread = {**plain.manifest.source, "unread": ["mtp.safetensors"]}
    assert made.manifest.source == unread
    head = read_head(made)
    assert head is not None
    assert (head.config.num_layers, head.config.ffn_size, head.config.experts) == (1, 96, None)
    assert head_size(made.path) == ((made.path / HEAD_NAME).stat().st_size, 96)
    hidden = head.config.hidden_size
    fc = raw["mtp.fc.weight"]
    for part, wanted in (("embed", fc[:, :hidden]), ("hidden", fc[:, hidden:])):
        found = values(packed_weight(f"fc.{part}", head.formats, head.tensors))
        step = np.ptp(wanted) / 15
        assert np.abs(found - wanted).max() < step
    norm = raw["mtp.pre_fc_norm_hidden.weight"]
    gain = head.tensors["fc.hidden_norm.gain"] * 2.0 ** int(
        head.tensors["fc.hidden_norm.gain_exponent"][0]
    )
    assert np.abs(gain - norm).max() < 1e-6


def test_the_artifact_is_what_it_is_without(tmp_path: Path) -> None:
    """Byte for byte, and the head too whenever it is made."""
    source = tiny.write_checkpoint(tmp_path / "src", "mixtral")
    (source / "mtp.safetensors").write_bytes(b"nothing of the kind")
    with pytest.warns(RuntimeWarning, match="the draft head is left out"):
        plain = convert(source, tmp_path / "plain")
    tiny.write_head(source)
    heads = []
    for name in ("a", "b"):
        made = convert(source, tmp_path / name)
        assert made.identity == plain.identity
        files = {f.name: f.read_bytes() for f in made.path.iterdir()}
        heads.append(files.pop(HEAD_NAME))
        assert files == {f.name: f.read_bytes() for f in plain.path.iterdir()}
    assert heads[0] == heads[1]
    before = heads[0]
    convert(source, tmp_path / "a")  # in place of itself
    assert (tmp_path / "a" / HEAD_NAME).read_bytes() == before


def test_mlx_keeps_its_codes(smolmoe_source: Path, smolmoe: Artifact) -> None:
    raw = read_tensors(smolmoe_source / "mtp.safetensors")
    head = read_head(smolmoe)
    assert head is not None
    words = np.ascontiguousarray(raw["mtp.fc.weight"].data).view(np.uint8)
    codes = np.stack([words & 15, words >> 4], -1).reshape(len(words), -1).astype(np.int64) - 8
    joined = [
        unpack(packed_weight(f"fc.{p}", head.formats, head.tensors)).codes
        for p in ("embed", "hidden")
    ]
    assert np.array_equal(np.concatenate(joined, 1), codes)
    assert smolmoe.manifest.source["unread"] == ["mtp.safetensors"]


def test_columns() -> None:
    """Between groups as they are, inside one in smaller groups; the values are the same."""
    rng = np.random.default_rng(1)
    rows = AffineRows(
        rng.normal(size=(6, 4)), rng.integers(0, 16, (6, 256)).astype(np.uint8), rng.normal(size=(6, 4)), 4, 64
    )  # fmt: skip
    part = Part(
        "p", 6, 256, 256, Layout(4, True, 64),
        lambda i: AffineRows(rows.scales[i], rows.codes[i], rows.mins[i], 4, 64),  # type: ignore[index]
    )  # fmt: skip
    for begin, end, group in ((0, 128, 64), (128, 256, 64), (32, 160, 32), (0, 256, 64)):
        some = columns(part, begin, end)
        assert (some.n, some.k, some.columns, some.layout.group) == (
            6,
            end - begin,
            end - begin,
            group,
        )
        order = np.array([4, 0, 5])
        assert np.array_equal(some.read(order).values(), rows.values()[order, begin:end])


def test_first_rows(artifact: Artifact) -> None:
    weight = packed_weight("embed", artifact.manifest.tensors, artifact.tensors)
    every = values(weight)
    for n in (16, 160):
        assert np.array_equal(values(first_rows(weight, n)), every[:n])
    assert first_rows(weight, weight.n) is weight


def rewritten(folder: Path, artifact: Artifact, edit: Callable[[Tensors], None]) -> Artifact:
    """The artifact with another head file."""
    shutil.copytree(artifact.path, folder)
    tensors = {n: t.data.copy() for n, t in read_tensors(folder / HEAD_NAME).items()}
    edit(tensors)
    kinds = {"int16": "I16", "int32": "I32", "uint8": "U8", "float32": "F32"}
    specs = [TensorSpec(n, kinds[str(a.dtype)], a.shape) for n, a in tensors.items()]
    with (folder / HEAD_NAME).open("wb") as file:
        writer = TensorFileWriter(file, specs)
        for name, array in tensors.items():
            writer.write(name, array)
    return open_artifact(folder)


def put(name: str, at: Any, value: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors[name].__setitem__(at, value)


DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "another artifact's": (put("identity", 0, 1), "another artifact"),
    "no identity": (lambda t: t.pop("identity"), "is missing"),
    "no width": (lambda t: t.pop("ffn"), "ffn"),
    "a width of nothing": (put("ffn", 0, 0), "ffn"),
    "a huge width": (put("ffn", 0, 1 << 30), "ffn"),
    "another width": (put("ffn", 0, 500), "down"),
    "a mantissa": (put("fc.embed.row", (0, 3), 1 << 20), "mantissa"),
    "an exponent": (put("fc.hidden.row", (1, 3), 999), "exponent"),
    "a gain": (put("norm.gain", 3, 1 << 30), "gain"),
    "no codes": (lambda t: t.pop("layers.0.qkv.codes"), "qkv"),
    "flat codes": (lambda t: t.update({"layers.0.qkv.codes": np.zeros(4, np.uint8)}), "qkv"),
    "three bits": (
        lambda t: t.update({"fc.embed.codes": t["fc.embed.codes"][:, :, :3].copy()}),
        "3 bits",
    ),
    "few tiles": (
        lambda t: t.update({"fc.embed.codes": t["fc.embed.codes"][:1].copy()}),
        "fc.embed.codes",
    ),
    "a float": (lambda t: t.update({"norm.gain": np.ones(64, np.float32)}), "norm.gain"),
    "one more": (lambda t: t.update({"extra": np.zeros(4, np.int32)}), "extra"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_head_is_refused_in_one_line(
    tmp_path: Path, artifact: Artifact, damage: str
) -> None:
    edit, cause = DAMAGE[damage]
    with pytest.raises(FileError, match=cause) as caught:
        read_head(rewritten(tmp_path / "a", artifact, edit))
    assert "\n" not in caught.value.message
    assert HEAD_NAME in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_no_head(tmp_path: Path, artifact: Artifact) -> None:
    shutil.copytree(artifact.path, tmp_path / "a")
    for content in (b"", b"\xff" * 100):
        (tmp_path / "a" / HEAD_NAME).write_bytes(content)
        with pytest.raises(FileError, match=HEAD_NAME):
            read_head(open_artifact(tmp_path / "a"))
        with pytest.raises(FileError, match=HEAD_NAME):
            head_size(tmp_path / "a")


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


LEFT_OUT: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a second layer": (
        lambda t: t.update({"mtp.layers.1.input_layernorm.weight": np.ones(64, np.float32)}),
        "layers.1",
    ),
    "experts": (
        lambda t: t.update({"mtp.layers.0.mlp.gate.weight": np.ones((4, 64), np.float32)}),
        "mlp.gate",
    ),
    "no fc": (without("mtp.fc.weight"), "mtp.fc"),
    "no layer": (without("mtp.layers.0.mlp.gate_proj.weight"), "gate_proj"),
    "no norm": (without("mtp.norm.weight"), "mtp.norm"),
    "another width": (
        lambda t: t.update({"mtp.fc.weight": np.ones((64, 64), np.float32)}),
        "mtp.fc",
    ),
    "not finite": (put("mtp.norm.weight", 3, np.nan), "not finite"),
}


@pytest.mark.parametrize("variant", LEFT_OUT)
def test_a_head_that_is_not_understood_is_left_out_and_named(tmp_path: Path, variant: str) -> None:
    """The model is converted all the same: a head changes no answer."""
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    tensors: Tensors = dict(tiny.head_state(json.loads((source / "config.json").read_text())))
    edit, cause = LEFT_OUT[variant]
    edit(tensors)
    tiny.write_tensors(source / "mtp.safetensors", tensors)
    with pytest.warns(RuntimeWarning, match=cause):
        made = convert(source, tmp_path / "a")
    assert read_head(made) is None
    assert not (made.path / HEAD_NAME).exists()
