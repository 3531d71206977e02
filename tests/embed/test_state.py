"""A saved sequence is restored exactly, in any state, or refused by its cause with everything as it was."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from embed.frames import PROMPT, Frame, generated, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors, state
from headrace.engine.adapters import History
from headrace.kernels.select import TIERS

Get = Callable[[str], Artifact]


def in_state(frame: Frame, name: str) -> embed.Sequence:
    """A sequence that rests where its name says."""
    sequence = frame.new([] if name == "empty" else PROMPT)
    if name in ("pending", "mid", "read"):
        generated(frame, sequence, 2, 1)
    if name == "mid":
        assert step(frame, sequence, 1) == embed.MidToken(1)
    if name == "read":
        embed.prefill(sequence, [1, 2], frame.space)
    return sequence


STATES = ("empty", "ready", "pending", "mid", "read")


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_restored_is_never_stopped(tiny_artifact: Get, family: str, name: str) -> None:
    with opened(tiny_artifact(family)) as frame:
        sequence = in_state(frame, name)
        blob = sequence.save()
        assert len(blob) <= embed.seq_state_size(frame.model)
        with frame.new(PROMPT[3:20]) as other:
            other.restore(blob + b"what lies behind it")
            assert other.save() == blob
            assert other.tokens == sequence.tokens
            assert other.stats().saturations == sequence.stats().saturations
            if name == "empty":
                embed.prefill(other, PROMPT, frame.space)
                embed.prefill(sequence, PROMPT, frame.space)
            else:
                with pytest.raises(errors.SchemaBindError):
                    other.set_schema(None)
            assert generated(frame, other, 3, 1) == generated(frame, sequence, 3)
            assert other.save() == sequence.save()
            if name != "empty":
                assert (other.has_hidden, sequence.has_hidden) == (True, True)
                hidden = [s.read_prefill_final_hidden() for s in (other, sequence)]
                assert (hidden[0].values == hidden[1].values).all()


@pytest.mark.parametrize("kernels", TIERS)
def test_every_tier_and_thread_count(tiny_artifact: Get, kernels: str) -> None:
    artifact = tiny_artifact("qwen3")
    with opened(artifact) as frame:
        sequence = in_state(frame, "mid")
        blob = sequence.save()
        wanted = generated(frame, sequence, 2), sequence.save()
    threads = 1 if kernels == "reference" else 3
    with opened(artifact, kernels, threads=threads, context=128) as other, other.new() as restored:
        restored.restore(blob)
        assert (generated(other, restored, 2, 1), restored.save()) == wanted


def test_another_process_in_mid_layer(tiny_artifact: Get, tmp_path: Path) -> None:
    file = tmp_path / "state"
    with opened(tiny_artifact("llama")) as frame:
        sequence = in_state(frame, "mid")
        file.write_bytes(sequence.save())
        wanted = generated(frame, sequence, 3), hashlib.sha256(sequence.save()).hexdigest()
    script = (
        "import sys, hashlib; from pathlib import Path\n"
        "from headrace.artifact.container import open_artifact\n"
        "from embed.frames import opened, generated\n"
        "with opened(open_artifact(Path(sys.argv[1])), 'reference') as frame:\n"
        "    sequence = frame.new()\n"
        "    sequence.restore(Path(sys.argv[2]).read_bytes())\n"
        "    print(generated(frame, sequence, 3), hashlib.sha256(sequence.save()).hexdigest())\n"
    )
    command = [sys.executable, "-c", script, str(tiny_artifact("llama").path), str(file)]
    here = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": here}
    )
    assert done.stdout.strip() == f"{wanted[0]} {wanted[1]}"


def test_every_flipped_byte_and_every_cut_is_refused(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame:
        source = frame.new([3, 4, 5])
        generated(frame, source, 1)
        step(frame, source, 1)
        blob = source.save()
        with frame.new(PROMPT[:20]) as target:
            before = target.save(), frame.pool.blocks_used
            for at in range(len(blob)):
                flipped = bytearray(blob)
                flipped[at] ^= 1 << at % 8
                with pytest.raises((errors.RestoreDamagedError, errors.RestoreVersionError)):
                    target.restore(flipped)
            for at in (*range(0, len(blob), 61), len(blob) - 1):
                with pytest.raises(errors.RestoreTruncatedError):
                    target.restore(memoryview(blob)[:at])
            assert (target.save(), frame.pool.blocks_used) == before
            target.restore(blob)  # nothing was poisoned
            assert generated(frame, target, 3) == generated(frame, source, 3)


def test_another_model_shape_or_version(
    tiny_artifact: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_artifact("llama")) as frame, frame.new(PROMPT) as sequence:
        blob = sequence.save()
        with opened(tiny_artifact("qwen2")) as other, other.new([1]) as target:
            before = target.save()
            with pytest.raises(errors.RestoreModelError):
                target.restore(blob)
            assert target.save() == before
        with opened(tiny_artifact("llama"), context=64) as small:
            target = small.new()
            with pytest.raises(errors.RestoreShapeError):
                target.restore(blob)
        for name, error in (
            ("STATE_VERSION", errors.RestoreVersionError),
            ("ARITHMETIC_VERSION", errors.RestoreVersionError),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(state, name, 99)
                newer = sequence.save()
            with pytest.raises(error, match="99"):
                sequence.restore(newer)
        with monkeypatch.context() as patch:
            patch.setattr(state, "PAGE_TOKENS", 32)
            other_shape = sequence.save()
        with pytest.raises(errors.RestoreShapeError):
            sequence.restore(other_shape)
        assert sequence.save() == blob


def test_a_blob_that_contradicts_itself_with_whole_digests(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, frame.new([1, 2, 3]) as sequence:
        blob = sequence.save()
        saved = state.unpack(memoryview(blob), frame.model)
        for changes in (
            {"depth": 1},
            {"ready": False, "residual": None},
            {"tokens": saved.tokens + 1000},
            {"marks": saved.marks + 4},
            {"marks": saved.marks + 1},
            {"history": History(((0, b"a" * 32),))},
            {"forced_tokens": 1},
            {"forced_tokens": 2**64 - 1},
            {"total_layers": 3 * frame.model.num_layers + 1},
            {"total_layers": 2**64 - 1},
            {"clips": saved.clips - 1},
            {"history": History(((1, b""),))},
            {"history": History(((0, b""), (5, b"a" * 32)))},
        ):
            forged = state.pack(frame.model, state.Saved(**{**vars(saved), **changes}))
            with pytest.raises(errors.ContentRefused):
                sequence.restore(forged)
        assert sequence.save() == blob


def test_no_room(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama"), num_blocks=3) as frame:
        long, target = frame.new(PROMPT), frame.new([1])  # two blocks and one
        blob, before = long.save(), target.save()
        with pytest.raises(errors.PoolFullError):
            target.restore(blob)
        assert target.save() == before
        long.restore(blob)  # into its own blocks
        assert long.save() == blob
        long.restore(before)
        target.restore(blob)
        assert (long.save(), target.save()) == (before, blob)


def test_into_a_callers_buffer(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as frame, frame.new(PROMPT) as sequence:
        room = bytearray(embed.seq_state_size(frame.model))
        size = sequence.save_into(room)
        assert room[:size] == sequence.save()
        sequence.restore(room)
        for small in (bytearray(size - 1), bytearray()):
            with pytest.raises(errors.BufferTooSmallError):
                sequence.save_into(small)
            assert not any(small)
        with pytest.raises(errors.InvalidArgumentError):
            sequence.save_into(bytes(size))
        with pytest.raises(errors.InvalidArgumentError):
            sequence.restore(5)
