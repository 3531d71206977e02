"""A changed file of an artifact is never used; an unchanged one is not hashed at every opening."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import open_artifact
from headrace.artifact.manifest import FileEntry
from headrace.artifact.verified import FOLDER, Record, facts, hashed_facts
from headrace.errors import FileError

DATA = "dense-00001.safetensors"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def path(tmp_path: Path, home: Path) -> Path:
    """An artifact whose record is kept: its files are older than a tick of the clock."""
    path = tiny.make(tmp_path / "a").path
    time.sleep(0.2)
    open_artifact(path)
    assert list((home / FOLDER).iterdir())
    return path


def flip(path: Path, at: int = -1) -> None:
    """Change a bit in place; size and time of writing stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", [DATA, "tokenizer.json", "chat_template.jinja"])
def test_a_flipped_bit_is_caught_at_the_next_opening(path: Path, name: str) -> None:
    flip(path / name)
    for _ in range(2):  # and is not forgotten
        with pytest.raises(FileError, match="sha256"):
            open_artifact(path)
    flip(path / name)
    open_artifact(path)


def test_a_bit_of_an_expert_is_caught(path: Path) -> None:
    """Files of experts are hashed as the others are, and past the page cache."""
    manifest, name = open_artifact(path).manifest, "experts-00001.safetensors"
    data = bytes(3 << 20)
    entry = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    with_experts = replace(manifest, files={**manifest.files, name: entry})
    (path / "manifest.json").write_bytes(with_experts.to_bytes())
    (path / name).write_bytes(data)
    assert hashed_facts(path / name, release=True)[0] == entry.sha256
    flip(path / name, 2 << 20)
    with pytest.raises(FileError, match=rf"{name}: sha256"):
        open_artifact(path)


def test_a_copy_with_a_flipped_bit_is_caught(path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(path, tmp_path / "copy")
    flip(copy / DATA)
    with pytest.raises(FileError, match="sha256"):
        open_artifact(copy)


def test_what_the_record_holds_is_not_hashed_again_unless_asked(path: Path, home: Path) -> None:
    """Seen by a record that is made to know a changed file."""
    flip(path / DATA, 5000)  # a code: any byte is one
    (record,) = (home / FOLDER).iterdir()
    known = json.loads(record.read_text())
    known[DATA][1:] = facts((path / DATA).stat())
    record.write_text(json.dumps(known))
    open_artifact(path)
    with pytest.raises(FileError, match="sha256"):
        open_artifact(path, verify=True)


def test_renaming_an_artifact_keeps_what_is_known(path: Path, tmp_path: Path) -> None:
    identity = open_artifact(path).identity
    sha256 = open_artifact(path).manifest.files[DATA].sha256
    path.rename(tmp_path / "renamed")
    assert Record(tmp_path / "renamed", identity).holds(tmp_path / "renamed" / DATA, sha256)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"dense-00001.safetensors": 5}'])
def test_a_broken_record_knows_nothing(path: Path, home: Path, content: bytes) -> None:
    (record,) = (home / FOLDER).iterdir()
    record.write_bytes(content)
    flip(path / DATA)
    with pytest.raises(FileError, match="sha256"):
        open_artifact(path)


def test_a_home_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.make(tmp_path / "a").path
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file" / "home"))
    open_artifact(path)
    flip(path / DATA)
    with pytest.raises(FileError, match="sha256"):
        open_artifact(path)


def test_a_file_that_was_just_written_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    assert hashed_facts(tmp_path / "f")[1] is None
