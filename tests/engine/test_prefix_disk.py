"""Prefixes on disk: the answers of a cold start in every process, whatever happened to the files in between."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.artifact.container import Artifact
from headrace.engine import prefix_disk, prefix_segment
from headrace.engine.engine import Engine
from headrace.engine.prefix_disk import DiskOptions, PrefixDirectoryBusyError, PrefixDisk
from headrace.engine.prefix_segment import DamagedSegmentError, InaccessibleSegmentError
from headrace.errors import DiskFullError, FileError, SettingError
from headrace.values import SamplingParams

Get = Callable[[str], Artifact]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=8)
PAGE = 18432  # bytes of a page of the tiny llama
BINDING = prefix_disk.Binding(bytes(32), b"b" * 32, 64)


@contextmanager
def opened(artifact: Artifact, directory: Path, **options: float) -> Iterator[Engine]:
    """A process that has just begun: an empty memory, the directory as it is."""
    with Engine(artifact, threads=1, max_context=320, num_sequences=2) as engine:
        engine.attach_disk(PrefixDisk(DiskOptions(directory, **{"min_tokens": 10, **options})))  # type: ignore[arg-type]
        engine.end_tokens = frozenset()
        yield engine


def run(engine: Engine, prompt: list[int], reuse: bool = True) -> tuple[int, list[int], str]:
    """Tokens reused, tokens answered, fingerprint."""
    tokens = [t.id for t in engine.generate(prompt, PARAMS, reuse=reuse)]
    assert engine.stats is not None
    return engine.stats.reused_tokens, tokens, engine.stats.fingerprint


def files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.suffix == prefix_segment.SUFFIX)


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 127, 128, 129, 150])
def test_a_new_process_goes_on_where_the_last_ended(
    tiny_artifact: Get, tmp_path: Path, length: int
) -> None:
    artifact = tiny_artifact("llama")
    with opened(artifact, tmp_path) as engine:
        answer = run(engine, PROMPT[:length])
    for following in (PROMPT[:length], [*PROMPT[:length], *answer[1], 5, 6]):
        with opened(artifact, tmp_path) as engine:
            reused, tokens, fingerprint = run(engine, following)
            assert reused == min(len(following) - 1, length + len(answer[1]) - 1)
            assert (tokens, fingerprint) == run(engine, following, reuse=False)[1:]


def test_every_length_of_what_is_on_disk(tiny_artifact: Get, tmp_path: Path) -> None:
    artifact = tiny_artifact("qwen3")
    with opened(artifact, tmp_path) as engine:
        run(engine, PROMPT)
    whole = {p.name: p.read_bytes() for p in files(tmp_path)}
    for shared in (1, 16, 63, 64, 65, 100, 128, 149):
        with opened(artifact, tmp_path, min_tokens=10**6) as engine:
            prompt = [*PROMPT[:shared], (PROMPT[shared] + 1) % 256, 9]
            reused, *warm = run(engine, prompt)
            assert reused == shared
            assert warm == list(run(engine, prompt, reuse=False)[1:])
            engine.prefixes.clear()
            resumed, fresh = engine.new_sequence(), engine.new_sequence()
            engine.resume(resumed, prompt)
            engine.read(fresh, prompt[:shared])
            assert list(resumed.tokens) == prompt[:shared]
            assert engine.kv_bytes(resumed) == engine.kv_bytes(fresh)
    assert {p.name: p.read_bytes() for p in files(tmp_path)} == whole


def test_later_turns_write_only_what_is_new(tiny_artifact: Get, tmp_path: Path) -> None:
    prompt: list[int] = []
    with opened(tiny_artifact("llama"), tmp_path) as engine:
        for turn in range(4):
            prompt += [turn, *PROMPT[:60]]
            before = {p.name[:64] for p in files(tmp_path)}
            prompt += run(engine, prompt)[1]
            new = [p for p in files(tmp_path) if p.name[:64] not in before]
            assert sum(p.stat().st_size for p in new) < 5 * PAGE  # what it added, in parts of pages
        assert len(files(tmp_path)) == 8  # a prompt and a reply a turn
    with opened(tiny_artifact("llama"), tmp_path) as engine:
        assert run(engine, [*prompt, 1])[0] == len(prompt) - 1


def test_a_common_head_is_kept_once_and_outlives_what_extends_it(
    tiny_artifact: Get, tmp_path: Path
) -> None:
    with opened(tiny_artifact("llama"), tmp_path) as engine:
        for other in range(4):
            run(engine, [*PROMPT[:100], 200 + other, *range(20)])
        heads = [p for p in files(tmp_path) if "-head" in p.name]
        assert len(heads) == 1
    quota = (heads[0].stat().st_size + 100) / 1e9
    with opened(tiny_artifact("llama"), tmp_path, disk_gb=quota) as engine:
        assert files(tmp_path) == heads
        assert run(engine, [*PROMPT[:100], 7, 7])[0] == 100


def test_it_is_the_owners_alone(tiny_artifact: Get, tmp_path: Path) -> None:
    directory = tmp_path / "new" / "prefixes"
    with opened(tiny_artifact("llama"), directory) as engine:
        run(engine, PROMPT)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in directory.iterdir()} == {0o600}


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(FileError, match="others may write to it"):
        PrefixDisk(DiskOptions(tmp_path))
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o755)
    PrefixDisk(DiskOptions(tmp_path)).close()


def test_requests_that_opt_out_or_are_short_leave_nothing(
    tiny_artifact: Get, tmp_path: Path
) -> None:
    with opened(tiny_artifact("llama"), tmp_path, min_tokens=100) as engine:
        run(engine, PROMPT, reuse=False)
        run(engine, PROMPT[:50])
    assert not files(tmp_path)


def test_another_model_uses_nothing_and_removes_nothing(tiny_artifact: Get, tmp_path: Path) -> None:
    with opened(tiny_artifact("llama"), tmp_path) as engine:
        run(engine, PROMPT)
    with opened(tiny_artifact("qwen3"), tmp_path) as engine:
        assert run(engine, PROMPT)[0] == 0
    with opened(tiny_artifact("llama"), tmp_path) as engine:
        assert run(engine, PROMPT)[0] == 149


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first = PrefixDisk(DiskOptions(tmp_path))
    with pytest.raises(PrefixDirectoryBusyError, match="another process uses"):
        PrefixDisk(DiskOptions(tmp_path))
    first.close()
    PrefixDisk(DiskOptions(tmp_path)).close()


def test_a_writer_killed_at_any_instant_leaves_a_directory_that_opens(
    tiny_artifact: Get, tmp_path: Path
) -> None:
    """Cut the process at every system call that changes the directory."""
    script = (
        "import os, sys; from pathlib import Path\n"
        "import headrace.engine.prefix_segment as segments\n"
        "import numpy as np\n"
        "from headrace.engine.prefix_disk import *\n"
        "left = int(sys.argv[2])\n"
        "def cut(event, args):\n"
        "    global left\n"
        "    if event in ('open', 'os.rename', 'os.utime', 'os.remove') and sys.argv[1] in str(args[0]):\n"
        "        left -= 1\n"
        "        if left < 0: os._exit(9)\n"
        "disk = PrefixDisk(DiskOptions(Path(sys.argv[1]), min_tokens=1))\n"
        "sys.addaudithook(cut)\n"
        "page = lambda index, end: np.full(64, index, np.uint8)\n"
        "binding = Binding(bytes(32), b'b' * 32, 64)\n"
        "for n in (100, 150, 220): disk.store(binding, list(range(n)), n - 10, page)\n"
        "disk.store(binding, [*range(90), 5, 6], 91, page)\n"
    )
    for calls in range(0, 60, 3):
        directory = tmp_path / str(calls)
        command = [sys.executable, "-c", script, str(directory), str(calls)]
        code = subprocess.run(command, check=False).returncode
        assert code in (0, 9)
        disk = PrefixDisk(DiskOptions(directory, min_tokens=1))
        found = disk.find(BINDING, list(range(220)))
        for index in range(-(-found.length // 64)):
            assert (found.page(index) == index).all()
        assert not [p for p in directory.iterdir() if p.name.startswith(prefix_segment.TEMPORARY)]
        disk.close()
        if code == 0:
            break
    assert code == 0


@pytest.mark.parametrize(
    "place", ["magic", "lengths", "tokens", "digests", "cut", "longer", "empty"]
)
def test_damaged_files_are_removed_and_named(
    tiny_artifact: Get, tmp_path: Path, place: str
) -> None:
    artifact = tiny_artifact("llama")
    with opened(artifact, tmp_path) as engine:
        wanted = run(engine, PROMPT)[1:]
    prompt_file = next(p for p in files(tmp_path) if p.stat().st_size > 2 * PAGE)
    data = bytearray(prompt_file.read_bytes())
    at = {"magic": 0, "lengths": 121, "tokens": 140, "digests": 140 + 600}.get(place)
    if at is not None:
        data[at] ^= 64
    data = {"cut": data[:-1], "longer": data + b"x", "empty": bytearray()}.get(place, data)
    prompt_file.write_bytes(data)
    disk = PrefixDisk(DiskOptions(tmp_path))
    assert any(prompt_file.name in removed for removed in disk.removed)
    assert len(disk.removed) == 2  # and the reply, which goes on from it
    disk.close()
    assert not files(tmp_path)
    with opened(artifact, tmp_path) as engine:
        assert run(engine, PROMPT) == (0, *wanted)


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_damaged_page_is_not_used(tiny_artifact: Get, tmp_path: Path, page: int) -> None:
    artifact = tiny_artifact("llama")
    with opened(artifact, tmp_path) as engine:
        wanted = run(engine, PROMPT)[1:]
    file = next(p for p in files(tmp_path) if p.stat().st_size > 2 * PAGE)
    data = bytearray(file.read_bytes())
    data[len(data) - (3 - page) * PAGE + 5] ^= 1
    file.write_bytes(data)
    with opened(artifact, tmp_path) as engine, pytest.warns(RuntimeWarning, match=file.name):
        assert run(engine, PROMPT) == (64 * page, *wanted)
    with opened(artifact, tmp_path) as engine:  # it was removed, and written anew
        assert run(engine, PROMPT) == (149, *wanted)


def test_a_file_without_permission_is_kept_and_named(
    tiny_artifact: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_artifact("llama"), tmp_path) as engine:
        run(engine, PROMPT)
    file, really = files(tmp_path)[0], os.open

    def refusing(path: Path, *flags: int) -> int:  # root, who may run this, reads everything
        if Path(path) == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really(path, *flags)

    with monkeypatch.context() as patch:
        patch.setattr(prefix_segment.os, "open", refusing)
        with pytest.raises(InaccessibleSegmentError, match=f"{file.name}.*Permission denied"):
            PrefixDisk(DiskOptions(tmp_path))
    assert len(files(tmp_path)) == 2
    PrefixDisk(DiskOptions(tmp_path)).close()


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_is_no_file_is_kept_and_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / prefix_segment.name(b"x" * 32, "state")
    {"directory": path.mkdir, "link": lambda: path.symlink_to("/etc/hostname")}.get(
        kind, lambda: os.mkfifo(path)
    )()
    with pytest.raises(InaccessibleSegmentError, match=path.name):
        PrefixDisk(DiskOptions(tmp_path))
    assert os.path.lexists(path)


def test_a_full_disk_costs_reuse_alone(
    tiny_artifact: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = tiny_artifact("llama")
    with opened(artifact, tmp_path) as engine:
        run(engine, PROMPT[:40])
        before = files(tmp_path)

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(prefix_segment.os, "fsync", full)
        with pytest.warns(RuntimeWarning, match="No space left"):
            warm = run(engine, PROMPT)
        assert warm[1:] == run(engine, PROMPT, reuse=False)[1:]
        assert files(tmp_path) == before
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(prefix_segment.TEMPORARY)]


def store(disk: PrefixDisk, tokens: list[int], prompt: int | None = None) -> None:
    disk.store(
        BINDING,
        tokens,
        len(tokens) if prompt is None else prompt,
        lambda i, end: np.zeros(64, np.uint8),
    )


def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    disk = PrefixDisk(DiskOptions(tmp_path, min_tokens=1))
    store(disk, list(range(70)))
    disk.close()
    (file,) = files(tmp_path)
    data = file.read_bytes()
    for at in range(len(data)):
        file.write_bytes(data[:at])
        with pytest.raises(DamagedSegmentError):
            prefix_segment.read(file)
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        with pytest.raises(DamagedSegmentError):
            _read_all(file)


def _read_all(file: Path) -> None:
    segment = prefix_segment.read(file)
    for page in range(segment.label.num_pages):
        segment.page(page)


@pytest.mark.parametrize(
    "sizes",
    [(0, 0, 64), (5, 5, 64), (6, 5, 64), (0, 2**64 - 1, 64), (0, 2**27, 2**31), (0, 70, 0), (0, 70, 2**63)],
)  # fmt: skip
def test_impossible_lengths_in_a_header(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    disk = PrefixDisk(DiskOptions(tmp_path, min_tokens=1))
    store(disk, list(range(70)))
    (file,) = files(tmp_path)
    disk.close()
    data = bytearray(file.read_bytes())
    lengths = prefix_segment._HEADER.size - 24
    for index, size in enumerate(sizes):
        data[lengths + 8 * index : lengths + 8 * index + 8] = size.to_bytes(8, "little")
    file.write_bytes(data)
    opened_again = PrefixDisk(DiskOptions(tmp_path, min_tokens=1))
    assert len(opened_again.removed) == 1
    assert opened_again.find(BINDING, list(range(70))).length == 0
    opened_again.close()
    assert not files(tmp_path)


def test_the_order_of_retention(tmp_path: Path) -> None:
    """What nobody continued goes first, then conversations, then heads; the least recently used first in each."""
    now = [1000.0]
    disk = PrefixDisk(DiskOptions(tmp_path, min_tokens=10, max_age_days=0), lambda: now[0])
    chat, head = list(range(100)), list(range(500, 600))
    store(disk, chat, 90)
    now[0] += 1
    store(disk, [*chat, *range(20)], 110)  # a conversation
    for other in (1, 2):
        now[0] += 1
        store(disk, [*head, other, *range(12)])
    now[0] += 1
    store(disk, list(range(700, 800)))
    disk.close()
    order = []
    size = sum(p.stat().st_size for p in files(tmp_path))
    while files(tmp_path):
        left = set(files(tmp_path))
        size = sum(p.stat().st_size for p in left) - 1
        PrefixDisk(
            DiskOptions(tmp_path, disk_gb=size / 1e9, max_age_days=0), lambda: now[0]
        ).close()
        order += [p.name.split("-")[1].removesuffix(".kv") for p in left - set(files(tmp_path))]
    assert order == sorted(order, key=["state", "turn", "head"].index)
    assert (order.count("head"), order.count("turn")) == (1, 4)


def test_age_and_quota(tmp_path: Path) -> None:
    now = [10.0**9]
    disk = PrefixDisk(DiskOptions(tmp_path, min_tokens=10, max_age_days=2), lambda: now[0])
    store(disk, list(range(50)))
    now[0] += 1.5 * 86400
    store(disk, list(range(100, 150)))
    now[0] += 86400
    store(disk, list(range(200, 250)))
    assert len(files(tmp_path)) == 2
    disk.options = DiskOptions(tmp_path, disk_gb=1e-9, min_tokens=10)
    with pytest.raises(DiskFullError, match="quota"):
        store(disk, list(range(300, 350)))
    assert len(files(tmp_path)) == 2
    disk.close()


@pytest.mark.parametrize(
    "options", [{"disk_gb": -1.0}, {"disk_gb": float("nan")}, {"min_tokens": 0}]
)
def test_impossible_options(tmp_path: Path, options: dict[str, float]) -> None:
    with pytest.raises(SettingError, match="prefix_cache_"):
        DiskOptions(tmp_path, **options)  # type: ignore[arg-type]


def test_no_warning_where_nothing_is_wrong(tiny_artifact: Get, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with opened(tiny_artifact("llama"), tmp_path) as engine:
                run(engine, PROMPT), run(engine, PROMPT[:70])
