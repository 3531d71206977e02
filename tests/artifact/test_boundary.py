"""The trust boundary of an artifact whose hashes are right, and what conversion refuses to replace."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tiny
from artifact import gguf_bytes as g
from artifact.test_convert import WIDE, gguf_file, tree
from headrace.artifact.container import open_artifact
from headrace.artifact.convert import convert
from headrace.artifact.gguf import read_gguf
from headrace.artifact.jsontext import MAX_CONTAINERS, parse_object
from headrace.artifact.manifest import FileEntry, Manifest, TokenizerInfo
from headrace.artifact.sources import open_source
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec, read_tensors
from headrace.errors import FileError, HeadraceError, InputError

Arrays = dict[str, NDArray[Any]]
DATA = "dense-00001.safetensors"
DTYPES = {"uint8": "U8", "int16": "I16", "int32": "I32", "float32": "F32"}


def forge(path: Path, change: Callable[[Arrays], object], **fields: Any) -> None:
    """Rewrite an artifact with other tensors and manifest fields, and hashes that fit."""
    artifact = open_artifact(path)
    arrays = {name: array.copy() for name, array in artifact.tensors.items()}
    change(arrays)
    with (path / DATA).open("wb") as file:
        writer = TensorFileWriter(
            file, [TensorSpec(n, DTYPES[str(a.dtype)], a.shape) for n, a in arrays.items()]
        )
        for name, array in arrays.items():
            writer.write(name, array)
    raw = (path / DATA).read_bytes()
    entry = FileEntry(len(raw), hashlib.sha256(raw).hexdigest())
    manifest = replace(artifact.manifest, files={**artifact.manifest.files, DATA: entry}, **fields)
    (path / "manifest.json").write_bytes(manifest.to_bytes())


def setter(name: str, index: Any, value: int) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][index] = value

    return change


LIES: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "nothing": (lambda a: None, ""),
    "a mantissa of 16 bits": (setter("embed.row", (0, 3), 1 << 15), "mantissa 32768"),
    "a negative mantissa": (setter("embed.row", (0, 3), -1), "mantissa -1"),
    "an exponent": (setter("layers.0.qkv.row", (1, 0), 1000), "exponent 1000"),
    "a shift": (setter("layers.1.down.row", (2, 0), 15), "shift 15"),
    "a scale of -2^15": (setter("embed.scales", (0, 0, 0), -32768), "scales -32768"),
    "a minimum of -2^15": (setter("layers.0.out.mins", (0, 0, 0, 0), -32768), "mins -32768"),
    "a gain": (setter("norm.gain", 0, 1 << 30), "gain 1073741824"),
    "a gain's exponent": (setter("norm.gain_exponent", 0, 999), "gain_exponent 999"),
    "a cosine above 1": (setter("rope.low", (0, 0, 0), (1 << 30) + 1), "low 1073741825"),
    "a negative sigmoid": (setter("table.sigmoid", 7, -1), "sigmoid -1"),
    "a tensor less": (lambda a: a.pop("norm.gain"), "'norm.gain': is missing"),
    "a tensor more": (lambda a: a.update(x=np.zeros(3, np.int32)), "'x': is not described"),
    "another shape": (lambda a: a.update({"norm.gain": np.zeros(65, np.int32)}), "is int32(65,)"),
    "another type": (lambda a: a.update({"norm.gain": np.zeros(64, np.float32)}), "is float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_tensors_that_break_a_bound_are_refused(tmp_path: Path, name: str) -> None:
    change, cause = LIES[name]
    tiny.make(tmp_path / "a")
    forge(tmp_path / "a", change)
    if not cause:
        assert open_artifact(tmp_path / "a", verify=True).tensors
        return
    with pytest.raises(FileError) as caught:
        open_artifact(tmp_path / "a")
    assert cause in caught.value.message


def other_config(manifest: Manifest, **changes: Any) -> dict[str, Any]:
    return {"config": {**manifest.config, **changes}}


FIELDS: dict[str, tuple[Callable[[Manifest], dict[str, Any]], str]] = {
    "more layers": (lambda m: other_config(m, num_layers=3), "'layers.2.down': is missing"),
    "fewer layers": (lambda m: other_config(m, num_layers=1), "is not one of this family's"),
    "another width": (lambda m: other_config(m, hidden_size=96), "not ["),
    "a longer context": (lambda m: other_config(m, context=4096), "rope.high"),
    "a text for a number": (lambda m: other_config(m, num_heads="4"), "num_heads"),
    "an unknown config key": (lambda m: other_config(m, window=4), "window"),
    "another family": (lambda m: {"family": "qwen3"}, "qk_norm"),
    "an unknown family": (lambda m: {"family": "rwkv"}, "rwkv"),
    "an end token outside": (lambda m: {"tokenizer": TokenizerInfo(None, False, (10**6,))}, "no token"),
    "a group that is no integer": (
        lambda m: {"tensors": {k: {**v, "group": 32.0} for k, v in m.tensors.items()}}, "group",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_manifests_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    change, cause = FIELDS[name]
    manifest = tiny.make(tmp_path / "a").manifest
    forge(tmp_path / "a", lambda a: None, **change(manifest))
    with pytest.raises(FileError) as caught:
        open_artifact(tmp_path / "a")
    assert cause in caught.value.message


# ---- what conversion may replace -----------------------------------------------------------------


def test_what_is_no_artifact_is_not_replaced(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    before = {p.name for p in tmp_path.iterdir()}
    for name in ("photos", "file", "link", "src"):
        with pytest.raises(FileError, match="not replaced"):
            convert(source, tmp_path / name)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    assert {p.name for p in tmp_path.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty").path == tmp_path / "empty"


def test_an_artifact_lost_between_two_renames_is_put_back(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    convert(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    os.rename(tmp_path / "out", tmp_path / ".out.partial-999999999-old")

    def stop(step: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", None, stop)
    assert tree(tmp_path / "out") == before


def test_a_renamed_source_gives_the_same_bytes(tmp_path: Path) -> None:
    path, _ = gguf_file(tmp_path / "m.gguf", "Q8_0", tiny.config("llama", **WIDE))
    convert(path, tmp_path / "a")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    second = convert(path.rename(tmp_path / "renamed.gguf"), tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert second.manifest.source == {"kind": "gguf", "sha256": digest}


def test_split_and_sharded_sources_give_the_same_weights(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "qwen2")
    whole = convert(source, tmp_path / "whole")
    arrays = tiny.state(tiny.config("qwen2"))
    shards: list[Arrays] = [dict(list(arrays.items())[i::3]) for i in range(3)]
    index = {}
    for i, shard in enumerate(shards):
        tiny.write_tensors(source / f"model-{i}.safetensors", shard)
        index |= {name: f"model-{i}.safetensors" for name in shard}
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    parts = convert(source, tmp_path / "parts")
    assert {k: v.tobytes() for k, v in whole.tensors.items()} == {
        k: v.tobytes() for k, v in parts.tensors.items()
    }


def test_a_split_gguf_gives_the_same_weights(tmp_path: Path) -> None:
    path, _ = gguf_file(tmp_path / "m.gguf", "Q4_0", tiny.config("llama", **WIDE))
    whole = convert(path, tmp_path / "whole")
    file = read_gguf(path)
    tensors = [
        (t.name, list(reversed(t.shape)), t.type_code, t.data.tobytes())
        for t in file.tensors.values()
    ]
    for i in range(2):
        infos, data = g.pack_tensors(tensors[i::2])
        keys = [
            ("split.no", g.u32(i)),
            ("split.count", g.u32(2)),
            ("split.tensors.count", g.u32(len(tensors))),
        ]
        if i == 0:
            tokens = file.metadata["tokenizer.ggml.tokens"]
            keys += g.llama_keys(tiny.config("llama", **WIDE), tokens)
        (tmp_path / f"s-{i + 1:05d}-of-00002.gguf").write_bytes(g.build(keys, infos, data))
    parts = convert(tmp_path / "s-00001-of-00002.gguf", tmp_path / "parts")
    assert {k: v.tobytes() for k, v in whole.tensors.items()} == {
        k: v.tobytes() for k, v in parts.tensors.items()
    }


PEAK = """
import resource, sys
from pathlib import Path
from headrace.artifact.convert import convert
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    """A source of 270 MB is converted in less than 150 MB over what Python takes."""
    source = tiny.write_checkpoint(tmp_path / "src", "llama", hidden_size=1024, vocab_size=60000)
    assert (source / "model.safetensors").stat().st_size > 240 << 20
    command = [sys.executable, "-c", PEAK, str(source), str(tmp_path / "out")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 150


# ---- variants and junk ---------------------------------------------------------------------------

VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sliding layers": ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    "sliding window": ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
    "window of a llama": ("llama", {"sliding_window": 128}, "a sliding window of 128"),
    "window as text": ("llama", {"sliding_window": "128"}, "a sliding window of '128'"),
    "not causal": ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "architectures"),
    "both directions": ("llama", {"architectures": ["LlamaBiModel"]}, "architectures"),
    "own code": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    "interleaved rotation": ("llama", {"rope_interleaved": True}, "rope_interleaved"),
    "tied as text": ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    "theta as text": ("llama", {"rope_theta": "10000"}, "rope_theta"),
    "theta beyond float": ("llama", {"rope_theta": 10**400}, "rope_theta"),
    "qwen3 without head_dim": ("qwen3", {"head_dim": None}, "head_dim"),
    "wider down": ("llama", {"intermediate_size": 128}, "is [112, 64]"),
    "model_type as list": ("llama", {"model_type": ["llama"]}, "model_type"),
    "hidden too large": ("llama", {"hidden_size": 2**40}, "hidden_size"),
    "dim no multiple of 32": ("llama", {"head_dim": 24}, "head_dim"),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_refused_with_the_place(tmp_path: Path, name: str) -> None:
    family, changes, cause = VARIANTS[name]
    source = tiny.write_checkpoint(tmp_path / "src", family)
    config = {**tiny.config(family), **changes}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out")
    assert cause in caught.value.message


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"sliding_window": None, "architectures": ["LlamaForCausalLM"]}),
        ("llama", {"sliding_window": 1024}),  # the context
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}),
        ("qwen3", {"sliding_window": None}),
    ],
)
def test_a_window_that_hides_nothing_is_accepted(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", family)
    (source / "config.json").write_text(json.dumps({**tiny.config(family), **changes}))
    assert convert(source, tmp_path / "out").manifest.config["context"] == 1024


def test_a_mistral_that_does_not_say_has_a_window(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "mistral", max_position_embeddings=8192)
    config = json.loads((source / "config.json").read_text())
    del config["sliding_window"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="sliding window of 4096"):
        convert(source, tmp_path / "out")


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("junk") / "src", "llama3")


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(sorted(tiny.config("llama3"))), value=JUNK)
def test_any_value_in_a_config_is_read_or_refused(
    checkpoint: Path, key: str, value: object
) -> None:
    text = json.dumps({**tiny.config("llama3"), key: value})
    (checkpoint / "config.json").write_text(text)
    try:
        open_source(checkpoint)
    except HeadraceError as error:
        assert error.exit_code == 2
        assert str(checkpoint) in error.message


KINDS = [g.u32(0), g.u32(2**32 - 1), g.f32(float("nan")), g.f32(-1.0), g.string(""), g.string("x" * 200), g.strings([]),
         g.array(4, 3, b"\1\0\0\0" * 3), g.value(7, b"\1"), g.value(12, b"\xff" * 8)]  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 18), kind=st.sampled_from(KINDS))
def test_any_value_in_a_gguf_is_read_or_refused(tmp_path: Path, at: int, kind: bytes) -> None:
    keys = g.llama_keys(tiny.config("llama"), ["a", "b", "<|c|>"])
    keys[at] = (keys[at][0], kind)
    path = tmp_path / "m.gguf"
    path.write_bytes(g.build(keys, [], b""))
    try:
        open_source(path)
    except HeadraceError as error:
        assert error.exit_code == 2
        assert str(path) in error.message


@pytest.mark.parametrize(
    "name", ["\ud800.safetensors", "a\0.safetensors", ".safetensors", "x/../y.safetensors"]
)
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    text = json.dumps({"weight_map": {"model.norm.weight": name}})
    (source / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FileError, match="plain file name"):
        convert(source, tmp_path / "out")


HEADERS: dict[str, bytes] = {
    "a list for a dtype": b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
    "a dimension of 300 digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 300 + b'],"data_offsets":[0,4]}}',
    "a number of a million digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "many arrays": b'{"a":[' + b"[]," * (MAX_CONTAINERS + 1) + b"[]]}",
    "quotes that never close": b'{"a":"' + b'\\"' * 1_000_000,
    "one name many times": b"{" + b",".join(b'"%d":1' % (i % 200_000) for i in range(200_001)) + b"}",
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_cost_more_than_they_weigh_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(HEADERS[name]).to_bytes(8, "little") + HEADERS[name] + b"1234")
    with pytest.raises(FileError) as caught:
        read_tensors(path)
    assert len(caught.value.message) < 600


def test_brackets_in_strings_are_not_nesting() -> None:
    raw = json.dumps({"a": "[" * 100 + '\\"' + "{" * 100, "b": [[1]]}).encode()
    assert parse_object(Path("x"), "x", raw)["b"] == [[1]]


@pytest.mark.parametrize("name", ["x.gguf", "x.safetensors"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    os.rename(tmp_path / name, tmp_path / ("model.safetensors" if name[2] == "s" else name))
    with pytest.raises(FileError, match="not a plain file"):
        convert(tmp_path if name[2] == "s" else tmp_path / name, tmp_path / "out")
