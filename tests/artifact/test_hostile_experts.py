"""Expert files of an artifact: opening looks at places alone, and refuses whatever is off by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from artifact.test_convert import edit_manifest
from headrace.artifact.container import open_artifact
from headrace.artifact.manifest import read_manifest
from headrace.artifact.tensorfile import TensorFileWriter, TensorSpec, read_tensors
from headrace.errors import FileError, HeadraceError

Float = NDArray[np.float64]
State = dict[str, NDArray[Any]]
EXPERTS = "experts-00001.safetensors"


def test_opening_maps_no_expert(tmp_path: Path) -> None:
    artifact = tiny.make(tmp_path / "a", "mixtral")
    assert not any(".experts" in name for name in artifact.tensors)
    assert EXPERTS not in Path("/proc/self/maps").read_text()
    for records in artifact.records:
        assert records.offset % 4096 == 0
        assert records.layout.nbytes % 4096 == 0


def reseal(path: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Make the manifest fit the files as they are, as whoever forges an artifact would."""
    import hashlib

    def fit(body: dict[str, Any]) -> None:
        for name in [n for n in body["files"] if not (path / n).exists()]:
            del body["files"][name]
        for name, entry in body["files"].items():
            raw = (path / name).read_bytes()
            entry |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        if change:
            change(body)
        rest = {k: v for k, v in body.items() if k != "identity"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        body["identity"] = hashlib.sha256(text.encode()).hexdigest()

    edit_manifest(path, fit)
    read_manifest(path / "manifest.json")


def rewrite(path: Path, tensors: State, alignment: int = 4096) -> None:
    specs = [TensorSpec(n, "U8", a.shape) for n, a in tensors.items()]
    with (path / EXPERTS).open("wb") as file:
        writer = TensorFileWriter(file, specs, alignment)
        for name, array in tensors.items():
            writer.write(name, array)


def stored(path: Path) -> State:
    return {k: v.data.copy() for k, v in read_tensors(path / EXPERTS).items()}


def _narrow(t: State) -> None:
    t["layers.1.experts"] = t["layers.1.experts"][:, :-4096]


def _extra(t: State) -> None:
    t["layers.0.experts"] = np.concatenate([t["layers.0.experts"]] * 2)[:9]


def _missing(t: State) -> None:
    del t["layers.1.experts"]


def _stranger(t: State) -> None:
    t["layers.7.experts"] = t["layers.1.experts"]


FORGED: dict[str, tuple[Callable[[State], None], str]] = {
    "another record size": (_narrow, r"layers\.1\.experts.*is U8\["),
    "an extra expert": (_extra, r"layers\.0\.experts.*is U8\[9, "),
    "a missing layer": (_missing, r"layers\.1\.experts.*is missing"),
    "a layer too many": (_stranger, r"layers\.7\.experts.*is not one of"),
}


@pytest.mark.parametrize("name", FORGED)
def test_hostile_expert_files_are_refused(tmp_path: Path, name: str) -> None:
    change, cause = FORGED[name]
    path = tiny.make(tmp_path / "a", "mixtral").path
    tensors = stored(path)
    change(tensors)
    rewrite(path, tensors)
    reseal(path)
    with pytest.raises(FileError, match=cause):
        open_artifact(path)


def test_misaligned_records_are_refused(tmp_path: Path) -> None:
    path = tiny.make(tmp_path / "a", "mixtral").path
    rewrite(path, stored(path), 64)
    reseal(path)
    with pytest.raises(FileError, match=r"layers\.0\.experts.*no multiple of 4096"):
        open_artifact(path)


def test_truncated_and_missing_expert_files_are_refused(tmp_path: Path) -> None:
    path = tiny.make(tmp_path / "a", "mixtral").path
    raw = (path / EXPERTS).read_bytes()
    (path / EXPERTS).write_bytes(raw[:-4096])
    with pytest.raises(FileError, match="size"):
        open_artifact(path)
    reseal(path)
    with pytest.raises(FileError, match=EXPERTS):
        open_artifact(path)
    (path / EXPERTS).unlink()
    with pytest.raises(FileError, match="missing"):
        open_artifact(path)
    reseal(path)
    with pytest.raises(FileError, match=r"layers\.0\.experts.*is missing"):
        open_artifact(path)


def test_dense_tensors_do_not_belong_in_expert_files(tmp_path: Path) -> None:
    path = tiny.make(tmp_path / "a", "mixtral").path
    rewrite(path, stored(path) | {"norm.gain": np.zeros(256, np.uint8)})
    reseal(path)
    with pytest.raises(FileError, match=r"norm\.gain"):
        open_artifact(path)


@pytest.mark.parametrize(("field", "row", "value"), [
    ("down.row", 0, 1 << 15), ("gate_up.row", 2, 15), ("down.scales", None, -32768), ("gate_up.mins", None, -32768),
])  # fmt: skip
def test_values_outside_their_ranges_are_refused_by_name(
    tmp_path: Path, field: str, row: int | None, value: int
) -> None:
    from headrace.artifact.records import record_fields

    artifact = tiny.make(tmp_path / "a", "qwen3_moe")
    tensors = stored(artifact.path)
    record = tensors["layers.1.experts"][11]
    target = dict(record_fields(record, artifact.records[1].layout))[field]
    (target if row is None else target[row]).flat[3] = value
    rewrite(artifact.path, tensors)
    reseal(artifact.path)
    open_artifact(artifact.path)  # experts are not read
    with pytest.raises(FileError, match=rf"layers\.1\.experts\.11\.{field.replace('.', '.')}"):
        open_artifact(artifact.path, verify=True)


@pytest.mark.parametrize(("key", "value", "cause"), [
    ("num_experts", 7, "router"), ("top_k", 9, "top_k"), ("ffn_size", 64, "gate_up"),
    ("shared_ffn_size", 64, "shared"), ("normalise", False, "normalise"), ("dense_layers", [0], "every layer"),
])  # fmt: skip
def test_a_forged_configuration_of_experts_is_refused(
    tmp_path: Path, key: str, value: object, cause: str
) -> None:
    path = tiny.make(tmp_path / "a", "mixtral").path
    reseal(path, lambda body: body["config"]["experts"].update({key: value}))
    with pytest.raises(HeadraceError, match=cause):
        open_artifact(path)
