"""The law with a draft model: whatever it says, tokens, logits and keys and values are those of plain decoding."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact, open_artifact
from headrace.engine.draft_model import ModelDrafter
from headrace.engine.engine import Engine
from headrace.engine.speculate import Lookup
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import TIERS
from law.test_speculation import GREEDY, PROMPT, SAMPLED, Get, opened, recorded, run


@contextmanager
def drafting(artifact: Artifact, context: int = 128, num_sequences: int = 1) -> Iterator[Engine]:
    with opened(artifact, context=context, chunk=32, num_sequences=num_sequences) as engine:
        yield engine


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model of the same vocabulary that says other things."""
    return tiny.make(tmp_path_factory.mktemp("other") / "a", "llama", seed=5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen2_moe"])
def test_no_draft_changes_the_outcome(tiny_artifact: Get, family: str, other: Artifact) -> None:
    """Drafts of the model itself, which are right as long as it is greedy, and of another, at every depth."""
    experts = StreamOptions(5, 32) if family in tiny.MIXTURES else None
    with opened(tiny_artifact(family), experts=experts) as engine:
        for params in (GREEDY, SAMPLED):
            plain = run(engine, params)
            for artifact in (tiny_artifact(family), other):
                with drafting(artifact) as small:
                    for depth in (*range(9), "auto"):
                        assert run(engine, params, depth, ModelDrafter(small)) == plain  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", TIERS)
def test_every_tier(tiny_artifact: Get, other: Artifact, kernels: str) -> None:
    params = replace(SAMPLED, max_tokens=8)
    with opened(tiny_artifact("llama")) as engine:
        wanted = run(engine, params)
    with (
        opened(tiny_artifact("llama"), kernels) as engine,
        opened(other, kernels, chunk=32) as small,
    ):
        assert run(engine, params, 3, ModelDrafter(small)) == wanted


def test_the_model_itself_is_always_right(tiny_artifact: Get) -> None:
    """So its sequence was where the history was, after every pass."""
    with opened(tiny_artifact("llama")) as engine, drafting(tiny_artifact("llama")) as small:
        before = engine.passes
        run(engine, GREEDY, 5, ModelDrafter(small))
        assert engine.stats is not None
        assert engine.stats.accepted_tokens == engine.stats.drafted_tokens == 19
        assert engine.passes - before == 1 + 4


@pytest.mark.parametrize("room", range(2, 12))
def test_the_edge_of_the_context(tiny_artifact: Get, other: Artifact, room: int) -> None:
    """Of the model, and of a draft model whose context ends earlier, there and later."""
    params = replace(SAMPLED, max_tokens=None)
    length = len(PROMPT) + room
    with opened(tiny_artifact("llama"), context=length) as engine:
        plain = run(engine, params)
        for context in (20, len(PROMPT), length - 1, length, length + 3):
            for artifact in (tiny_artifact("llama"), other):
                with drafting(artifact, context) as small:
                    assert run(engine, params, 8, ModelDrafter(small)) == plain


def test_two_generations_share_its_pages(tiny_artifact: Get) -> None:
    """Where there are none left, one of them goes without drafts."""
    with opened(tiny_artifact("llama")) as engine, drafting(tiny_artifact("llama"), 80) as small:
        alone = run(engine, GREEDY)
        both = [
            engine.generate(PROMPT, GREEDY, speculate=5, drafter=ModelDrafter(small))
            for _ in range(2)
        ]
        for wanted in alone.tokens:
            assert [next(steps) for steps in both] == [wanted, wanted]
        for steps in both:
            assert list(steps) == []
        assert small.prefixes.longest(recorded(alone)) >= len(PROMPT)


def test_a_later_generation_reads_what_is_new(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine, drafting(tiny_artifact("llama")) as small:
        first = run(engine, GREEDY, 4, ModelDrafter(small))
        kept = small.prefixes.longest(recorded(first))
        assert kept >= len(PROMPT) + 20
        longer = [*recorded(first), 5, 6]
        plain = run(engine, SAMPLED, prompt=longer)
        assert run(engine, SAMPLED, 4, ModelDrafter(small), longer) == plain


def test_several_drafters_in_their_order(tiny_artifact: Get, other: Artifact) -> None:
    with opened(tiny_artifact("llama")) as engine, drafting(other) as small:
        for params in (GREEDY, SAMPLED):
            plain = run(engine, params, prompt=PROMPT[:9] * 5)
            for depth in (1, 4, "auto"):
                both = [Lookup(engine.context), ModelDrafter(small)]
                found = run(engine, params, depth, both, PROMPT[:9] * 5)  # type: ignore[arg-type]
                assert found == plain


@pytest.mark.parametrize("cancel", [False, True], ids=["closed", "cancelled"])
def test_an_end_in_the_middle(tiny_artifact: Get, cancel: bool) -> None:
    with opened(tiny_artifact("llama")) as engine, drafting(tiny_artifact("llama")) as small:
        for end in range(1, 9):
            plain = run(engine, GREEDY, end=end, cancel=cancel)
            drafter = ModelDrafter(small)
            assert run(engine, GREEDY, 5, drafter, end=end, cancel=cancel) == plain


def test_a_draft_model_that_changes_is_left_out(tiny_artifact: Get, tmp_path: Path) -> None:
    """What it says changes no token, and neither does that it says nothing any more."""
    shutil.copytree(tiny_artifact("llama").path, tmp_path / "a")
    weights = tmp_path / "a" / "dense-00001.safetensors"
    with opened(tiny_artifact("llama")) as engine, drafting(open_artifact(tmp_path / "a")) as small:
        plain, tokens = run(engine, GREEDY), []

        def meanwhile() -> None:
            tokens.append(0)
            if len(tokens) == 8:
                with weights.open("r+b") as file:
                    file.seek(-100, 2)
                    file.write(bytes(range(1, 60)))

        with pytest.warns(RuntimeWarning, match="the draft model is left out"):
            assert run(engine, GREEDY, 3, ModelDrafter(small), meanwhile=meanwhile) == plain
        assert engine.stats is not None
        assert 0 < engine.stats.drafted_tokens < 12
