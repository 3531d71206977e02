"""Real server processes: how they start, what they tell, and how they end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.serve.process.lock import beside, holder
from serve.pages import Example, examples
from serve.process.running import Server, server

SECRET = "whisper"


def ask(script: str, **more: object) -> dict[str, object]:
    return {"text": f"{script} {SECRET}", **more}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("shared")) as running:
        yield running.ready()


def test_the_status(tmp_path: Path) -> None:
    with server(tmp_path, idle_exit=30) as running:
        told = running.ready().status()
        assert abs(told.pop("started_at") - time.time()) < 60
        assert told == {
            "server": "headrace", "version": "1.2.3", "pid": running.process.pid, "port": running.port,
            "model": "painted:1m", "context_window": 8192, "active_requests": 0, "clients": 0, "idle_seconds": 0,
            "idle_exit_minutes": 30, "stopping": False, "memory_source": "auto", "memory_target_gb": None,
            "memory_limit_gb": None,
        }  # fmt: skip
        with running.asked("POST", "/plain/ask", ask("slow", stream=True)) as answer:
            assert answer.line() == {"text": "answer"}
            assert running.status()["active_requests"] == 1


@pytest.mark.parametrize("body", [{}, {"pid": 0}, {"pid": -5}, {"pid": "1"}, {"pid": True}, {"pid": 1 << 40}, {"pid": None}, {"pid": 2**31 - 1}, {"pid": 1, "more": 1}])  # fmt: skip
def test_clients_that_are_refused(shared: Server, body: dict[str, object]) -> None:
    code, told = shared.ask("POST", "/headrace/clients", body)
    assert code == 400
    assert set(told) == {"error"}
    assert shared.status()["clients"] == 0


def test_a_registered_process_is_counted_until_it_ends(tmp_path: Path) -> None:
    with server(tmp_path) as running, subprocess.Popen(["sleep", "60"]) as agent:
        running.ready()
        assert running.ask("POST", "/headrace/clients", {"pid": agent.pid}) == (200, {"clients": 1})
        assert running.status()["clients"] == 1
        agent.kill()
        agent.wait()
        assert running.status()["clients"] == 0


# ---- how it ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: int, code: int) -> None:
    """What runs and what waits fails, whole and streamed; the backend is closed, the lock is free."""
    with server(tmp_path) as running:
        running.ready()
        found = holder(tmp_path)
        assert found is not None
        assert (found.pid, found.port) == (running.process.pid, running.port)
        with (
            running.asked("POST", "/plain/ask", ask("slow", stream=True)) as streamed,
            running.asked("POST", "/plain/ask", ask("slow")) as whole,
            running.asked("POST", "/plain/ask", ask("queued")) as queued,
        ):
            assert streamed.line() == {"text": "answer"}
            while running.status()["active_requests"] < 3:
                time.sleep(0.01)
            running.signal(number)
            assert streamed.line() == {"failed": "server_stopping"}
            assert streamed.read() == ""
            for answer in (whole, queued):
                assert answer.status == 503
                assert answer.read() == {
                    "wrong": "the server is stopping",
                    "code": "server_stopping",
                }
        assert running.ended() == code
        assert running.process.stdout is not None
        assert running.process.stdout.read() == "opening\nclosed\n"
        assert running.lines[-1].endswith(f"stopped by {signal.Signals(number).name}")
        assert holder(tmp_path) is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", running.port))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_it_loads(tmp_path: Path, number: int, code: int) -> None:
    with server(tmp_path, loading=60.0) as running:
        running.opening()
        assert holder(tmp_path) is not None
        running.signal(number)
        assert running.ended() == code
        assert [line.partition(" ")[2] for line in running.lines] == [
            f"stopped by {signal.Signals(number).name}"
        ]
        assert holder(tmp_path) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path: Path, number: int) -> None:
    with server(tmp_path, closing=60.0) as running:
        running.ready().signal()
        assert running.process.stdout is not None
        assert [running.process.stdout.readline() for _ in range(2)] == ["opening\n", "closing\n"]
        running.signal(number)
        assert running.ended() == 128 + number
        assert holder(tmp_path) is None


def test_an_ignored_control_c_stays_ignored(tmp_path: Path) -> None:
    with server(tmp_path, ignoring=True) as running:
        running.ready().signal(signal.SIGINT)
        assert running.ask("POST", "/plain/ask", ask("quick")) == (200, {"text": "answer"})
        running.signal()
        assert running.ended() == 0


def test_a_client_that_takes_nothing_does_not_hold_it(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        running.ready()
        with (
            socket.create_connection(("127.0.0.1", running.port)) as idle,
            running.asked("POST", "/plain/ask", ask("flood", stream=True)) as answer,
        ):
            assert answer.status == 200
            idle.sendall(
                b"POST /plain/ask HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            )
            running.signal()
            assert running.ended() == 0


# ---- idle exit -------------------------------------------------------------------------------------


def test_an_idle_server_ends_and_says_why(tmp_path: Path) -> None:
    with server(tmp_path, idle_exit=0.01) as running:
        running.ready()
        assert running.ended() == 0
        assert running.lines[-1].endswith(
            "stopping: no request and no registered process for 0.01 minutes"
        )
        assert holder(tmp_path) is None


def test_looking_does_not_keep_it(tmp_path: Path) -> None:
    with server(tmp_path, idle_exit=0.01) as running:
        running.ready()
        while running.process.poll() is None:
            for path in ("/headrace/status", "/metrics", "/health"):
                try:
                    running.ask("GET", path)
                except OSError:
                    break
            time.sleep(0.05)
        assert running.ended() == 0


def test_a_request_and_a_process_keep_it(tmp_path: Path) -> None:
    with server(tmp_path, idle_exit=0.01) as running, subprocess.Popen(["sleep", "60"]) as agent:
        with running.ready().asked("POST", "/plain/ask", ask("slow", stream=True)) as answer:
            assert answer.line() == {"text": "answer"}
            time.sleep(1.5)
            assert running.status()["idle_seconds"] == 0
            assert running.ask("POST", "/headrace/clients", {"pid": agent.pid}) == (
                200,
                {"clients": 1},
            )
        time.sleep(1.5)
        assert running.status()["clients"] == 1
        agent.kill()
        agent.wait()
        assert running.ended() == 0


# ---- one of a kind ---------------------------------------------------------------------------------


def test_a_port_that_a_headrace_server_has(tmp_path: Path) -> None:
    """Of another home, so that it is not the lock that names it; and of one that still loads."""
    with server(tmp_path / "one") as one:
        one.ready()
        with server(tmp_path / "two", port=one.port) as other:
            assert other.ended() == 2
            assert other.lines == [
                f"error: port {one.port} of 127.0.0.1 is in use by the headrace server of painted:1m "
                f"(pid {one.process.pid}) (give another --port, or end it: headrace stop --port {one.port})"
            ]


def test_a_port_that_something_else_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with server(tmp_path, port=port) as running:
            assert running.ended() == 2
            assert running.lines == [
                f"error: port {port} of 127.0.0.1 is in use (give another --port)"
            ]
            assert running.process.stdout is not None
            assert running.process.stdout.read() == ""


def test_a_second_server_of_a_user(tmp_path: Path) -> None:
    with server(tmp_path, loading=60.0) as one:
        one.opening()
        found = holder(tmp_path)
        with server(tmp_path) as other:
            assert other.ended() == 2
            assert other.lines == [
                f"error: the headrace server of painted:1m (pid {one.process.pid}, port {found.port if found else 0}) is "
                f"running; one process of yours may have a model (headrace stop --port {found.port if found else 0} ends it)"
            ]


def test_a_server_beside_a_command(tmp_path: Path) -> None:
    with beside(tmp_path), server(tmp_path) as running:
        assert running.ended() == 2
        assert "another headrace command of yours has a model loaded" in running.lines[0]


def test_beyond_loopback_a_key_is_needed(tmp_path: Path) -> None:
    with server(tmp_path, host="0.0.0.0") as running:
        assert running.ended() == 2
        assert "is beyond loopback and no API key is set" in running.lines[0]


# ---- log and metrics -------------------------------------------------------------------------------


def test_a_request_is_one_line_of_json_without_its_text(tmp_path: Path) -> None:
    with server(tmp_path, log_json=True) as running:
        running.ready()
        running.ask("POST", "/plain/ask", ask("quick"))
        running.ask("POST", "/plain/ask", ask("failing"))
        running.ask("POST", "/plain/ask", {"text": 5, SECRET: 1})
        running.ask("GET", "/nowhere")
        running.ask("GET", "/plain/model")
        running.status()
        running.signal()
        assert running.ended() == 0
    lines = [json.loads(line) for line in running.lines]
    assert SECRET not in "".join(running.lines)
    told = [line for line in lines if line["message"] == "request"]
    for line in told:
        for name in ("time", "level", "message", "seconds", "queued", "prefill", "decode"):
            line.pop(name, None)
        line["id"] = len(line.get("id", ""))
    whole = {"dialect": "plain", "endpoint": "/plain/ask", "id": 32, "model": "painted:1m", "prompt_tokens": 10, "cached_tokens": 4}  # fmt: skip
    assert told == [
        {**whole, "status": 200, "new_tokens": 5, "reasoning_tokens": 0, "finish": "stop"},
        {**whole, "status": 500, "new_tokens": 1, "error": "inference_error"},
        {
            "dialect": "plain",
            "endpoint": "/plain/ask",
            "id": 32,
            "status": 400,
            "error": "invalid_request",
        },
        {"dialect": "server", "endpoint": "unknown", "id": 32, "status": 404, "error": "not_found"},
        {"dialect": "plain", "endpoint": "/plain/model", "id": 32, "status": 200},
    ]


def test_the_log_has_the_id_that_the_answer_has(tmp_path: Path) -> None:
    ids = []
    with server(tmp_path, log_json=True) as running:
        running.ready()
        for path in ("/plain/model", "/nowhere"):
            with running.asked("GET", path) as answer:
                ids.append(answer.response.getheader("x-request-id"))
        running.signal()
        assert running.ended() == 0
    lines = [json.loads(line) for line in running.lines]
    assert [line["id"] for line in lines if line["message"] == "request"] == ids


def test_a_client_that_left_is_told(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        with running.ready().asked("POST", "/plain/ask", ask("queued")):
            while running.status()["active_requests"] < 1:
                time.sleep(0.01)
        assert "error=client_gone" in running.line("request")
        assert running.status()["active_requests"] == 0


@pytest.mark.parametrize("example", examples("serve.md", "sh"), ids=lambda e: e.name)
def test_curl_prints_what_the_page_says(example: Example, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with server(tmp_path, idle_exit=30) as running:
        code = example.at(f"http://127.0.0.1:{running.ready().port}")
        done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        example.check(done.stdout)


def test_metrics(tmp_path: Path) -> None:
    with server(tmp_path) as running:
        running.ready().ask("POST", "/plain/ask", ask("quick"))
        with running.asked("GET", "/metrics") as answer:
            kind = answer.response.getheader("content-type") or ""
            assert kind.startswith("text/plain; version=")
            told = answer.read()
        assert (
            'headrace_requests_total{dialect="plain",endpoint="/plain/ask",status="200"} 1.0'
            in told
        )
        assert 'headrace_prefix_cache_bytes{tier="memory"} 64.0' in told
        assert "headrace_generations_running 2.0" in told
