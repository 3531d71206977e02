"""A web server that misbehaves on request: an index page and one file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

JSON = "application/vnd.pypi.simple.v1+json"


@dataclass
class Behaviour:
    """What the server does; `ranges` and `headers` record what it was sent for the file."""

    content: bytes
    filename: str = "file.whl"
    ignore_range: bool = False  # answers 200 and the whole file
    content_range: str | None = None  # says this instead of the true one
    etag: str | None = None
    cut_at: int | None = None  # close the connection after this many bytes of a body
    cuts: int = 1000  # how often it does so
    status: int = 200
    page_status: int = 200
    extra: bytes = b""
    page: bytes | None = None  # the index page's body, as it is
    html: bool = False
    redirect_to: str | None = None
    ranges: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def do_GET(self) -> None:
        self.behaviour.headers.append({k.lower(): v for k, v in self.headers.items()})
        if self.path.endswith("/"):
            self._page()
        else:
            self._file()

    def _page(self) -> None:
        own = self.behaviour
        link = f"../../files/{own.filename}"
        if own.html:
            kind, body = "text/html", f'<p><a href="{link}#sha256=0">x</a>'.encode()
        else:
            kind, body = (
                JSON,
                json.dumps({"files": [{"filename": own.filename, "url": link}]}).encode(),
            )
        self._answer(
            own.page_status, own.page if own.page is not None else body, {"Content-Type": kind}
        )

    def _file(self) -> None:
        own = self.behaviour
        asked = self.headers.get("Range")
        own.ranges.append(asked or "")
        if own.redirect_to is not None:
            return self._answer(302, b"", {"Location": own.redirect_to})
        if own.status != 200:
            return self._answer(own.status, b"", {})
        tags = {"ETag": own.etag} if own.etag else {}
        stale = self.headers.get("If-Range") not in (None, own.etag)
        if asked is None or own.ignore_range or stale:
            return self._answer(200, own.content + own.extra, tags)
        return self._rest(int(asked.removeprefix("bytes=").removesuffix("-")), tags)

    def _rest(self, start: int, tags: dict[str, str]) -> None:
        own, size = self.behaviour, len(self.behaviour.content)
        if start >= size:
            return self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
        shown = own.content_range or f"bytes {start}-{size - 1}/{size}"
        return self._answer(206, own.content[start:] + own.extra, {"Content-Range": shown, **tags})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        own = self.behaviour
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if own.cut_at is not None and own.cuts > 0 and not self.path.endswith("/"):
            own.cuts -= 1
            body, self.close_connection = body[: own.cut_at], True
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is what the tests do."""


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The base URL of a running server."""
    handler = type("Handler", (_Handler,), {"behaviour": behaviour})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
