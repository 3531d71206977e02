"""Which processes may be registered, and until when they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headrace.serve.failure import RequestError
from headrace.serve.process import clients
from headrace.serve.process.clients import MAX_PID, Clients, birth


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_counts_while_it_runs(child: subprocess.Popen[bytes]) -> None:
    registered = Clients()
    assert registered.register(child.pid) == 1
    assert registered.register(child.pid) == 1
    assert registered.register(os.getpid()) == 2
    child.kill()
    child.wait()
    assert registered.count() == 1


def test_a_process_that_nobody_waited_for_has_ended(child: subprocess.Popen[bytes]) -> None:
    registered = Clients()
    registered.register(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert registered.count() == 0
    assert birth(child.pid) is None


@pytest.mark.parametrize("pid", [0, -1, MAX_PID, MAX_PID + 1, 1 << 70])
def test_what_is_no_process_is_refused(pid: int) -> None:
    with pytest.raises(RequestError, match="no running process") as caught:
        Clients().register(pid)
    assert caught.value.status == 400


@pytest.mark.skipif(os.getuid() == 0, reason="root's processes are this user's")
def test_another_users_process_is_refused() -> None:
    with pytest.raises(RequestError):
        Clients().register(1)


def test_a_number_that_was_given_to_another_process_is_forgotten(
    child: subprocess.Popen[bytes],
) -> None:
    registered = Clients()
    registered.register(child.pid)
    registered._births[child.pid] = "0"  # as of an earlier process
    assert registered.count() == 0


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]) -> None:
    monkeypatch.setattr(clients, "MAX_CLIENTS", 1)
    registered = Clients()
    registered.register(child.pid)
    with pytest.raises(RequestError, match="more than 1"):
        registered.register(os.getpid())
    assert registered.register(child.pid) == 1
