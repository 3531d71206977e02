"""Control-C during a real `headrace pull`: 130, nothing under the final name, and the next pull goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from headrace.artifact.registry import ModelEntry, lookup
from shell import Shell, default_sigint

NAME = "smollm2:135m"
PIECE = bytes(256 << 10)


class _Slow(BaseHTTPRequestHandler):
    """Lists the wheel, and sends zeros in its place slowly enough to be interrupted."""

    entry: ModelEntry
    ranges: list[str]

    def do_GET(self) -> None:
        if self.path.endswith("/"):
            page = {"files": [{"filename": self.entry.wheel, "url": "/file"}]}
            return self._send(200, json.dumps(page).encode(), {})
        asked = self.headers.get("Range", "")
        self.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-") or 0)
        total = self.entry.wheel_bytes
        said = {"Content-Range": f"bytes {start}-{total - 1}/{total}"} if start else {}
        self._send(206 if start else 200, b"", {"Content-Length": str(total - start), **said})
        for _ in range(400):
            self.wfile.write(PIECE)
            time.sleep(0.02)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """The client goes away: that is the test."""


@contextmanager
def slow_server(ranges: list[str]) -> Iterator[str]:
    handler = type("Handler", (_Slow,), {"entry": lookup(NAME), "ranges": ranges})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()


def pulled_until_interrupted(home: Path, index: str, more_than: int) -> tuple[int, bytes, int]:
    """Exit code, standard error and size of the partial file of a pull that Control-C ended."""
    shell = Shell(home)
    partial = home / "downloads" / f"{lookup(NAME).wheel}.partial"
    environment = {**shell.environment, "HEADRACE_INDEX": index, "NO_PROXY": "*"}
    process = subprocess.Popen(
        shell.command("pull", NAME), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=default_sigint,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not partial.exists() or partial.stat().st_size <= more_than:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    report = process.communicate(timeout=60)[1]
    return process.returncode, report, partial.stat().st_size


def test_control_c_ends_with_130_and_the_next_pull_goes_on(tmp_path: Path) -> None:
    ranges: list[str] = []
    with slow_server(ranges) as index:
        first, report, size = pulled_until_interrupted(tmp_path, index, 0)
        second, _, more = pulled_until_interrupted(tmp_path, index, size)
    assert (first, second) == (130, 130)
    assert b"Traceback" not in report
    assert ranges == ["", f"bytes={size}-"]
    assert more > size > 0
    left = {p.name for p in (tmp_path / "downloads").iterdir() if not p.name.startswith(".")}
    assert left == {f"{lookup(NAME).wheel}.partial"}
    assert not (tmp_path / "models").exists()
