"""What fails from outside: a file, the process's memory, a hook of its own accord. Nothing is lost, and it goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tiny
from embed.frames import PROMPT, generated, opened, step
from engine.test_mixture import instead
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.embed import errors
from headrace.errors import ExpertReadError, FileError

Get = Callable[[str], Artifact]
Task = Callable[[int], None]


def test_an_expert_that_cannot_be_read(tmp_path: Path) -> None:
    artifact = tiny.make(tmp_path / "model", "qwen3_moe")
    with opened(artifact, expert_slots=8) as frame:
        with frame.new(PROMPT) as plain:
            wanted = generated(frame, plain, 6), plain.save()
        sequence, stream = frame.new(PROMPT), frame.model.experts
        assert stream is not None
        file = artifact.records[0].path
        short = file.with_name("short")
        short.write_bytes(file.read_bytes()[: artifact.records[1].offset])  # layer 1 is gone
        mend = instead(stream.store._files[file].fd, short)
        with pytest.raises(ExpertReadError):
            generated(frame, sequence, 99, 1)
        mend()
        assert sequence.depth == 1  # the end of layer 0
        tokens = list(sequence.tokens[len(PROMPT) :])
        tokens += generated(frame, sequence, 6 - len(tokens), 1)
        assert (tokens, sequence.save()) == wanted


def test_weights_that_change_under_a_step(tmp_path: Path) -> None:
    artifact = tiny.make(tmp_path / "model", "llama")
    file = next(iter(sorted(artifact.path.glob("*.safetensors"))))
    with opened(artifact) as frame, frame.new(PROMPT) as sequence:
        generated(frame, sequence, 1)
        before, whole = sequence.save(), file.read_bytes()
        with file.open("r+b") as opened_file:
            opened_file.seek(len(whole) - 1)
            opened_file.write(bytes([whole[-1] ^ 1]))
        for call in (
            lambda: step(frame, sequence),
            lambda: embed.prefill(sequence, [1], frame.space),
        ):
            with pytest.raises(FileError):
                call()
        assert sequence.tokens == (*PROMPT, sequence.tokens[-1])
        with file.open("r+b") as opened_file:
            opened_file.seek(len(whole) - 1)
            opened_file.write(whole[-1:])
        with frame.new() as other:
            other.restore(before)
            assert generated(frame, other, 2) == generated(frame, sequence, 2)


@pytest.mark.parametrize("wrong", [MemoryError("no memory"), RuntimeError("of the host")])
def test_what_a_hook_raises(wide: Artifact, wrong: Exception) -> None:
    def run(count: int, task: Task) -> None:
        raise wrong

    kind = errors.AllocationError if isinstance(wrong, MemoryError) else RuntimeError
    with opened(wide) as frame, frame.new(PROMPT) as sequence:
        before = sequence.save()
        frame.space.set_parallel_for(embed.ParallelFor(run, 4, matvec=True))
        with pytest.raises(kind, match=str(wrong)):
            step(frame, sequence)
        with pytest.raises(kind) as caught:
            embed.prefill(sequence, [1], frame.space)
        assert vars(caught.value)["consumed"] == 0
        frame.space.set_parallel_for(None)
        with frame.new() as other:
            other.restore(before)
            assert generated(frame, other, 2) == generated(frame, sequence, 2)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_a_prefill_keeps_the_chunks_before_a_failure(wide: Artifact, good: int) -> None:
    """With chunks of one token, each of which asks the hook twice a layer."""
    calls = 0

    def run(count: int, task: Task) -> None:
        nonlocal calls
        calls += 1
        for index in range(count if calls <= 6 * good else count - 1):
            task(index)

    with opened(wide, max_chunk=1, max_batch=1) as frame, frame.new(PROMPT[:3]) as sequence:
        wanted = frame.new(PROMPT[: 3 + good])
        frame.space.set_parallel_for(embed.ParallelFor(run, 4, matvec=True))
        with pytest.raises(errors.ParallelForIncompleteError) as caught:
            embed.prefill(sequence, PROMPT[3:12], frame.space)
        frame.space.set_parallel_for(None)
        assert caught.value.consumed == good
        assert sequence.stats() == wanted.stats()
        with pytest.raises(errors.HiddenUnavailableError):
            sequence.read_prefill_final_hidden()
        assert generated(frame, sequence, 2) == generated(frame, wanted, 2)


def test_counts_of_clipped_values_are_each_sequences_own(tmp_path: Path) -> None:
    """A model whose sums clip: counts are of the sequence alone, in any slices and company."""
    checkpoint = tiny.write_checkpoint(tmp_path / "source", "llama", num_hidden_layers=3)
    weights = tiny.state(tiny.config("llama", num_hidden_layers=3))
    for name, weight in weights.items():
        if name.endswith(("down_proj.weight", "q_proj.weight")):
            weights[name] = (weight * 2.0**12).astype(np.float32)
    tiny.write_tensors(checkpoint / "model.safetensors", weights)
    with opened(convert(checkpoint, tmp_path / "artifact")) as frame:
        prompts = [PROMPT[:7], PROMPT[20:33], PROMPT[40:45]]
        alone = []
        for prompt in prompts:
            with frame.new(prompt) as sequence:
                generated(frame, sequence, 4)
                alone.append(sequence.stats().saturations)
        assert all(sum(counts.values()) for counts in alone)
        assert len({sum(counts.values()) for counts in alone}) == 3
        for budget in (1, 2, 3):
            lines = [frame.new(prompt) for prompt in prompts]
            counts = [0] * 3
            while min(counts) < 4:
                going = [i for i in range(3) if counts[i] < 4]
                found = embed.decode_step([lines[i] for i in going], budget, frame.space)
                for index, outcome in zip(going, found, strict=True):
                    counts[index] += isinstance(outcome, embed.Token)
            assert [line.stats().saturations for line in lines] == alone
            for line in lines:
                with frame.new() as other:
                    other.restore(line.save())
                    assert other.stats().saturations == line.stats().saturations
                line.reset()
                assert not any(line.stats().saturations.values())
                line.release()


def test_whatever_stops_a_prefill_says_how_much_was_read(tmp_path: Path) -> None:
    """A file that changes, a hook's own exception, an interrupt in it: after the second of some chunks."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    artifact = tiny.make(tmp_path / "model", "llama", **sizes)
    file = next(iter(sorted(artifact.path.glob("*.safetensors"))))
    whole = file.read_bytes()

    def write(last: int) -> None:
        with file.open("r+b") as opened_file:
            opened_file.seek(len(whole) - 1)
            opened_file.write(bytes([last]))

    for kind in (FileError, RuntimeError, KeyboardInterrupt, MemoryError):
        with opened(artifact, max_chunk=1, max_batch=1) as frame, frame.new([1]) as sequence:
            tokens: list[int] = []

            def run(count: int, task: Task, kind: type = kind, line: list[int] = tokens) -> None:
                for index in range(count):
                    task(index)
                if len(sequence.tokens) == 3:
                    if kind is not FileError:
                        raise kind("here")
                    write(whole[-1] ^ 1)

            frame.space.set_parallel_for(embed.ParallelFor(run, 4, matvec=True))
            wanted = errors.AllocationError if kind is MemoryError else kind
            with pytest.raises(wanted) as caught:
                embed.prefill(sequence, [2, 3, 4, 5], frame.space)
            write(whole[-1])
            assert vars(caught.value)["consumed"] == 2
            assert sequence.tokens == (1, 2, 3)
