"""The index page names the wheel's address; proxies and credentials go where they belong and are not shown."""

from __future__ import annotations

import base64
import json

import pytest

from headrace.artifact import index, web
from headrace.artifact.index import wheel_url
from headrace.errors import DownloadError
from pull.server import Behaviour, serving


@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize("slash", ["", "/"])
def test_the_wheel_is_found(html: bool, slash: str) -> None:
    with serving(Behaviour(b"", filename="pkg.whl", html=html)) as base:
        assert wheel_url(f"{base}/simple{slash}", "pkg", "pkg.whl") == f"{base}/files/pkg.whl"
        with pytest.raises(DownloadError, match=r"/simple/pkg/: lists no other\.whl"):
            wheel_url(f"{base}/simple{slash}", "pkg", "other.whl")


BAD_PAGES = {
    "no json": b'{"files": [',
    "no files": b"{}",
    "files of another kind": b'{"files": 3}',
    "a file without a name": b'{"files": [{"url": "x"}]}',
    "deep": b'{"files":' + b"[" * 100_000,
    "empty": b"",
    "bytes": bytes(range(256)),
    "text": b"<html><a>no address</a><a href>none</a>",
}


@pytest.mark.parametrize("name", BAD_PAGES)
def test_a_page_that_is_no_index_is_refused(name: str) -> None:
    with serving(Behaviour(b"", page=BAD_PAGES[name])) as base, pytest.raises(DownloadError):
        wheel_url(f"{base}/simple", "pkg", "pkg.whl")


@pytest.mark.parametrize(
    "link", ["file:///etc/passwd#/pkg.whl", "ftp://x/pkg.whl", "data:,pkg.whl", "http://[/pkg.whl"]
)
def test_an_address_that_is_none_of_the_web_is_refused(link: str) -> None:
    page = json.dumps({"files": [{"filename": "pkg.whl", "url": link}]}).encode()
    with serving(Behaviour(b"", page=page)) as base, pytest.raises(DownloadError):
        wheel_url(f"{base}/simple", "pkg", "pkg.whl")


def test_a_page_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_PAGE_BYTES", 1000)
    with (
        serving(Behaviour(b"", page=b"x" * 1001)) as base,
        pytest.raises(DownloadError, match="longer than 1,000"),
    ):
        wheel_url(f"{base}/simple", "pkg", "pkg.whl")


@pytest.mark.parametrize("status", [404, 503])
def test_an_error_status_is_named(status: int) -> None:
    with (
        serving(Behaviour(b"", page_status=status)) as base,
        pytest.raises(DownloadError, match=f"answered {status}"),
    ):
        wheel_url(f"{base}/simple", "pkg", "pkg.whl")


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://host.example/x", "http://[bad", "http://host.example:99999/"]
)
def test_an_index_that_is_no_web_address(url: str) -> None:
    with pytest.raises(DownloadError):
        wheel_url(url, "pkg", "pkg.whl")


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_credentials_of_the_index_are_sent_and_not_shown() -> None:
    behaviour = Behaviour(b"", filename="pkg.whl")
    with serving(behaviour) as base:
        private = base.replace("//", "//me:s%40cret@")
        url = wheel_url(f"{private}/simple", "pkg", "pkg.whl")
        assert url == f"{private}/files/pkg.whl"
        with pytest.raises(DownloadError) as caught:
            wheel_url(f"{private}/simple", "pkg", "other.whl")
    assert behaviour.headers[0]["authorization"] == basic("me:s@cret")
    assert "cret" not in caught.value.message


def test_credentials_do_not_go_to_another_host() -> None:
    page = json.dumps(
        {"files": [{"filename": "pkg.whl", "url": "https://files.example/pkg.whl"}]}
    ).encode()
    with serving(Behaviour(b"", page=page)) as base:
        private = base.replace("//", "//me:secret@")
        assert wheel_url(f"{private}/simple", "pkg", "pkg.whl") == "https://files.example/pkg.whl"


def test_a_redirect_to_another_host_takes_no_credentials_along() -> None:
    other = Behaviour(b"bytes")
    with serving(other) as target:
        elsewhere = target.replace("127.0.0.1", "localhost") + "/files/pkg.whl"
        with serving(Behaviour(b"", redirect_to=elsewhere)) as base:
            web.get_document(base.replace("//", "//me:secret@") + "/files/pkg.whl", "*/*", 100)
    assert "authorization" not in other.headers[0]


def test_the_systems_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = Behaviour(b"", filename="pkg.whl")
    with serving(behaviour) as base:
        monkeypatch.setenv("http_proxy", base.replace("//", "//me:secret@"))
        monkeypatch.setenv("no_proxy", "direct.example")
        assert (
            wheel_url("http://index.example/simple", "pkg", "pkg.whl")
            == "http://index.example/files/pkg.whl"
        )
    assert behaviour.headers[0]["host"] == "index.example"
    assert behaviour.headers[0]["proxy-authorization"] == basic("me:secret")
    assert "authorization" not in behaviour.headers[0]


def test_no_proxy_for_hosts_that_are_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Behaviour(b"", filename="pkg.whl")) as base:
        assert wheel_url(f"{base}/simple", "pkg", "pkg.whl") == f"{base}/files/pkg.whl"
