"""What cannot be an argument is refused as one, by a class of the table, with everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from embed.frames import PROMPT, Frame, generated, make_pool, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors

Get = Callable[[str], Artifact]
Task = Callable[[int], None]


@pytest.fixture
def frame(tiny_artifact: Get) -> Iterator[Frame]:
    with opened(tiny_artifact("llama")) as made:
        yield made


def test_values_of_other_types(frame: Frame) -> None:
    model, pool, space = frame.model, frame.pool, frame.space
    none: Any = None
    text: Any = "x"
    number: Any = 5
    empty: Any = []
    with frame.new([1, 2]) as s, frame.new() as new:
        before = s.save()
        calls: list[Callable[[], object]] = [
            lambda: embed.prefill(s, [1], none),
            lambda: embed.prefill(number, [1], space),
            lambda: embed.prefill(s, "ab", space),  # type: ignore[arg-type]
            lambda: embed.prefill(s, b"ab", space),
            lambda: embed.decode_step([s], 1, none),
            lambda: embed.decode_step(s, 1, space),  # type: ignore[arg-type]
            lambda: embed.decode_step({s}, 1, space),  # type: ignore[arg-type]
            lambda: embed.decode_step((x for x in [s]), 1, space),  # type: ignore[arg-type]
            lambda: embed.decode_step_v2([s], none, space),
            lambda: new.set_schema(text),
            lambda: new.set_adapter(text),
            lambda: new.restore(before, schema=text),
            lambda: new.restore(before, adapter=text),
            lambda: embed.Adapter(model, number),
            lambda: embed.Adapter(none, "x"),
            lambda: embed.Model(number),
            lambda: embed.Model(model.artifact, kernels="bogus"),
            lambda: embed.Model(model.artifact, kernels=number),
            lambda: embed.Model(model.artifact, threads=0),
            lambda: model.schema(empty),
            lambda: model.compile_schema(regex=number),
            lambda: model.compile_schema(grammar=number),
            lambda: model.detokenize_stream().push(text),
            lambda: model.detokenize_stream().push(1.5),  # type: ignore[arg-type]
            lambda: embed.Sequence(number),
            lambda: embed.Prefix(none),
            lambda: embed.workspace_size(none),
            lambda: embed.kv_block_size(none),
            lambda: embed.kv_pool_overhead(none, 1),
            lambda: embed.seq_state_size(none),
            lambda: embed.decode_params(none, "greedy", 1),
            lambda: embed.decode_params(model, empty, 1),
        ]
        for index, call in enumerate(calls):
            with pytest.raises(errors.InvalidArgumentError):
                print(index, call())
        assert s.save() == before
        new.set_schema(None)  # still new
        assert model.live == {
            "sequences": 2, "prefixes": 0, "adapters": 0, "pools": 1, "workspaces": 1
        }  # fmt: skip
        assert pool.num_sequences == 2


@pytest.mark.parametrize("size", [2**60, 2**80])
def test_memory_that_nobody_has(size: int) -> None:
    with pytest.raises(errors.AllocationError):
        embed.aligned(size)


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("bad", [-1, 2**31, 2**32, 2**63, 2**70, -(2**70)])
def test_ids_beyond_all_words(frame: Frame, bad: int, content: bool) -> None:
    schema = frame.model.compile_schema(regex="[a-f]{9}")
    first = frame.model.tokenize("abc")
    for before in ([], first[:1], first[:2]):
        with frame.new() as sequence, frame.new() as wanted:
            for line in (sequence, wanted):
                line.set_schema(schema)
                embed.prefill(line, [1], frame.space)
            with pytest.raises(errors.TokenRangeError) as caught:
                embed.prefill(sequence, [*before, bad], frame.space, content=content)
            assert caught.value.consumed == len(before)
            embed.prefill(wanted, before, frame.space, content=content)
            assert sequence.stats() == wanted.stats()
            assert generated(frame, sequence, 2) == generated(frame, wanted, 2)


def test_numbers_of_numpy(frame: Frame) -> None:
    budget: Any = np.int64(1)
    assert embed.DecodeParams(budget) == embed.DecodeParams(1)
    array: Any = np.array(PROMPT[:5], np.int32)
    with frame.new() as one, frame.new(PROMPT[:5]) as two:
        embed.prefill(one, array, frame.space)
        assert embed.decode_step([one], budget, frame.space) == [step(frame, two)]
    assert frame.model.detokenize_stream().push(np.int64(frame.model.tokenize("a")[0])) == "a"  # type: ignore[arg-type]
    with pytest.raises(errors.LayerBudgetError):
        embed.DecodeParams(np.int64(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["greedy", "damped"])
@pytest.mark.parametrize("wrong", [{"bogus": 1}, {"top_k": 10**6}, {"alpha_q15": -1}, {"top_k": 0}])
def test_parameters_of_either_mode(frame: Frame, mode: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        embed.decode_params(frame.model, mode, 1, **wrong)


def test_hooks(wide: Artifact) -> None:
    def run(count: int, task: Task) -> None:
        kept.append(task)
        for index in range(count):
            task(index)

    kept: list[Task] = []
    with opened(wide) as frame, frame.new(PROMPT[:5]) as sequence:
        tasks: Any
        for tasks in (2.5, True, "2", None, 2**70):
            with pytest.raises(errors.ParallelForInvalidError):
                frame.space.set_parallel_for(embed.ParallelFor(run, tasks))
        for function in (None, 5):
            with pytest.raises(errors.ParallelForInvalidError):
                frame.space.set_parallel_for(embed.ParallelFor(function, 1))  # type: ignore[arg-type]
        frame.space.set_parallel_for(embed.ParallelFor(run, 4))
        step(frame, sequence)
        with pytest.raises(errors.ParallelForIncompleteError):
            kept[0](0)  # too late


def test_what_a_block_raises_is_what_is_told(tiny_artifact: Get) -> None:
    """Though what it left alive keeps the model from being unmapped."""
    artifact = tiny_artifact("llama")
    with pytest.raises(RuntimeError, match="of the program"), embed.Model(artifact) as model:  # noqa: PT012
        pool = make_pool(model)
        sequence = embed.Sequence(pool)
        raise RuntimeError("of the program")
    with pytest.raises(RuntimeError, match="of the program"), pool:
        raise RuntimeError("of the program")
    with pytest.raises(errors.PoolHasSequencesError), pool:
        pass
    sequence.release()
    with pool:
        pass
    with model:
        pass
    assert not any(model.live.values())


def test_every_property_of_what_was_released(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame:
        sequence, prefix, model = frame.new([1]), embed.Prefix(frame.pool), frame.model
        for line in (sequence, prefix):
            line.release()
            assert not line.live
            calls: list[Callable[[], object]] = [
                lambda line=line: line.tokens,  # type: ignore[misc]
                lambda line=line: line.room,  # type: ignore[misc]
                lambda line=line: line.adapter_history,  # type: ignore[misc]
                lambda line=line: line.__enter__(),  # type: ignore[misc]
                line.stats,
                line.read_prefill_final_hidden,
            ]
            for call in calls:
                with pytest.raises(errors.ReleasedError, match=f"the {line.name} was"):
                    call()
        with pytest.raises(errors.ReleasedError):
            _ = sequence.schema_bound
        pool, space = frame.pool, frame.space
        pool.destroy()
        space.destroy()
        model.unmap()
        for ended in (
            lambda: pool.num_blocks,
            lambda: pool.blocks_used,
            lambda: pool.num_sequences,
            pool.__enter__,
            space.__enter__,
            model.__enter__,
            lambda: model.tokenize("a"),
            lambda: model.schema("x"),
            lambda: model.compile_schema(regex="a"),
            model.detokenize_stream,
        ):
            with pytest.raises(errors.ReleasedError):
                ended()
        assert (model.vocab_size, len(model.identity)) == (
            272,
            64,
        )  # what it was can still be asked
