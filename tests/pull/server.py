"""A web server that misbehaves on request: an index page and one file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Behaviour:
    """What the server does; `ranges` records the Range headers that it saw."""

    content: bytes
    filename: str = "file.whl"
    ignore_range: bool = False
    wrong_range: bool = False
    cut_at: int | None = None  # close the connection after this many bytes of a body
    status: int = 200
    extra: bytes = b""
    html: bool = False
    ranges: list[str] = field(default_factory=list)


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The base URL of a running server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/"):
                self._page()
            else:
                self._file()

        def _page(self) -> None:
            link = f"../../files/{behaviour.filename}"
            if behaviour.html:
                kind, body = "text/html", f'<a href="{link}#sha256=0">x</a>'
            else:
                kind = "application/vnd.pypi.simple.v1+json"
                body = json.dumps({"files": [{"filename": behaviour.filename, "url": link}]})
            self._answer(200, body.encode(), {"Content-Type": kind})

        def _file(self) -> None:
            asked = self.headers.get("Range")
            behaviour.ranges.append(asked or "")
            if behaviour.status != 200:
                return self._answer(behaviour.status, b"", {})
            if asked is None or behaviour.ignore_range:
                return self._answer(200, behaviour.content + behaviour.extra, {})
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            shown = start + 1 if behaviour.wrong_range else start
            size = len(behaviour.content)
            self._answer(206, behaviour.content[start:], {"Content-Range": f"bytes {shown}-{size - 1}/{size}"})

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if behaviour.cut_at is not None and self.path.startswith("/files"):
                self.wfile.write(body[: behaviour.cut_at])
                self.wfile.flush()
                self.connection.close()
            else:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
