"""A greedy request served from the cache, in memory or from disk in a new process, is answered as a cold one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.prefix_disk import DiskOptions, PrefixDisk
from headrace.values import SamplingParams

Get = Callable[[str], Artifact]
CHUNK = 48
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]
# Beside tiles of 16, passes of 48 and pages of 64, and the shortest.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 50, 63, 64, 65, 95, 96, 97, 98, 127, 128, 129, 144, 145, 150)  # fmt: skip

Answer = tuple[list[int], str, int]  # tokens, fingerprint, tokens reused


def opened(path: Path, directory: Path | None, kernels: str | None = None) -> Engine:
    from headrace.artifact.container import open_artifact

    engine = Engine(
        open_artifact(path),
        threads=1,
        kernels=kernels,
        max_context=256,
        chunk=CHUNK,
        num_sequences=2,
    )
    engine.end_tokens = frozenset()
    if directory is not None:
        engine.attach_disk(PrefixDisk(DiskOptions(directory, min_tokens=1)))
    return engine


def answer(engine: Engine, prompt: list[int], reuse: bool = True) -> Answer:
    params = SamplingParams(temperature=0.0, max_tokens=5)
    tokens = [t.id for t in engine.generate(prompt, params, reuse=reuse)]
    assert engine.stats is not None
    return tokens, engine.stats.fingerprint, engine.stats.reused_tokens


def from_disk(path: str, directory: str, kernels: str) -> list[Answer]:
    """Every prompt with nothing in memory; what the child process prints."""
    out = []
    with opened(Path(path), Path(directory), kernels or None) as engine:
        for length in LENGTHS:
            engine.prefixes.clear()
            out.append(answer(engine, PROMPT[:length]))
    return out


@pytest.mark.parametrize("kernels", ["", "portable"])
def test_cold_warm_and_restored_in_a_new_process(
    tiny_artifact: Get, tmp_path: Path, kernels: str
) -> None:
    path = tiny_artifact("llama").path
    with opened(path, tmp_path / "kv") as engine:
        cold = [answer(engine, PROMPT[:length], reuse=False) for length in LENGTHS]
        for length, wanted in zip(LENGTHS, cold, strict=True):
            engine.prefixes.clear()
            first = answer(engine, PROMPT[:length])
            warm = answer(engine, PROMPT[:length])  # an exact repeat
            assert first[:2] == warm[:2] == wanted[:2], length
            assert (wanted[2], warm[2]) == (0, length - 1)
    call = f"import json; from law.test_served import from_disk; print(json.dumps(from_disk({str(path)!r}, {str(tmp_path / 'kv')!r}, {kernels!r})))"
    tests = str(Path(__file__).resolve().parents[1])
    child = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r}); {call}"],
        capture_output=True,
        text=True,
        check=True,
    )
    for length, wanted, found in zip(LENGTHS, cold, json.loads(child.stdout), strict=True):
        assert tuple(found[:2]) == wanted[:2], length
        assert found[2] == length - 1


def test_conversations_that_alternate_on_disk(tiny_artifact: Get, tmp_path: Path) -> None:
    """A is long, B shares its first hundred tokens, back to A: each in a process of its own, as far as it can tell."""
    path = tiny_artifact("llama").path
    a, b = list(PROMPT), [*PROMPT[:100], *[(11 * i + 5) % 256 for i in range(30)]]
    for turn in range(3):
        for conversation in (a, b):
            conversation += [7 + turn]
            with opened(path, tmp_path) as engine:
                got = answer(engine, conversation)
                assert got[:2] == answer(engine, conversation, reuse=False)[:2]
            if turn:
                assert got[2] == len(conversation) - 2  # the last answer's last token was not read
            conversation += got[0]


@pytest.mark.parametrize("token", [0, 5, 257])
def test_a_prompt_of_one_token(tiny_artifact: Get, tmp_path: Path, token: int) -> None:
    path = tiny_artifact("llama").path
    with opened(path, tmp_path) as engine:
        cold = answer(engine, [token], reuse=False)
        assert answer(engine, [token]) == cold
        assert answer(engine, [token]) == cold
        assert answer(engine, [token, *cold[0]])[2] == len(cold[0])
    with opened(path, tmp_path) as engine:
        assert answer(engine, [token]) == cold
