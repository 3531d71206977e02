"""One model process a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.serve.process import lock
from headrace.serve.process.lock import Holder, ModelBusyError, alone, beside, holder

WHO = Holder(os.getpid(), 11434, "painted:1m")
SERVER = """
import os, sys
from pathlib import Path
from headrace.serve.process.lock import Holder, alone
with alone(Path(sys.argv[1]), Holder(os.getpid(), 5, "x")):
    print("held", flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.1)


def test_a_server_is_alone_and_named(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    with alone(tmp_path, WHO):
        assert holder(tmp_path) == WHO
        with pytest.raises(ModelBusyError) as caught, alone(tmp_path, Holder(1, 2, "other")):
            pass
        assert caught.value.message == (
            f"the headrace server of painted:1m (pid {os.getpid()}, port 11434) is running; "
            "one process of yours may have a model"
        )
        assert caught.value.hint == "headrace stop --port 11434 ends it"
        assert caught.value.exit_code == 2
        assert holder(tmp_path) == WHO
    assert holder(tmp_path) is None
    with alone(tmp_path, WHO):
        pass


def test_commands_run_beside_each_other_and_not_beside_a_server(tmp_path: Path) -> None:
    with beside(tmp_path), beside(tmp_path):
        assert holder(tmp_path) is None
        with pytest.raises(ModelBusyError, match="another headrace command"), alone(tmp_path, WHO):
            pass
    with alone(tmp_path, WHO), pytest.raises(ModelBusyError, match="painted:1m"), beside(tmp_path):
        pass


def test_a_command_needs_no_home_and_makes_none(tmp_path: Path) -> None:
    with beside(tmp_path / "none"):
        pass
    assert not (tmp_path / "none").exists()


def test_a_server_makes_the_home(tmp_path: Path) -> None:
    with alone(tmp_path / "a" / "b", WHO):
        assert ((tmp_path / "a" / "b" / lock.LOCK).stat().st_mode & 0o777) == 0o600


def test_a_killed_server_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert holder(tmp_path) == Holder(process.pid, 5, "x")
        process.kill()
        process.wait()
        assert json.loads((tmp_path / lock.LOCK).read_text())["pid"] == process.pid
        assert holder(tmp_path) is None
        with beside(tmp_path):
            pass


@pytest.mark.parametrize(
    "data",
    ["", "{", "[]", "null", '{"pid": 1}', '{"pid": "1", "port": 2, "model": "x"}', '{"pid": -1, "port": 2, "model": "x"}',
     '{"pid": true, "port": 2, "model": "x"}', '{"pid": 1, "port": 2, "model": "x", "more": 1}', "[" * 100_000],
)  # fmt: skip
def test_a_lock_file_with_anything_in_it_names_nobody(tmp_path: Path, data: str) -> None:
    with alone(tmp_path, WHO):
        (tmp_path / lock.LOCK).write_text(data)
        assert holder(tmp_path) is None
        with pytest.raises(ModelBusyError), beside(tmp_path):
            pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / lock.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), alone(tmp_path, WHO):
        pass
    with beside(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
