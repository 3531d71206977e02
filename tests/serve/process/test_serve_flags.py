"""Flags of `headrace serve` that are refused before anything is opened, and what they mean."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

import tiny
from headrace.cli import serve as serving
from headrace.cli.main import execute
from headrace.cli.serve import Asked, adapters, served_name
from headrace.serve.events import Event, Finished
from headrace.serve.process.run import Opened, Site
from headrace.serve.request import Request, Text, Turn


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 is beyond loopback and no API key is set"),
        (("--api-key", "two words"), "the API key has to be printable ASCII without spaces"),
        (("--allow-host", "a/b"), "--allow-host 'a/b' is no host name or address"),
        (("--port", "65536"), "--port 65536 is not between 0 and 65535"),
        (("--port", "-1"), "--port -1 is not between 0 and 65535"),
        (("--idle-exit", "-1"), "--idle-exit -1 is not between 0 and 10080"),
        (("--idle-exit", "nan"), "--idle-exit nan is not between 0 and 10080"),
        (("--max-prefill-wait", "-1"), "--max-prefill-wait -1 is not between 0 and 100000"),
        (("--adapter", "folder"), "--adapter 'folder' is not NAME=PATH, with a name without +"),
        (("--adapter", "a+b=folder"), "--adapter 'a+b=folder' is not NAME=PATH, with a name without +"),
        (("--adapter", "a=x", "--adapter", "a=y"), "--adapter gives the name 'a' twice"),
        (("--parallel", "0"), "parallel is 0; it must be between 1 and 1024"),
        (("--no-prefix-cache", "--prefix-cache-dir", "x"), "--no-prefix-cache is given together with --prefix-cache-dir"),
        (("--draft", "lookup"), "drafts are asked for, and speculate is off"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_flags_that_are_refused(
    capfd: pytest.CaptureFixture[str], home: Path, flags: tuple[str, ...], said: str
) -> None:
    assert execute(["serve", *flags]) == 2
    assert said in capfd.readouterr().err
    assert not home.exists()


def test_a_key_of_the_environment_is_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "two words")
    assert execute(["serve", "--host", "0.0.0.0"]) == 2
    assert "the API key has to be printable ASCII" in capfd.readouterr().err


def test_adapters_by_name() -> None:
    assert adapters([]) == {}
    assert adapters(["a=x", "b=c=d"]) == {"a": Path("x"), "b": Path("c=d")}


def test_what_clients_call_a_model(tmp_path: Path) -> None:
    assert served_name("smollm2:135m") == "smollm2:135m"
    assert served_name(str(tmp_path / "tiny-llama")) == "tiny-llama"
    assert served_name(str(tmp_path / "tiny.q4.gguf")) == "tiny.q4"
    assert served_name("tiny+one.gguf") == "tiny-one"


Opening = Callable[[], AbstractContextManager[Opened]]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Site, Opening]]:
    """What the command makes of its flags: the site, and what opens the model."""
    seen: list[tuple[Site, Opening]] = []

    def keep(site: Site, opening: Opening) -> int:
        seen.append((site, opening))
        return 0

    def parse(*flags: str) -> tuple[Site, Opening]:
        assert execute(["serve", *flags]) == 0
        return seen[-1]

    monkeypatch.setattr(serving, "run", keep)
    return parse


def asked_of(opening: Opening) -> Asked:
    assert isinstance(opening, partial)
    (asked,) = opening.args
    assert isinstance(asked, Asked)
    return asked


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ((), 1800.0),
        (("--max-prefill-wait", "0"), None),
        (("--max-prefill-wait", "0.5"), 30.0),
        (("--max-prefill-wait", "100000"), 6_000_000.0),
    ],
)
def test_the_first_token_has_half_an_hour_and_with_0_any_time(
    parsed: Callable[..., tuple[Site, Opening]], flags: tuple[str, ...], seconds: float | None
) -> None:
    assert asked_of(parsed(*flags)[1]).max_prefill_wait == seconds


@pytest.mark.parametrize(
    ("flags", "minutes"), [((), None), (("--idle-exit", "0"), None), (("--idle-exit", "30"), 30.0)]
)
def test_without_minutes_to_be_idle_or_with_0_it_keeps_serving(
    parsed: Callable[..., tuple[Site, Opening]], flags: tuple[str, ...], minutes: float | None
) -> None:
    assert parsed(*flags)[0].idle_exit == minutes


def test_no_prefix_cache_reaches_the_model(
    parsed: Callable[..., tuple[Site, Opening]], tmp_path: Path
) -> None:
    """A prompt that comes again is read again; without the flag it is not."""
    path = tiny.make(tmp_path / "tiny", "llama", max_position_embeddings=1024).path
    turns = (Turn("user", (Text("What is a weir, and what is a headrace? " * 4),)),)
    cached = {}
    for flags in ((), ("--no-prefix-cache",)):
        _, opening = parsed(str(path), "--threads", "1", "--max-context", "512", *flags)
        assert asked_of(opening).reuse is not bool(flags)
        with opening() as opened:
            for _ in range(2):
                last = asyncio.run(last_event(opened, Request("tiny", turns, limit=2)))
                assert isinstance(last, Finished)
            cached[flags] = last.usage.cached_tokens
            prompt = last.usage.prompt_tokens
    assert cached == {(): prompt - 1, ("--no-prefix-cache",): 0}


async def last_event(opened: Opened, request: Request) -> Event | None:
    running = opened.backend.submit(request, request_id="a" * 32, arrived=time.monotonic())
    last = None
    while (event := await running.next()) is not None:
        last = event
    return last
