"""What killed processes leave: found by the process's number and its time of birth, removed by the next writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from artifact.test_convert import tree
from headrace import locate
from headrace.artifact.container import open_artifact
from headrace.artifact.convert import convert
from headrace.artifact.forecast import FORECAST_NAME
from headrace.artifact.unfinished import leftovers, replacing, working_name
from headrace.errors import DiskFullError

# Works in a child of its own, once for every change of the file system that it makes, and kills it just before
# that change. Prints how many there were. argv: what to do, its arguments.
KILLED_BEFORE_EVERY_CHANGE = """
import os, signal, sys
from pathlib import Path
from headrace.artifact.container import open_artifact
from headrace.artifact.convert import convert
from headrace.artifact.forecast import write_forecast
import numpy as np

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "shutil.rmtree"}
what, *paths = sys.argv[1:]
paths = [Path(p) for p in paths]

def work():
    if what == "convert":
        convert(paths[0], paths[1])
    else:
        artifact = open_artifact(paths[0])
        codes = np.ones((artifact.records[0].num_experts, 64), np.int16)
        write_forecast(artifact, {1: (codes, np.zeros(len(codes), np.int32))})

def watch(limit):
    seen = 0
    def hook(event, args):
        nonlocal seen
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            seen += 1
            if seen == limit:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

limit = 0
while True:
    limit += 1
    pid = os.fork()
    if not pid:
        watch(limit)
        work()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(limit, status, sep=" ", flush=True)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    sys.stdin.readline()
"""


def killed_before_every_change(after: Callable[[], None], *arguments: str | Path) -> int:
    """Do it, killed at every change of the file system; `after` each kill. Returns how many kills there were."""
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_BEFORE_EVERY_CHANGE, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    kills = 0
    for line in child.stdout:
        if line.split()[1] == "0":
            break
        kills += 1
        after()
        child.stdin.write("on\n")
        child.stdin.flush()
    child.stdin.close()
    assert child.wait() == 0
    return kills


@pytest.mark.parametrize("stands", [False, True])
def test_a_conversion_killed_before_any_change(tmp_path: Path, stands: bool) -> None:
    """Whenever it is killed, what has the artifact's name is whole, and the next one leaves nothing else."""
    source = tiny.write_checkpoint(tmp_path / "src", "mixtral")
    wanted = tree(convert(source, tmp_path / "wanted").path)
    folder = tmp_path / "models"
    folder.mkdir()
    target = folder / "out"
    if stands:
        convert(source, target)
    most = 0

    def after() -> None:
        nonlocal most
        most = max(most, len(list(folder.iterdir())))
        if target.exists():
            assert tree(target) == wanted
            open_artifact(target, verify=True)

    kills = killed_before_every_change(after, "convert", source, target)
    assert kills > 10
    assert most <= 3  # what stood, what was begun, what was moved away: nothing piles up
    assert [p.name for p in folder.iterdir()] == ["out"]
    assert tree(target) == wanted


def test_a_forecast_killed_before_any_change(tmp_path: Path) -> None:
    path = tiny.make(tmp_path / "mixtral", "mixtral").path
    own = {p.name for p in path.iterdir()}

    def after() -> None:
        assert len({p.name for p in path.iterdir()} - own - {FORECAST_NAME}) <= 1
        open_artifact(path, verify=True)

    assert killed_before_every_change(after, "forecast", path) >= 2
    assert {p.name for p in path.iterdir()} == own | {FORECAST_NAME}


def test_a_process_with_the_number_of_a_dead_one(tmp_path: Path) -> None:
    """Numbers come again, in a container after every start: the time of birth tells two processes apart."""
    mine = tmp_path / f"{working_name(tmp_path / 'x')}-abc"
    reused = tmp_path / f".x.partial-{os.getpid()}.1-abc"
    older = tmp_path / f".x.partial-{os.getpid()}-abc"  # as a version before this one named it
    for folder in (mine, reused, older):
        folder.mkdir()
    assert [left.path for left in leftovers(tmp_path)] == [reused]


def test_the_working_name_of_a_living_process_is_kept(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from headrace.artifact.unfinished import working_name;"
        "p = Path(sys.argv[1]); (p.parent / working_name(p)).touch(); print('made', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "file")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "made\n"
        assert list(leftovers(tmp_path)) == []
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert [left.target for left in leftovers(tmp_path)] == ["file"]
    with replacing(tmp_path / "file") as work:
        work.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_one_left_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leftover goes before the room is asked for: it may be what fills the disk."""
    left = tmp_path / ".out.partial-999999999-abc"
    left.mkdir()
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    monkeypatch.setattr(
        "headrace.artifact.room.free_bytes", lambda path: 0 if left.exists() else 1 << 40
    )
    convert(source, tmp_path / "out")
    monkeypatch.setattr("headrace.artifact.room.free_bytes", lambda path: 0)
    with pytest.raises(DiskFullError):
        convert(source, tmp_path / "out")


def test_the_cache_keeps_nothing_of_a_source_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that was killed, whose source then changed: its name never comes again."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    source = tiny.write_checkpoint(tmp_path / "src", "llama")
    first = locate.locate(source)
    stale = first.with_name(f".{first.name}.partial-999999999.5-abc")
    first.rename(stale)
    tiny.write_checkpoint(source, "llama", seed=1)
    second = locate.locate(source)
    assert [p.name for p in second.parent.iterdir()] == [second.name]
