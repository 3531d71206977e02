"""SIGKILL at random moments of real processes: what is on disk stays whole, and the same command then succeeds.

`tests/artifact/test_unfinished.py` kills before every single change of the file system; here the moments are those of
the clock, of whole commands. The moments are drawn from a fixed seed, one in each slice of the command's own time.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import tiny
from artifact.test_gguf_families import write_gguf
from headrace.artifact.container import open_artifact
from headrace.artifact.forecast import FORECAST_NAME, read_forecast
from headrace.experts.trace import read_routes
from shell import Shell

pytestmark = pytest.mark.slow

MIXTURE = {"hidden_size": 256, "num_hidden_layers": 4, "num_local_experts": 16, "intermediate_size": 192}  # fmt: skip
ANSWER = ["--prompt", "abc", "--seed", "3", "--max-tokens", "80"]
SMALL = ["--experts-per-layer", "3"]
KILLS = 12
STARTUP = 0.3  # share of a command's time in which it only imports; kills come after it


@dataclass(frozen=True)
class Place:
    """A home folder, a folder of models, and sources to convert."""

    shell: Shell
    models: Path
    checkpoint: Path
    gguf: Path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sources")
    checkpoint = tiny.write_checkpoint(folder / "mixture", "mixtral", **MIXTURE)
    settings = tiny.config("qwen3", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    gguf = write_gguf(folder / "dense.gguf", "qwen3", settings, tiny.state(settings))
    return checkpoint, gguf


@pytest.fixture
def place(tmp_path: Path, sources: tuple[Path, Path]) -> Place:
    (tmp_path / "models").mkdir()
    return Place(Shell(tmp_path / "home"), tmp_path / "models", *sources)


@pytest.fixture
def artifact(place: Place) -> Path:
    done = place.shell.run("convert", place.checkpoint, place.models / "mixture")
    assert done.returncode == 0, done.stderr
    return place.models / "mixture"


def drill(
    command: Callable[[], subprocess.Popen[bytes]], after: Callable[[], None], again: int, seed: int
) -> None:
    """Kill the command at KILLS moments. `after` is called after each kill, and after every `again`th of them the
    command runs to its end."""
    draws = random.Random(seed)
    start = time.monotonic()
    assert _ended(command()) == 0
    seconds = time.monotonic() - start
    killed = 0
    for number in range(KILLS):
        part = (number + draws.random()) / KILLS
        process = command()
        try:
            process.communicate(timeout=seconds * (STARTUP + (1 - STARTUP) * part))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        killed += _ended(process) == -signal.SIGKILL
        after()
        if number % again == again - 1:
            assert _ended(command()) == 0
            after()
    assert killed >= KILLS // 2, "the drill kills a process that works"


def _ended(process: subprocess.Popen[bytes]) -> int:
    process.communicate(timeout=100)
    return process.returncode


def files(folder: Path) -> set[str]:
    """Every file and folder below, by its path."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_streaming_run(place: Place, artifact: Path, tmp_path: Path) -> None:
    """With its routes traced and its statistics written: it leaves nothing but what it was told to write."""
    out = tmp_path / "out"
    out.mkdir()
    stats, routes = out / "stats.json", out / "routes"
    seen, own = set(), files(artifact)

    def run() -> subprocess.Popen[bytes]:
        flags = [*ANSWER, *SMALL, "--trace-routes", routes, "--stats-json", stats]
        return place.shell.start(
            "run", artifact, *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def after() -> None:
        open_artifact(artifact, verify=True)
        assert files(artifact) == own
        if routes.exists() and b"\n" in routes.read_bytes():
            read_routes(routes)  # whole records up to where it was killed
        told = json.loads(stats.read_text())  # the last whole one
        seen.add((told["fingerprint"], told["new_tokens"]))
        assert len(files(out) - {"stats.json", "routes"}) <= 1

    drill(run, after, 3, seed=1)
    assert len(seen) == 1
    assert files(out) == {"stats.json", "routes"}
    assert {p.name for p in place.models.iterdir()} == {"mixture"}
    assert not [name for name in files(place.shell.home) if ".partial-" in name]


def test_a_conversion_beside_its_target(place: Place, artifact: Path) -> None:
    """In place of an artifact that stands: that one stays until the new one is whole."""
    identity = open_artifact(artifact, verify=True).identity

    def convert() -> subprocess.Popen[bytes]:
        return place.shell.start("convert", place.checkpoint, artifact, stderr=subprocess.PIPE)

    def after() -> None:
        hidden = [p for p in place.models.iterdir() if p != artifact]
        assert len(hidden) <= 2  # what was begun, and what was moved away
        if artifact.exists():
            assert open_artifact(artifact, verify=True).identity == identity

    drill(convert, after, 6, seed=2)
    assert [p.name for p in place.models.iterdir()] == ["mixture"]
    assert not [name for name in files(place.shell.home) if ".partial-" in name]


def test_a_run_that_converts_into_the_cache(place: Place) -> None:
    """Killed before, while or after it converts; its answer is the same, and the cache holds one artifact."""
    cache = place.shell.home / "converted"
    stats = place.models / "stats.json"
    seen = set()

    def run() -> subprocess.Popen[bytes]:
        if not list(cache.glob(".*")):
            shutil.rmtree(cache, ignore_errors=True)  # convert again
        flags = [*ANSWER, "--raw", "--stats-json", stats]
        return place.shell.start(
            "run", place.gguf, *flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def after() -> None:
        made = list(cache.glob("*"))  # hidden names too
        assert len(made) <= 1
        for path in made:
            if not path.name.startswith("."):
                open_artifact(path, verify=True)
        seen.add(json.loads(stats.read_text())["fingerprint"])

    drill(run, after, 6, seed=3)
    assert len(seen) == 1
    assert [p.name.startswith(".") for p in cache.iterdir()] == [False]


def test_a_fit(place: Place) -> None:
    artifact = tiny.make(place.models / "tiny", "mixtral").path
    own = files(artifact)

    def fit() -> subprocess.Popen[bytes]:
        return place.shell.start(
            "fit-forecast", artifact, "--tokens", "256", *SMALL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # fmt: skip

    def after() -> None:
        assert read_forecast(open_artifact(artifact, verify=True))  # the one before, or the new one
        assert len(files(artifact) - own - {FORECAST_NAME}) <= 1

    drill(fit, after, 6, seed=4)
    assert files(artifact) == own | {FORECAST_NAME}
