"""Every refusal by its cause, with everything as it was."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from embed.frames import PROMPT, Frame, generated, make_pool, make_workspace, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Get = Callable[[str], Artifact]


@pytest.fixture
def frame(tiny_artifact: Get) -> Iterator[Frame]:
    with opened(tiny_artifact("llama")) as made:
        yield made


def every_error() -> set[type[errors.EmbedError]]:
    return {
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.EmbedError)
    }


def test_every_cause_has_a_code_of_its_own() -> None:
    codes = [error.code for error in every_error()]
    assert len(codes) == len(set(codes))


# ---- unmapping and destroying ---------------------------------------------------------------------


def test_a_model_with_something_alive_is_not_unmapped(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame:
        model = frame.model
        sequence, prefix = frame.new(), embed.Prefix(frame.pool)
        for error, end in (
            (errors.ModelHasSequencesError, sequence.release),
            (errors.ModelHasPrefixesError, prefix.release),
            (errors.ModelHasPoolsError, frame.pool.destroy),
            (errors.ModelHasWorkspacesError, frame.space.destroy),
        ):
            with pytest.raises(error):
                model.unmap()
            end()
            end()  # a second time does nothing
        assert set(model.live.values()) == {0}
        model.unmap()
        model.unmap()
        with pytest.raises(errors.ReleasedError):
            make_pool(model)
        with pytest.raises(errors.ReleasedError):
            make_workspace(model)


def test_a_pool_with_sequences_or_prefixes_is_not_destroyed(frame: Frame) -> None:
    for thing in (frame.new(), embed.Prefix(frame.pool)):
        with pytest.raises(errors.PoolHasSequencesError):
            frame.pool.destroy()
        thing.release()
    frame.pool.destroy()
    with pytest.raises(errors.ReleasedError):
        frame.new()


def test_what_was_released_does_nothing_more(frame: Frame) -> None:
    sequence = frame.new([1, 2])
    sequence.release()
    assert frame.pool.blocks_used == 0
    for call in (
        sequence.reset,
        sequence.save,
        sequence.stats,
        lambda: sequence.set_schema(None),
        lambda: sequence.set_adapter(None),
        lambda: embed.prefill(sequence, [1], frame.space),
        lambda: sequence.restore(b""),
    ):
        with pytest.raises(errors.ReleasedError):
            call()
    assert step(frame, sequence) == embed.Gone()
    frame.space.destroy()
    with frame.new() as other, pytest.raises(errors.ReleasedError):
        embed.prefill(other, [1], frame.space)


# ---- memory ---------------------------------------------------------------------------------------


def test_buffers(frame: Frame) -> None:
    model = frame.model
    size = embed.workspace_size(model, max_batch=2, max_chunk=8)

    def workspace(buffer: object) -> embed.Workspace:
        return embed.Workspace(model, buffer, max_batch=2, max_chunk=8)

    room = embed.aligned(size + 64)
    with pytest.raises(errors.MisalignedBufferError):
        workspace(room[4:])
    with pytest.raises(errors.BufferTooSmallError) as caught:
        workspace(room[: size - 1])
    assert (caught.value.needed_bytes, caught.value.given_bytes) == (size, size - 1)
    frozen = embed.aligned(size)
    frozen.flags.writeable = False
    for wrong in (frozen, room[::2], None, 5):
        with pytest.raises(errors.InvalidArgumentError):
            workspace(wrong)
    assert model.live["workspaces"] == 1
    with mmap.mmap(-1, size) as memory, workspace(memory):
        assert model.live["workspaces"] == 2
    overhead = embed.kv_pool_overhead(model, 2)
    for needed in (embed.kv_block_size(model), overhead):
        pool_room = embed.aligned(embed.kv_block_size(model) + overhead)
        with pytest.raises(errors.BufferTooSmallError):
            embed.KVPool(model, pool_room[:needed], num_blocks=1, max_sequences=2)
    with pytest.raises(errors.MisalignedBufferError):
        embed.KVPool(model, embed.aligned(2 * len(pool_room))[8:], num_blocks=1, max_sequences=2)


@pytest.mark.parametrize("value", [0, -1, True, "4", 2.0, 10**9])
def test_sizes_out_of_range(frame: Frame, value: object) -> None:
    for call in (
        lambda: embed.workspace_size(frame.model, max_batch=value),  # type: ignore[arg-type]
        lambda: embed.workspace_size(frame.model, max_chunk=value),  # type: ignore[arg-type]
        lambda: embed.kv_pool_overhead(frame.model, value),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.InvalidArgumentError):
            call()


def test_a_full_pool(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama"), num_blocks=2, max_sequences=2) as frame:
        first, second = frame.new(PROMPT[:64]), frame.new(PROMPT[:63])
        with pytest.raises(errors.PoolSequencesError):
            frame.new()
        before = second.save()
        with pytest.raises(errors.PoolFullError) as caught:
            embed.prefill(second, [1, 2], frame.space)
        assert (caught.value.consumed, second.save()) == (0, before[:0] + second.save())
        generated(frame, first, 1)
        generated(frame, second, 1)
        outcomes = embed.decode_step([first, second], 99, frame.space)
        assert isinstance(outcomes[0], embed.Refused)
        assert isinstance(outcomes[0].error, errors.PoolFullError)
        assert isinstance(outcomes[1], embed.Token)  # the other went on
        second.release()
        assert isinstance(step(frame, first), embed.Token)


# ---- prefill --------------------------------------------------------------------------------------


def test_a_token_that_is_none_ends_a_prefill_before_it(frame: Frame) -> None:
    for bad in (-1, frame.model.vocab_size, 2**40):
        with frame.new([9]) as sequence, frame.new([9, 1, 2]) as wanted:
            with pytest.raises(errors.TokenRangeError) as caught:
                embed.prefill(sequence, [1, 2, bad, 3], frame.space)
            assert caught.value.consumed == 2
            with pytest.raises(errors.HiddenUnavailableError):
                sequence.read_prefill_final_hidden()
            assert generated(frame, sequence, 2) == generated(frame, wanted, 2)


def test_the_first_token_that_is_none_changes_nothing_but_the_hidden_state(frame: Frame) -> None:
    with frame.new([9]) as sequence, frame.new([9]) as wanted:
        with pytest.raises(errors.TokenRangeError) as caught:
            embed.prefill(sequence, [-1], frame.space)
        assert caught.value.consumed == 0
        assert sequence.stats() == wanted.stats()
        with pytest.raises(errors.HiddenUnavailableError):
            sequence.read_prefill_final_hidden()
        assert generated(frame, sequence, 2) == generated(frame, wanted, 2)


def test_a_context_that_is_too_short(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama"), context=10) as frame, frame.new() as sequence:
        with pytest.raises(errors.ContextExceededError) as caught:
            embed.prefill(sequence, PROMPT[:12], frame.space)
        assert caught.value.consumed == 10 == sequence.stats().tokens
        with pytest.raises(errors.ContextExceededError) as caught:
            embed.prefill(sequence, [1], frame.space)
        assert caught.value.consumed == 0
        assert len(generated(frame, sequence, 1)) == 1


@pytest.mark.parametrize("tokens", [[1.5], ["a"], [[1]], None, [None], [True], 5])
def test_tokens_that_are_no_numbers(frame: Frame, tokens: list[int]) -> None:
    with frame.new([1]) as sequence:
        hidden = sequence.read_prefill_final_hidden()
        with pytest.raises(errors.InvalidArgumentError):
            embed.prefill(sequence, tokens, frame.space)
        assert np.array_equal(sequence.read_prefill_final_hidden().values, hidden.values)


def test_in_mid_token(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, frame.new([3, 4]) as sequence:
        step(frame, sequence)
        assert step(frame, sequence, 1) == embed.MidToken(1)
        before = sequence.save()
        for call in (
            lambda: embed.prefill(sequence, [1], frame.space),
            lambda: sequence.set_adapter(None),
        ):
            with pytest.raises(errors.MidTokenError):
                call()
        assert sequence.save() == before
        sequence.reset()
        assert sequence.stats().tokens == 0
        assert sequence.save() == frame.new().save()


# ---- decode ---------------------------------------------------------------------------------------


def test_budgets_and_parameters(frame: Frame) -> None:
    with frame.new([1]) as sequence:
        before = sequence.save()
        for budget in (0, -1):
            with pytest.raises(errors.LayerBudgetError):
                embed.decode_step([sequence], budget, frame.space)
        for wrong in (True, 1.0, "1", None):
            with pytest.raises(errors.InvalidArgumentError):
                embed.decode_step([sequence], wrong, frame.space)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError):
            embed.decode_params(frame.model, "sampled", 1)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgumentError):
            embed.DecodeParams(1, "damped")
        with pytest.raises(errors.InvalidArgumentError, match="made for 4"):
            embed.decode_step([sequence] * 5, 1, frame.space)
        assert sequence.save() == before


def test_refusals_of_single_sequences(frame: Frame) -> None:
    """Empty, twice in the batch, released: each its own outcome; the good one gets its token."""
    good, empty, gone = frame.new([1, 2]), frame.new(), frame.new([5])
    gone.release()
    wanted = generated(frame, frame.new([1, 2]), 1)[0]
    outcomes = embed.decode_step([empty, gone, good, good], 1, frame.space)
    assert [type(o) for o in outcomes] == [embed.Refused, embed.Gone, embed.Token, embed.Refused]
    assert outcomes[2] == embed.Token(wanted)
    assert [o.code for o in outcomes] == [-4, -3, wanted, -4]
    causes = [o.error for o in outcomes if isinstance(o, embed.Refused)]
    assert [type(c) for c in causes] == [errors.NothingToDecodeError, errors.BusyError]
    assert embed.decode_step([], 1, frame.space) == []
    empty.set_schema(None)  # a refused sequence is still new


def test_sequences_of_two_pools_are_no_batch(frame: Frame) -> None:
    other = make_pool(frame.model)
    with frame.new([1]) as one, embed.Sequence(other) as two:
        embed.prefill(two, [1], frame.space)
        with pytest.raises(errors.InvalidArgumentError):
            embed.decode_step([one, two], 1, frame.space)


# ---- artifacts and text ---------------------------------------------------------------------------


def test_what_is_no_artifact(tmp_path: Path, tiny_artifact: Get) -> None:
    with pytest.raises(errors.ArtifactRejectedError):
        embed.Model(tmp_path)
    with pytest.raises(errors.InvalidArgumentError):
        embed.Model(tiny_artifact("llama"), expert_slots=3)
    with pytest.raises(errors.InvalidArgumentError):
        embed.Model(tiny_artifact("llama"), max_context=10**6)


def test_text(frame: Frame) -> None:
    text = "grüße 🙂"
    ids = frame.model.tokenize(text)
    stream = frame.model.detokenize_stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == text
    assert "" in pieces  # a character is held until it is whole
    with pytest.raises(errors.TokenRangeError):
        stream.push(frame.model.vocab_size)
    with pytest.raises(errors.NoTokenTextError):
        stream.push(frame.model.vocab_size - 1)
    with pytest.raises(errors.InvalidArgumentError):
        frame.model.tokenize(5)  # type: ignore[arg-type]


# ---- the hidden state -----------------------------------------------------------------------------


def test_the_hidden_state_of_the_last_prefill(frame: Frame) -> None:
    with frame.new() as sequence:
        with pytest.raises(errors.HiddenUnavailableError):
            sequence.read_prefill_final_hidden()
        embed.prefill(sequence, PROMPT[:9], frame.space)
        hidden = sequence.read_prefill_final_hidden()
        assert hidden.values.shape == (frame.model.hidden_size,)
        generated(frame, sequence, 3, 1)  # changes nothing of it
        assert np.array_equal(sequence.read_prefill_final_hidden().values, hidden.values)
        embed.prefill(sequence, [], frame.space)
        assert np.array_equal(sequence.read_prefill_final_hidden().values, hidden.values)
        embed.prefill(sequence, [1], frame.space)
        assert not np.array_equal(sequence.read_prefill_final_hidden().values, hidden.values)
        sequence.reset()
        with pytest.raises(errors.HiddenUnavailableError):
            sequence.read_prefill_final_hidden()


def test_the_hidden_state_is_what_the_head_reads(tiny_artifact: Get) -> None:
    """Times the head's rows, it has its largest value where the next token is."""
    from headrace.arith import ops
    from headrace.kernels.layout import unpack
    from headrace.kernels.program import Project

    with opened(tiny_artifact("qwen3")) as frame, frame.new(PROMPT[:12]) as sequence:
        hidden, head = sequence.read_prefill_final_hidden(), frame.model.program.ops[-1]
        assert isinstance(head, Project)
        block = ops.quantize(hidden.values, hidden.exponent)
        logits = ops.project(block, unpack(head.weight), frame.model.fraction_bits).values
        assert step(frame, sequence) == embed.Token(int(logits.argmax()))
