"""A model's own head through the Python API: the same answers, counted in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.head import HEAD_NAME, read_head
from headrace.errors import FileError, UnsupportedError
from headrace.kernels.program import PAGE_TOKENS
from headrace.kernels.select import select
from headrace.llm import LLM
from headrace.memory.facts import HEAD_ROWS, model_facts, plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.machine import read_machine
from headrace.models.decoder import model_shape
from llm.schemas import SCHEMAS

ASK = "Why? Because. Why? Because. Why?"


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny.make(tmp_path_factory.mktemp("headed") / "a", "mixtral", head=1)


@pytest.mark.parametrize("draft", ["auto", "lookup", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_answer_is_the_same(headed: Artifact, temperature: float, draft: str) -> None:
    options = {"temperature": temperature, "seed": 4, "max_tokens": 60}
    with LLM(headed.path, threads=1, draft=draft) as llm:  # type: ignore[arg-type]
        for more in ({}, {"schema": SCHEMAS["record"]}, {"regex": "(ab|ba){3}c*"}):
            plain = llm.generate(ASK, **options, **more)  # type: ignore[arg-type]
            for speculate in (1, 8, "auto"):
                llm.forget()
                found = llm.generate(ASK, speculate=speculate, **options, **more)  # type: ignore[arg-type]
                assert (found, found.stats.fingerprint) == (plain, plain.stats.fingerprint)


def test_a_head_that_is_asked_for_has_to_be_there(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "a", "llama")
    with pytest.raises(UnsupportedError, match="has no head that drafts"):
        LLM(made.path, draft="mtp")
    with LLM(made.path, threads=1) as llm:
        assert llm.generate(ASK, max_tokens=3, speculate="auto", seed=1).stats.new_tokens == 3


def test_a_damaged_head_is_told_at_the_start(tmp_path: Path) -> None:
    made = tiny.make(tmp_path / "a", "llama", head=2)
    (made.path / HEAD_NAME).write_bytes(b"something")
    for draft in ("auto", "mtp"):
        with pytest.raises(FileError, match=HEAD_NAME):
            LLM(made.path, draft=draft)  # type: ignore[arg-type]


def test_the_plan_counts_it(headed: Artifact, tmp_path: Path) -> None:
    """Wherever a model is named by its place; a manifest alone knows of no head."""
    budget, machine = tiny.beside(0.4), read_machine()
    options = PlanOptions(memory_gb=budget)
    alone = model_facts(headed.manifest, threads=1)
    with_head = model_facts(headed, threads=1)
    assert with_head == model_facts(headed.path, threads=1)
    assert with_head.dense_bytes - alone.dense_bytes == (headed.path / HEAD_NAME).stat().st_size
    assert with_head.kv_bytes_per_token * 2 == alone.kv_bytes_per_token * 3  # one layer more
    assert with_head.workspace.fixed > alone.workspace.fixed
    with LLM(headed.path, threads=1, memory_gb=budget) as llm:
        made = plan_model(headed.path, options, machine, threads=1).for_loading()
        assert llm.plan.ledger.dense == made.ledger.dense
        assert llm.plan.ledger.kv == made.ledger.kv


def test_the_plan_covers_what_it_allocates(headed: Artifact) -> None:
    """Its runner's memory, its keys and values, and the states of a pass and of the one before."""
    alone = model_facts(headed.manifest, threads=1)
    facts = model_facts(headed, threads=1)
    head = read_head(headed)
    assert head is not None
    shape = model_shape(head.config, headed.manifest.fraction_bits)
    rows, window = 64, 512
    planned = facts.workspace.nbytes(rows, window) - alone.workspace.nbytes(rows, window)
    states = 2 * rows * shape.hidden * 4
    backend = select(threads=1)
    needed = backend.workspace_bytes(
        shape, max_positions=window, capacity=HEAD_ROWS, logit_capacity=1
    )
    assert needed + states <= planned < 1.5 * (needed + states) + (1 << 17)
    cache = (facts.kv_bytes_per_token - alone.kv_bytes_per_token) * PAGE_TOKENS
    assert cache >= shape.page_bytes


def test_the_real_head_drafts_rightly_more_often_than_not(smolmoe: Artifact) -> None:
    with LLM(smolmoe.path, threads=2, max_context=1024, draft="mtp") as llm:
        ask = "Why is the sky blue? Answer in two sentences."
        plain = llm.generate(ask, temperature=0.0, max_tokens=60)
        llm.forget()
        done = llm.generate(ask, temperature=0.0, max_tokens=60, speculate=1)
        assert (done, done.stats.fingerprint) == (plain, plain.stats.fingerprint)
        assert done.stats.accepted_tokens * 3 > done.stats.drafted_tokens > 20
