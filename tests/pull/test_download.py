"""A download is pinned, resumable, never appended wrongly, never under its final name before it is right."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.artifact import download
from headrace.errors import DiskFullError, DownloadError
from pull.server import Behaviour, serving

CONTENT = bytes(range(256)) * 20000  # 5 MB: several chunks
HALF = len(CONTENT) // 2
TAG = '"v1"'


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fetch(base: str, target: Path, progress: Callable[[int, int], None] | None = None) -> None:
    say = progress or (lambda done, total: None)
    download.fetch_pinned(f"{base}/files/file.whl", target, len(CONTENT), sha(CONTENT), say)


def left(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def begun(path: Path, content: bytes, tag: str | None = None) -> Path:
    """A partial download; the path of the file that it shall become."""
    (path / "f.partial").write_bytes(content)
    if tag is not None:
        (path / "f.partial.etag").write_text(tag)
    return path / "f"


def test_a_download_arrives_with_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with serving(Behaviour(CONTENT, etag=TAG)) as base:
        fetch(base, tmp_path / "f", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert left(tmp_path) == ["f"]


def test_a_broken_connection_is_gone_on_with_at_once(tmp_path: Path) -> None:
    behaviour = Behaviour(CONTENT, cut_at=HALF, cuts=1, etag=TAG)
    with serving(behaviour) as base:
        fetch(base, tmp_path / "f")
    assert behaviour.ranges == ["", f"bytes={HALF}-"]
    assert behaviour.headers[-1]["if-range"] == TAG
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert left(tmp_path) == ["f"]


def test_a_connection_that_keeps_breaking_is_given_up_and_gone_on_with_later(
    tmp_path: Path,
) -> None:
    behaviour = Behaviour(CONTENT, cut_at=1000)
    with serving(behaviour) as base:
        with pytest.raises(DownloadError) as caught:
            fetch(base, tmp_path / "f")
        assert caught.value.hint == download.AGAIN
        assert left(tmp_path) == ["f.partial"]
        assert (tmp_path / "f.partial").read_bytes() == CONTENT[: 1000 * download.TRIES]
        behaviour.cut_at = None
        fetch(base, tmp_path / "f")
    assert behaviour.ranges[-1] == f"bytes={1000 * download.TRIES}-"
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_connection_that_brings_nothing_is_not_tried_forever(tmp_path: Path) -> None:
    behaviour = Behaviour(CONTENT, cut_at=0)
    with serving(behaviour) as base, pytest.raises(DownloadError):
        fetch(base, tmp_path / "f")
    assert len(behaviour.ranges) == 1


def test_a_server_that_ignores_the_range_is_not_appended(tmp_path: Path) -> None:
    behaviour = Behaviour(CONTENT, ignore_range=True)
    target = begun(tmp_path, CONTENT[:HALF])
    with serving(behaviour) as base:
        fetch(base, target)
    assert behaviour.ranges == [f"bytes={HALF}-"]
    assert target.read_bytes() == CONTENT


def test_another_version_of_the_file_is_not_appended(tmp_path: Path) -> None:
    """If-Range makes a server send the whole new version."""
    target = begun(tmp_path, b"old" * 1000, '"v0"')
    behaviour = Behaviour(CONTENT, etag=TAG)
    with serving(behaviour) as base:
        fetch(base, target)
    assert behaviour.headers[0]["if-range"] == '"v0"'
    assert len(behaviour.ranges) == 1
    assert target.read_bytes() == CONTENT


def test_a_weak_tag_is_never_sent_as_if_range(tmp_path: Path) -> None:
    behaviour = Behaviour(CONTENT, etag='W/"v1"', cut_at=HALF, cuts=1)
    with serving(behaviour) as base:
        fetch(base, tmp_path / "f")
    assert "if-range" not in behaviour.headers[-1]
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "said",
    [f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}", f"bytes {HALF}-{len(CONTENT)}/{len(CONTENT) + 1}", "nonsense"],
)  # fmt: skip
def test_another_range_than_asked_for_is_refused(tmp_path: Path, said: str) -> None:
    target = begun(tmp_path, CONTENT[:HALF])
    with (
        serving(Behaviour(CONTENT, content_range=said)) as base,
        pytest.raises(DownloadError, match="answered 206"),
    ):
        fetch(base, target)
    assert (tmp_path / "f.partial").read_bytes() == CONTENT[:HALF]
    with serving(Behaviour(CONTENT)) as base:
        fetch(base, target)
    assert target.read_bytes() == CONTENT


def test_a_range_the_server_does_not_have_is_begun_anew(tmp_path: Path) -> None:
    """A file that is shorter on the server: what is here is of another file."""
    target = begun(tmp_path, CONTENT[:HALF])
    with (
        serving(Behaviour(CONTENT[:1000])) as base,
        pytest.raises(DownloadError, match="answered 416"),
    ):
        fetch(base, target)
    assert left(tmp_path) == []


def test_a_partial_file_of_other_bytes_is_found_out(tmp_path: Path) -> None:
    target = begun(tmp_path, b"x" * 1000)
    with serving(Behaviour(CONTENT)) as base:
        with pytest.raises(DownloadError, match="registry pins"):
            fetch(base, target)
        assert left(tmp_path) == []
        fetch(base, target)
    assert target.read_bytes() == CONTENT


def test_a_partial_file_longer_than_pinned_is_dropped(tmp_path: Path) -> None:
    target = begun(tmp_path, CONTENT + b"!")
    behaviour = Behaviour(CONTENT)
    with serving(behaviour) as base:
        fetch(base, target)
    assert behaviour.ranges == [""]
    assert target.read_bytes() == CONTENT


def test_a_whole_partial_file_asks_no_server(tmp_path: Path) -> None:
    target = begun(tmp_path, CONTENT)
    fetch("http://127.0.0.1:9", target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:-1] + b"\x00"])
def test_other_bytes_of_the_right_size_never_get_the_name(tmp_path: Path, content: bytes) -> None:
    with serving(Behaviour(content)) as base, pytest.raises(DownloadError, match="registry pins"):
        fetch(base, tmp_path / "f")
    assert left(tmp_path) == []


def test_a_shorter_file_never_gets_the_name(tmp_path: Path) -> None:
    with serving(Behaviour(CONTENT[:-1])) as base, pytest.raises(DownloadError):
        fetch(base, tmp_path / "f")
    assert "f" not in left(tmp_path)


@pytest.mark.parametrize("have", [0, HALF])
def test_more_bytes_than_pinned_are_cut_off(tmp_path: Path, have: int) -> None:
    target = begun(tmp_path, CONTENT[:have])
    with (
        serving(Behaviour(CONTENT, extra=b"!" * 100)) as base,
        pytest.raises(DownloadError, match="more than"),
    ):
        fetch(base, target)
    assert left(tmp_path) == []


def test_control_c_propagates_and_keeps_the_partial(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > 1_000_000:
            raise KeyboardInterrupt

    behaviour = Behaviour(CONTENT)
    with serving(behaviour) as base:
        with pytest.raises(KeyboardInterrupt):
            fetch(base, tmp_path / "f", interrupt)
        have = (tmp_path / "f.partial").stat().st_size
        assert left(tmp_path) == ["f.partial"]
        assert have > 1_000_000
        fetch(base, tmp_path / "f")
    assert behaviour.ranges == ["", f"bytes={have}-"]
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_disk_that_fills_up_says_how_much_is_needed(tmp_path: Path) -> None:
    def full(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    (tmp_path / "other").write_bytes(b"before")
    with (
        serving(Behaviour(CONTENT)) as base,
        pytest.raises(DiskFullError, match=f"needs {len(CONTENT):,} bytes"),
    ):
        fetch(base, tmp_path / "f", full)
    assert left(tmp_path) == ["f.partial", "other"]
    assert (tmp_path / "other").read_bytes() == b"before"


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_an_error_status_is_named_and_keeps_what_came(tmp_path: Path, status: int) -> None:
    target = begun(tmp_path, CONTENT[:HALF])
    with (
        serving(Behaviour(CONTENT, status=status)) as base,
        pytest.raises(DownloadError, match=str(status)),
    ):
        fetch(base, target)
    assert (tmp_path / "f.partial").read_bytes() == CONTENT[:HALF]


def test_a_redirect_is_followed_and_one_without_end_is_not(tmp_path: Path) -> None:
    behaviour = Behaviour(CONTENT)
    with (
        serving(behaviour) as base,
        serving(Behaviour(b"", redirect_to=f"{base}/files/file.whl")) as first,
    ):
        fetch(first, tmp_path / "f")
        behaviour.redirect_to = f"{base}/files/file.whl"
        with pytest.raises(DownloadError):
            fetch(base, tmp_path / "g")
    assert left(tmp_path) == ["f"]


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"http://127\.0\.0\.1:9/files/file\.whl: "):
        fetch("http://127.0.0.1:9", tmp_path / "f")
    assert left(tmp_path) == []
