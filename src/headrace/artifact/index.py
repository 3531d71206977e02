"""Finds a wheel on a simple package index (PEP 503 HTML or PEP 691 JSON)."""

from __future__ import annotations

import html.parser
import json
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from headrace.artifact.web import get_document, shown
from headrace.errors import DownloadError

MAX_PAGE_BYTES = 32 << 20
ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"


def wheel_url(index: str, package: str, filename: str) -> str:
    """Where the index says that the file lies. Raises DownloadError."""
    page = f"{index.rstrip('/')}/{package}/"
    body = get_document(page, ACCEPT, MAX_PAGE_BYTES)
    for name, link in _links(page, body):
        if name == filename:
            return _resolved(page, link)
    raise DownloadError(
        f"{shown(page)}: lists no {filename}", hint="HEADRACE_INDEX names another package index"
    )


def _resolved(page: str, link: str) -> str:
    try:
        url = urlsplit(urljoin(page, link))._replace(fragment="")
    except ValueError as error:
        raise DownloadError(f"{shown(page)}: {link!r:.120}: {error}") from None
    if url.scheme not in ("https", "http"):
        raise DownloadError(f"{shown(page)}: {link!r:.120} is no web address")
    if url.netloc == urlsplit(page).netloc.rpartition("@")[2]:
        url = url._replace(netloc=urlsplit(page).netloc)  # the index's credentials hold there too
    return urlunsplit(url)


def _links(page: str, body: bytes) -> list[tuple[str, str]]:
    """(file name, link) of every file that a page lists."""
    if body.lstrip()[:1] == b"{":
        try:
            return [(str(f["filename"]), str(f["url"])) for f in json.loads(body)["files"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DownloadError(f"{shown(page)}: is not a package index") from None
    parser = _Anchors()
    parser.feed(body.decode("utf-8", "replace"))
    return [(_filename(link), link) for link in parser.links]


def _filename(link: str) -> str:
    return unquote(link.split("#")[0].split("?")[0].rsplit("/", 1)[-1])


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [v for k, v in attrs if k == "href" and v]
