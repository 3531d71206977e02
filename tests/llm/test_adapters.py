"""Adapters of the Python API: by name, from files of both kinds, within the memory plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import loras
import tiny
from headrace.artifact.container import Artifact
from headrace.errors import (
    AdapterMismatchError,
    AdapterShapeError,
    FileError,
    InputError,
    MemoryBudgetError,
)
from headrace.llm import LLM
from headrace.memory.inputs import PlanOptions
from headrace.models.config import DecoderConfig

Get = Callable[[str], Artifact]
PROMPT = (
    "the same prompt under every adapter, long enough for a page of keys and values to be shared"
)


@pytest.fixture(scope="module")
def base(tiny_artifact: Get) -> Artifact:
    return tiny_artifact("llama")


@pytest.fixture
def folders(base: Artifact, tmp_path: Path) -> dict[str, Path]:
    """One as PEFT writes it, one converted."""
    c = DecoderConfig.from_json(base.manifest.config)
    peft = loras.write(tmp_path / "peft", loras.state(c))
    return {"peft": peft, "made": loras.make(tmp_path / "made", base, ("q", "v"), seed=1).path}


def asked(llm: LLM, adapter: str | None = None, **how: object) -> tuple[int, ...]:
    done = llm.generate(PROMPT, raw=True, seed=5, max_tokens=12, adapter=adapter, **how)  # type: ignore[arg-type]
    return done.tokens


def reused(llm: LLM) -> int:
    assert llm.last is not None
    return llm.last.stats.reused_tokens


def test_given_with_the_model_or_later(base: Artifact, folders: dict[str, Path]) -> None:
    with LLM(base.path, threads=1, adapters=dict(folders)) as llm:
        answers = [asked(llm, name) for name in (None, "peft", "made")]
        assert len(set(answers)) == 3
        assert set(llm.adapters) == {"peft", "made"}
        identities = dict(llm.adapters)
    with LLM(base.path, threads=1) as llm:
        assert llm.load_adapter(folders["made"]) == "made"
        assert llm.load_adapter(str(folders["peft"]), "mine") == "mine"
        assert [asked(llm, name) for name in (None, "mine", "made")] == answers
        assert dict(llm.adapters) == {"made": identities["made"], "mine": identities["peft"]}
        with LLM(base.path, threads=1) as another:
            assert asked(another) == answers[0]


def test_every_way_to_ask(base: Artifact, folders: dict[str, Path]) -> None:
    with LLM(base.path, threads=1, adapters={"a": folders["peft"]}) as llm:
        wanted = asked(llm, "a")
        text = "".join(llm.stream(PROMPT, raw=True, seed=5, max_tokens=12, adapter="a"))
        assert llm.last is not None
        assert llm.last.tokens == wanted
        assert text == llm.last.text
        ids = llm.prompt_ids(PROMPT, raw=True)
        assert llm.generate_ids(ids, seed=5, max_tokens=12, adapter="a").tokens == wanted
        assert asked(llm, "a", regex="[ab]{5}") != asked(llm, "a")


def test_the_same_name_with_other_content(base: Artifact, folders: dict[str, Path]) -> None:
    """Retrained and loaded under its old name: nothing of the old one's cache is used."""
    with LLM(base.path, threads=1, adapters={"name": folders["peft"]}) as llm:
        first = asked(llm, "name")
        with pytest.raises(InputError, match="already"):
            llm.load_adapter(folders["made"], "name")
        llm.unload_adapter("name")
        llm.load_adapter(folders["made"], "name")
        second = asked(llm, "name")
        assert reused(llm) == 0
        assert second != first
        llm.unload_adapter("name")
        llm.load_adapter(folders["peft"], "name")
        assert asked(llm, "name") == first
        assert reused(llm) > 0


def test_a_folder_that_changes_is_another_adapter(base: Artifact, tmp_path: Path) -> None:
    """The conversion in the cache is of the files as they were."""
    c = DecoderConfig.from_json(base.manifest.config)
    answers = []
    for alpha in (8, 24, 8):
        peft = loras.write(tmp_path / "peft", loras.state(c), loras.config(alpha=alpha))
        with LLM(base.path, threads=1, adapters={"a": peft}) as llm:
            answers.append((llm.adapters["a"], asked(llm, "a")))
    assert answers[0] == answers[2]
    assert answers[0] != answers[1]


def test_what_is_refused(
    base: Artifact, folders: dict[str, Path], tiny_artifact: Get, tmp_path: Path
) -> None:
    with LLM(base.path, threads=1) as llm:
        for bad, words in (("nobody", "no adapter 'nobody'"), ("", "no adapter")):
            with pytest.raises(InputError, match=words):
                asked(llm, bad)
        with pytest.raises(FileError, match="no such file"):
            llm.load_adapter(tmp_path / "nowhere")
        with pytest.raises(FileError, match="neither an adapter"):
            llm.load_adapter(tmp_path)
        with pytest.raises(InputError, match="no name"):
            llm.load_adapter(folders["made"], "")
        with pytest.raises(InputError, match="no adapter"):
            llm.unload_adapter("made")
        other = loras.make(tmp_path / "other", tiny_artifact("qwen3"))
        with pytest.raises(AdapterMismatchError):
            llm.load_adapter(other.path)
        c = replace(DecoderConfig.from_json(base.manifest.config), hidden_size=96)
        with pytest.raises(AdapterShapeError, match="the base needs"):
            llm.load_adapter(loras.write(tmp_path / "wide", loras.state(c)))
        with pytest.raises(FileError):
            LLM(base.path, threads=1, adapters={"a": tmp_path / "nowhere"})
        assert dict(llm.adapters) == {}


def test_the_memory_plan_counts_adapters(base: Artifact, folders: dict[str, Path]) -> None:
    options = PlanOptions(memory_gb=tiny.beside(0.3), max_context=512)
    with LLM(base.path, threads=1, memory=options) as llm:
        plain = llm.plan.ledger
        llm.load_adapter(folders["peft"])
    with LLM(base.path, threads=1, memory=options, adapters={"a": folders["peft"]}) as llm:
        counted = llm.plan.ledger.workspace - plain.workspace
        assert counted >= llm.engine.adapters.nbytes
        llm.load_adapter(folders["made"])


def test_no_room_for_a_later_one(
    base: Artifact, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(base.path, threads=1, adapters={"peft": folders["peft"]}) as llm:
        monkeypatch.setattr(llm._loaded.adapters, "_spare", 1000)
        with pytest.raises(MemoryBudgetError, match="memory plan"):
            llm.load_adapter(folders["made"])
        llm.unload_adapter("peft")  # which makes room
        llm.load_adapter(folders["made"])
