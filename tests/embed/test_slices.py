"""The law for steps: any layer budget, any company and any tier give the tokens, KV bytes and counts of whole steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from embed.frames import CONTEXT, PROMPT, generated, kv_bytes, opened, plain, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.embed import errors
from headrace.kernels.select import TIERS

Get = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Five layers."""
    return tiny.make(tmp_path_factory.mktemp("deep") / "deep", "qwen3", num_hidden_layers=5)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.MIXTURES])
def test_steps_are_what_the_engine_computes(tiny_artifact: Get, family: str) -> None:
    artifact = tiny_artifact(family)
    wanted, kv = plain(artifact, PROMPT, 6)
    with opened(artifact) as frame:
        for budget in (1, 99):
            with frame.new(PROMPT) as sequence:
                assert generated(frame, sequence, 6, budget) == wanted
                assert kv_bytes(sequence) == kv


@pytest.mark.parametrize("budget", range(1, 7))
def test_every_budget(deep: Artifact, budget: int) -> None:
    with opened(deep) as frame, frame.new(PROMPT) as whole, frame.new(PROMPT) as sliced:
        assert generated(frame, whole, 5) == generated(frame, sliced, 5, budget)
        assert whole.save() == sliced.save()
        steps = []
        while not isinstance(outcome := step(frame, sliced, budget), embed.Token):
            steps.append(outcome)
        assert steps == [embed.MidToken(d) for d in range(budget, 5, budget)]
        assert generated(frame, whole, 1) == [outcome.id]
        assert whole.save() == sliced.save()


@pytest.mark.parametrize("kernels", TIERS)
@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_every_tier(tiny_artifact: Get, family: str, kernels: str) -> None:
    artifact = tiny_artifact(family)
    wanted, kv = plain(artifact, PROMPT[:20], 3)
    with opened(artifact, kernels) as frame, frame.new(PROMPT[:20]) as sequence:
        assert generated(frame, sequence, 3, 1) == wanted
        assert kv_bytes(sequence) == kv


@pytest.mark.parametrize("slots", [9, 20, None])
def test_experts_that_do_not_all_fit(tiny_artifact: Get, slots: int | None) -> None:
    artifact = tiny_artifact("qwen3_moe")
    wanted, kv = plain(artifact, PROMPT, 4)
    with opened(artifact, expert_slots=slots) as frame, frame.new(PROMPT) as sequence:
        assert generated(frame, sequence, 4, 1) == wanted
        assert kv_bytes(sequence) == kv
        assert frame.model.expert_bytes > 0


@pytest.mark.parametrize("chunk", [1, 16, 33, 200])
def test_chunks_of_a_prompt(tiny_artifact: Get, chunk: int) -> None:
    with opened(tiny_artifact("llama"), max_chunk=chunk) as frame, frame.new(PROMPT) as sequence:
        blob = sequence.save()
        with frame.new() as alone:
            for token in PROMPT:
                embed.prefill(alone, [token], frame.space)
            assert alone.save() == blob


@pytest.mark.parametrize("name", ["deep", "qwen2_moe"])
def test_a_batch_at_different_depths_is_each_alone(
    deep: Artifact, tiny_artifact: Get, name: str
) -> None:
    artifact = deep if name == "deep" else tiny_artifact(name)
    prompts = [PROMPT[:20], PROMPT[20:37], PROMPT[40:41]]
    with opened(artifact) as frame:
        alone = []
        for prompt in prompts:
            with frame.new(prompt) as sequence:
                generated(frame, sequence, 6)
                alone.append(sequence.save())
        lines = [frame.new(prompt) for prompt in prompts]
        counts = [0, 0, 0]
        for index, line in enumerate(lines):  # to different depths
            for _ in range(index + 2):
                counts[index] += isinstance(step(frame, line, 1), embed.Token)
        budgets = iter([2, 1, 3, 1] * 50)
        while min(counts) < 6:
            going = [i for i in range(3) if counts[i] < 6]
            found = embed.decode_step([lines[i] for i in going], next(budgets), frame.space)
            for index, outcome in zip(going, found, strict=True):
                counts[index] += isinstance(outcome, embed.Token)
        assert [line.save() for line in lines] == alone


def test_a_pending_token_is_read_by_the_next_prefill(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, frame.new(PROMPT[:9]) as sequence:
        token = generated(frame, sequence, 1)[0]
        assert sequence.tokens == (*PROMPT[:9], token)
        assert embed.prefill(sequence, [5, 6], frame.space) == 2
        assert sequence.stats().tokens == 12
        with frame.new([*PROMPT[:9], token, 5, 6]) as other:
            assert kv_bytes(other) == kv_bytes(sequence)
            assert generated(frame, other, 3) == generated(frame, sequence, 3)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 99])
def test_the_last_token_of_a_prompt_in_slices(deep: Artifact, budget: int, length: int) -> None:
    """It is given, not read; steps read it like a token that they have chosen."""
    with opened(deep) as frame, frame.new(PROMPT[:length]) as whole:
        sequence = frame.new(PROMPT[: length - 1])
        for wrong in (-1, frame.model.vocab_size):
            with pytest.raises(errors.TokenRangeError):
                sequence.embed_token(wrong)
        with pytest.raises(errors.InvalidArgumentError):
            sequence.embed_token(1.5)  # type: ignore[arg-type]
        sequence.embed_token(PROMPT[length - 1])
        with pytest.raises(errors.MidTokenError):
            sequence.embed_token(1)
        with frame.new() as other:
            other.restore(sequence.save())
            embed.prefill(other, [9], frame.space)
            assert other.tokens == (*PROMPT[:length], 9)
        assert generated(frame, sequence, 3, budget) == generated(frame, whole, 3)
        assert kv_bytes(sequence) == kv_bytes(whole)


def test_to_the_last_position(tiny_artifact: Get) -> None:
    """A full context gives one more token, and then refuses, again and again."""
    with opened(tiny_artifact("llama"), context=20) as frame, frame.new(PROMPT[:18]) as sequence:
        assert len(generated(frame, sequence, 3, 1)) == 3
        before = sequence.save()
        for _ in range(2):
            refused = step(frame, sequence)
            assert isinstance(refused, embed.Refused)
            assert isinstance(refused.error, embed.errors.ContextExceededError)
        assert sequence.save() == before


def test_what_a_step_says_of_its_layers(deep: Artifact) -> None:
    with opened(deep) as frame, frame.new(PROMPT[:5]) as sequence:
        step(frame, sequence)  # the finish alone
        assert (sequence.stats().decode_step_ceiling, sequence.stats().layers_run) == (0, 0)
        step(frame, sequence, 3)
        assert (sequence.stats().decode_step_ceiling, sequence.stats().layers_run) == (3, 3)
        step(frame, sequence, 3)
        assert (sequence.stats().decode_step_ceiling, sequence.stats().layers_run) == (3, 2)
        assert sequence.stats().total_layers == 5
        assert sequence.stats().kv_blocks == 1
        assert frame.model.context == CONTEXT


def test_equal_logits_go_to_the_lowest_token(tmp_path: Path) -> None:
    """A head of equal rows: all tokens are as likely on every path."""
    checkpoint = tiny.write_checkpoint(tmp_path / "source", "mistral")
    weights = tiny.state(tiny.config("mistral"))
    weights["lm_head.weight"][:] = weights["lm_head.weight"][0]
    tiny.write_tensors(checkpoint / "model.safetensors", weights)
    with (
        opened(convert(checkpoint, tmp_path / "artifact")) as frame,
        frame.new(PROMPT[:4]) as sequence,
    ):
        assert generated(frame, sequence, 2, 1) == [0, 0]
