"""A draft model through the Python API: the same answers, inside one plan, and refused where it speaks other tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.engine.draft_model import DraftModelError
from headrace.errors import MemoryBudgetError, SettingError
from headrace.llm import LLM
from headrace.memory.facts import DRAFT_ROWS, model_facts, plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.machine import read_machine
from llm.schemas import SCHEMAS

Get = Callable[[str], Artifact]
ASK = "Why? Because. Why? Because. Why?"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_answer_is_the_same(tiny_artifact: Get, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 4, "max_tokens": 60}
    path = tiny_artifact("mixtral").path
    with LLM(path, threads=1) as llm:
        plain = llm.generate(ASK, **options)  # type: ignore[arg-type]
        schema = llm.generate(ASK, schema=SCHEMAS["record"], **options)  # type: ignore[arg-type]
    with LLM(path, threads=1, draft_model=tiny_artifact("llama").path) as llm:
        for speculate in ("off", 1, 8, "auto"):
            found = llm.generate(ASK, speculate=speculate, **options)  # type: ignore[arg-type]
            assert (found, found.stats.fingerprint) == (plain, plain.stats.fingerprint)
            assert (found.stats.drafted_tokens > 0) == (speculate != "off") or speculate == "auto"
            found = llm.generate(
                ASK,
                schema=SCHEMAS["record"],
                speculate=speculate,  # type: ignore[arg-type]
                **options,  # type: ignore[arg-type]
            )
            assert (found, found.stats.fingerprint) == (schema, schema.stats.fingerprint)


def test_the_model_itself_drafts_what_it_says(tiny_artifact: Get) -> None:
    path = tiny_artifact("llama").path
    with LLM(path, threads=1, draft="model", draft_model=path) as llm:
        done = llm.generate(ASK, speculate=4, temperature=0.0, max_tokens=40)
        assert done.stats.accepted_tokens == done.stats.drafted_tokens > 25


def test_the_plan_counts_both(tiny_artifact: Get) -> None:
    model, draft = tiny_artifact("llama"), tiny_artifact("mixtral")
    budget, machine = tiny.beside(0.4), read_machine()
    options = PlanOptions(memory_gb=budget)
    alone = plan_model(model, options, machine, threads=1).for_loading().ledger
    facts = model_facts(draft, threads=1)
    with LLM(model.path, threads=1, memory_gb=budget, draft_model=draft.path) as llm:
        both = llm.plan.ledger
        assert (
            both.dense - alone.dense
            == facts.dense_bytes + facts.num_slots * facts.expert_slot_bytes
        )
        assert both.kv - alone.kv == facts.kv_bytes_per_token * llm.plan.window
        assert both.workspace - alone.workspace > facts.workspace.nbytes(DRAFT_ROWS, 0)
        assert both.total == alone.total == round(budget * 10**9)
    least = plan_model(model, PlanOptions(memory_gb=0.001), machine, threads=1)
    needed = getattr(least, "needed_bytes", 0) / 1e9
    with pytest.raises(MemoryBudgetError):
        LLM(model.path, threads=1, memory_gb=needed, draft_model=draft.path)
    # What this process itself holds grows meanwhile.
    LLM(model.path, threads=1, memory_gb=needed + 0.1).close()


def renamed(folder: Path, edit: Callable[[dict[str, int]], None], **changes: int) -> Path:
    """A model whose tokenizer names tokens in another way."""
    source = tiny.write_checkpoint(folder / "source", "llama", **changes)
    body = json.loads((source / "tokenizer.json").read_text())
    edit(body["model"]["vocab"])
    (source / "tokenizer.json").write_text(json.dumps(body))
    Tokenizer.from_file(str(source / "tokenizer.json"))
    return convert(source, folder / "artifact").path


def swap(vocab: dict[str, int]) -> None:
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def test_another_vocabulary_is_refused_by_what_differs(tiny_artifact: Get, tmp_path: Path) -> None:
    model = tiny_artifact("llama").path
    larger = renamed(tmp_path / "larger", lambda vocab: None, vocab_size=300)
    with pytest.raises(DraftModelError, match=r"vocabulary of 300, the model one of 272"):
        LLM(model, draft_model=larger)
    swapped = renamed(tmp_path / "swapped", swap)
    with pytest.raises(DraftModelError, match=r"token 64 .* is b'b', of the model b'a'"):
        LLM(model, draft_model=swapped)
    spelled = renamed(tmp_path / "spelled", lambda vocab: None)  # the same in other bytes
    with LLM(model, threads=1, draft_model=spelled) as llm:
        assert llm.generate(ASK, max_tokens=3, speculate=2, seed=1).stats.new_tokens == 3


def test_a_choice_that_cannot_be(tiny_artifact: Get) -> None:
    path = tiny_artifact("llama").path
    with pytest.raises(SettingError, match="there is no draft model"):
        LLM(path, draft="model")
    with pytest.raises(SettingError, match="has no effect where draft is lookup"):
        LLM(path, draft="lookup", draft_model=path)
    with pytest.raises(SettingError, match="must be one of auto"):
        LLM(path, draft="oracle")  # type: ignore[arg-type]
