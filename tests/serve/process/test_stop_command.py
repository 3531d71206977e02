"""`headrace stop`, and what `headrace run` says beside a server."""

from __future__ import annotations

import http.server
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.serve.process.lock import Holder, alone
from serve.process.running import Server, server
from shell import Shell


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "home")


def words(running: Server) -> str:
    return f"the headrace server of painted:1m (pid {running.process.pid}, port {running.port})"


def test_it_stops_a_server_and_waits_for_its_end(shell: Shell) -> None:
    with server(shell.home) as running:
        running.ready()
        done = shell.run("stop", "--port", str(running.port))
        assert running.process.poll() == 0
        assert (done.returncode, done.stdout.decode(), done.stderr) == (
            0,
            f"stopped {words(running)}\n",
            b"",
        )
        again = shell.run("stop", "--port", str(running.port))
        assert (again.returncode, again.stdout.decode()) == (
            0,
            f"no headrace server listens on port {running.port}\n",
        )


def test_it_stops_a_server_that_still_loads_and_one_with_a_key(shell: Shell) -> None:
    with server(shell.home, loading=60.0, api_key="secret", port=free_port()) as running:
        running.opening()
        done = shell.run("stop", "--port", str(running.given["port"]))
        assert done.returncode == 0
        assert running.ended() == 0


def test_another_port_is_left_alone_and_the_right_one_named(shell: Shell) -> None:
    with server(shell.home) as running:
        running.ready()
        done = shell.run("stop", "--port", str(free_port()))
        assert done.returncode == 0
        assert (
            done.stderr.decode()
            == f"hint: {words(running)} does: headrace stop --port {running.port}\n"
        )
        assert running.status()["stopping"] is False


def test_a_server_of_another_home_is_left_alone(shell: Shell, tmp_path: Path) -> None:
    with server(tmp_path / "other") as running:
        running.ready()
        done = shell.run("stop", "--port", str(running.port))
        assert done.returncode == 2
        assert f"(pid {running.process.pid}) is not of this home folder" in done.stderr.decode()
        assert running.status()["stopping"] is False


def test_what_only_says_that_it_is_a_headrace_server_gets_no_signal(shell: Shell) -> None:
    """It tells the number of this very process."""
    caught: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    try:
        told = b'{"server": "headrace", "pid": %d, "model": "x"}' % os.getpid()
        with listener(told) as port:
            assert shell.run("stop", "--port", str(port)).returncode == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == []


@pytest.mark.parametrize(
    "told", [b"", b"[]", b"hello", b"[" * 50_000, b'{"server": "other", "pid": 1}']
)
def test_something_else_on_the_port_is_no_headrace_server(shell: Shell, told: bytes) -> None:
    with listener(told) as port:
        done = shell.run("stop", "--port", str(port))
        assert (done.returncode, done.stdout.decode()) == (
            0,
            f"no headrace server listens on port {port}\n",
        )


def test_a_stale_lock_file_names_nobody(shell: Shell) -> None:
    with alone(shell.home, Holder(os.getpid(), 11999, "x")):
        left = (shell.home / "model.lock").read_text()
    (shell.home / "model.lock").write_text(left)
    done = shell.run("stop", "--port", "11999")
    assert (done.returncode, done.stdout) == (0, b"no headrace server listens on port 11999\n")


def test_run_is_refused_beside_a_server(
    shell: Shell, tiny_artifact: Callable[[str], Artifact]
) -> None:
    flags = ("run", tiny_artifact("llama").path, "--prompt", "x", "--greedy", "--max-tokens", "1")
    with server(shell.home) as running:
        running.ready()
        done = shell.run(*flags)
        assert done.returncode == 2
        assert done.stderr.decode() == (
            f"error: {words(running)} is running; one process of yours may have a model\n"
            f"hint: headrace stop --port {running.port} ends it\n"
        )
        running.signal()
        running.ended()
    assert shell.run(*flags).returncode == 0


def free_port() -> int:
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
    ) as one:
        return one.server_address[1]


@contextmanager
def listener(told: bytes) -> Iterator[int]:
    """The port of something that answers everything with these bytes."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        try:
            yield one.server_address[1]
        finally:
            one.shutdown()
            thread.join()
