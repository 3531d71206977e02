"""Schemas that an artifact carries: what is read is what was stored for this artifact, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.schemas import (
    MAX_SCHEMAS,
    SCHEMAS_NAME,
    find_schema,
    read_schemas,
    write_schemas,
)
from headrace.errors import FileError, InputError

TEXT = '{"type": "integer", "title": "é"}'


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return tiny.make(tmp_path / "model")


def test_what_was_stored_is_read(artifact: Artifact) -> None:
    assert read_schemas(artifact) == {}
    write_schemas(artifact, {"one": TEXT, "a.b-c_2": "{}"})
    again = open_artifact(artifact.path, verify=True)
    assert read_schemas(again) == {"one": TEXT, "a.b-c_2": "{}"}
    assert again.identity == artifact.identity
    assert find_schema(again, "one") == TEXT
    write_schemas(artifact, {})
    assert not (artifact.path / SCHEMAS_NAME).exists()


def test_a_name_that_is_not_there(artifact: Artifact) -> None:
    write_schemas(artifact, {"one": TEXT})
    with pytest.raises(InputError, match="it has: one"):
        find_schema(artifact, "two")


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a b", "x" * 65, "é"])
def test_bad_names(artifact: Artifact, name: str) -> None:
    with pytest.raises(InputError):
        write_schemas(artifact, {name: TEXT})
    assert not (artifact.path / SCHEMAS_NAME).exists()


def test_too_many(artifact: Artifact) -> None:
    with pytest.raises(InputError):
        write_schemas(artifact, {f"s{i}": "{}" for i in range(MAX_SCHEMAS + 1)})


def test_another_artifacts_are_refused(
    artifact: Artifact, tiny_artifact: Callable[[str], Artifact]
) -> None:
    write_schemas(artifact, {"one": TEXT})
    other = tiny_artifact("qwen2")
    target = other.path / SCHEMAS_NAME
    target.write_bytes((artifact.path / SCHEMAS_NAME).read_bytes())
    try:
        with pytest.raises(FileError, match="another artifact"):
            read_schemas(other)
    finally:
        target.unlink()


DAMAGES: list[Callable[[dict[str, object]], object]] = [
    lambda d: d.update(version=2),
    lambda d: d.update(schemas=[]),
    lambda d: d.update(more=1),
    lambda d: d.update(schemas={"a/b": {"text": "{}", "sha256": ""}}),
    lambda d: d.update(schemas={"a": {"text": "{}", "sha256": "0" * 64}}),
    lambda d: d.update(schemas={"a": {"text": 5, "sha256": "0" * 64}}),
    lambda d: d.update(schemas={"a": "{}"}),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damage_is_refused(artifact: Artifact, number: int) -> None:
    write_schemas(artifact, {"one": TEXT})
    path = artifact.path / SCHEMAS_NAME
    value = json.loads(path.read_text("utf-8"))
    DAMAGES[number](value)
    path.write_text(json.dumps(value), "utf-8")
    with pytest.raises(FileError, match=SCHEMAS_NAME):
        read_schemas(artifact)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 10_000])
def test_what_is_no_json_is_refused(artifact: Artifact, raw: bytes) -> None:
    (artifact.path / SCHEMAS_NAME).write_bytes(raw)
    with pytest.raises(FileError):
        read_schemas(artifact)
