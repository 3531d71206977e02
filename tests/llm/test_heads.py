"""System messages are heads that others begin with: they outlive the conversations that begin with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.engine.prefix_disk import DiskOptions, survey
from headrace.errors import SettingError
from headrace.llm import LLM
from headrace.values import Message

SYSTEM = "You are a careful assistant. " * 8
SHORT = {"temperature": 0.0, "max_tokens": 2}


def opened(artifact: Artifact, directory: Path | None = None, min_tokens: int = 1) -> LLM:
    disk = None if directory is None else DiskOptions(directory, min_tokens=min_tokens)
    return LLM(artifact.path, threads=1, max_context=1024, prefix_disk=disk)


@pytest.fixture
def artifact(tiny_artifact: Callable[[str], Artifact]) -> Artifact:
    return tiny_artifact("llama")


def asked(text: str, system: str = SYSTEM) -> list[Message]:
    return [Message("system", system), Message("user", text)]


def head_of(llm: LLM, system: str = SYSTEM) -> list[int]:
    """What the template makes of a system message alone, without the assistant's beginning."""
    ids = llm.chat_ids(asked("Q", system))
    return ids[: ids.index(llm.tokenize("Q")[0], len(llm.tokenize(system)))]


def crowd(llm: LLM) -> None:
    """Two other conversations, later than all, that together want every page."""
    for token in (8, 9):
        llm.generate_ids([token] * 510, **SHORT)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["chat", "stream_chat", "generate", "stream_ids"])
def test_a_system_message_outlives_its_conversation(artifact: Artifact, way: str) -> None:
    with opened(artifact) as llm:
        if way == "chat":
            llm.chat(asked("hello " * 20), **SHORT)  # type: ignore[arg-type]
        elif way == "stream_chat":
            list(llm.stream_chat(asked("hello " * 20), **SHORT))  # type: ignore[arg-type]
        elif way == "generate":
            llm.generate("hello " * 20, system=SYSTEM, **SHORT)  # type: ignore[arg-type]
        else:
            ids = llm.prompt_ids("hello " * 20, system=SYSTEM)
            list(llm.stream_ids(ids, llm._split({**SHORT})[0]))  # type: ignore[typeddict-item]
        head = head_of(llm)
        whole = llm.chat_ids(asked("hello " * 20))
        crowd(llm)
        assert llm.engine.prefixes.longest(whole) >= len(head) // 64 * 64
        done = llm.chat(asked("other"), **SHORT)  # type: ignore[arg-type]
        assert done.stats.reused_tokens >= len(head) // 64 * 64


@pytest.mark.parametrize(
    "options", [{"shared_prefix_tokens": 0}, {"reuse": False}], ids=["none marked", "no reuse"]
)
def test_a_request_may_opt_out(artifact: Artifact, options: dict[str, object]) -> None:
    with opened(artifact) as llm:
        llm.chat(asked("hello " * 20), **SHORT, **options)  # type: ignore[arg-type]
        crowd(llm)
        assert llm.engine.prefixes.longest(llm.chat_ids(asked("hello " * 20))) == 0


def test_a_short_system_message_is_no_head(artifact: Artifact) -> None:
    with opened(artifact) as llm:
        llm.chat(asked("hello " * 20, "Be kind."), **SHORT)  # type: ignore[arg-type]
        crowd(llm)
        assert llm.engine.prefixes.longest(llm.chat_ids(asked("hello " * 20, "Be kind."))) == 0


def test_an_app_names_its_own_head(artifact: Artifact) -> None:
    """Of a prompt without a system message."""
    with opened(artifact) as llm:
        ids = [(7 * i) % 256 for i in range(200)]
        llm.generate_ids(ids, shared_prefix_tokens=128, **SHORT)  # type: ignore[arg-type]
        crowd(llm)
        assert llm.engine.prefixes.longest(ids) == 128
        done = llm.generate_ids(ids, shared_prefix_tokens=10**6, **SHORT)  # type: ignore[arg-type]
        assert done.stats.reused_tokens == 128


def test_a_head_on_disk_is_a_segment_of_its_own(artifact: Artifact, tmp_path: Path) -> None:
    with opened(artifact, tmp_path) as llm:
        llm.chat(asked("hello"), **SHORT)  # type: ignore[arg-type]
        head = head_of(llm)
    kinds = {s.kind: s for s in survey(tmp_path).segments}
    assert kinds["head"].tokens.tolist() == head
    with opened(artifact, tmp_path) as llm:
        done = llm.chat(asked("something else"), **SHORT)  # type: ignore[arg-type]
        assert done.stats.reused_tokens >= len(head)
    assert [s.kind for s in survey(tmp_path).segments].count("head") >= 1


def test_a_head_that_is_too_short_for_the_disk_is_none_there(
    artifact: Artifact, tmp_path: Path
) -> None:
    with opened(artifact, tmp_path, min_tokens=260) as llm:
        llm.chat(asked("hello " * 20), **SHORT)  # type: ignore[arg-type]
    assert [s.kind for s in survey(tmp_path).segments if s.kind == "head"] == []
    assert survey(tmp_path).segments


@pytest.mark.parametrize("value", [-1, 1.0, True, "8"])
def test_what_is_no_length_is_refused(artifact: Artifact, value: object) -> None:
    with opened(artifact) as llm, pytest.raises(SettingError, match="shared_prefix_tokens"):
        llm.generate("x", shared_prefix_tokens=value)  # type: ignore[arg-type]


def test_a_closed_model_is_freed_at_once(artifact: Artifact) -> None:
    """Nothing that the model keeps holds the model: memory does not wait for a collector."""
    gc.disable()
    try:
        llm = opened(artifact)
        llm.chat(asked("hello"), **SHORT)  # type: ignore[arg-type]
        thinking = llm.think(asked("hello"), thinking={"max_tokens": 3}, **SHORT)  # type: ignore[arg-type]
        thinking.finish()
        left = llm.think(asked("hello"), thinking={"max_tokens": 3}, **SHORT)  # type: ignore[arg-type]
        next(iter(left))
        llm.close()
        engine = weakref.ref(llm.engine)
        del llm, thinking, left
        assert engine() is None
    finally:
        gc.enable()
