"""A saved sequence is restored exactly or refused by its cause, with the engine as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.artifact.container import Artifact
from headrace.engine import blob as blobs
from headrace.engine.engine import Engine
from headrace.engine.pages import PagesExhaustedError
from headrace.errors import ContextError, HeadraceError
from headrace.kernels.select import TIERS, unavailable
from headrace.values import SamplingParams

Get = Callable[[str], Artifact]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=8)


@pytest.fixture(scope="module")
def engine(tiny_artifact: Get) -> Iterator[Engine]:
    with Engine(tiny_artifact("llama"), threads=1, max_context=192, num_sequences=2) as made:
        yield made


def saved(engine: Engine, length: int) -> bytes:
    sequence = engine.new_sequence()
    if length:
        engine.read(sequence, PROMPT[:length])
    blob = engine.save(sequence)
    sequence.release()
    return blob


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 128, 150])
def test_a_restored_sequence_is_the_saved_one(engine: Engine, length: int) -> None:
    blob = saved(engine, length)
    restored = engine.restore(blob + b"whatever lies behind it")
    assert list(restored.tokens) == PROMPT[:length]
    assert engine.save(restored) == blob
    prompt = [*PROMPT[:length], 5, 6]
    tokens = [t.id for t in engine.generate(prompt, PARAMS, sequence=restored)]
    assert engine.stats is not None
    assert engine.stats.reused_tokens == min(length, len(prompt) - 1)
    fingerprint = engine.stats.fingerprint
    restored.release()
    assert tokens == [t.id for t in engine.generate(prompt, PARAMS, reuse=False)]
    assert engine.stats.fingerprint == fingerprint
    assert engine.pages.num_used == 0


@pytest.mark.parametrize("kernels", TIERS)
def test_every_tier_and_thread_count_writes_and_reads_the_same(
    tiny_artifact: Get, engine: Engine, kernels: str
) -> None:
    if reason := unavailable().get(kernels, ""):
        pytest.skip(f"tier {kernels}: {reason}")
    wanted = saved(engine, 70)
    with Engine(tiny_artifact("llama"), kernels=kernels, threads=3, max_context=128) as other:
        assert saved(other, 70) == wanted
        restored = other.restore(wanted)
        logits = other.read(restored, [9]).copy()
    alone = engine.new_sequence()
    assert np.array_equal(engine.read(alone, [*PROMPT[:70], 9]), logits)
    alone.release()


def test_another_process(tiny_artifact: Get, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "sequence"
    file.write_bytes(saved(engine, 100))
    script = (
        "import sys; from pathlib import Path\n"
        "from headrace.artifact.container import open_artifact\n"
        "from headrace.engine.engine import Engine\n"
        "with Engine(open_artifact(Path(sys.argv[1])), max_context=256, threads=2) as engine:\n"
        "    sequence = engine.restore(Path(sys.argv[2]).read_bytes())\n"
        "    print(len(sequence), engine.read(sequence, [4]).tobytes().hex())\n"
    )
    command = [sys.executable, "-c", script, str(tiny_artifact("llama").path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    alone = engine.new_sequence()
    wanted = engine.read(alone, [*PROMPT[:100], 4]).tobytes().hex()
    alone.release()
    assert done.stdout.split() == ["100", wanted]


def test_what_a_rewind_left_behind_is_not_saved(engine: Engine) -> None:
    sequence = engine.new_sequence()
    engine.read(sequence, PROMPT)
    sequence.rewind(70)
    assert engine.save(sequence) == saved(engine, 70)
    sequence.release()


def test_every_flipped_byte_and_every_cut_is_refused(engine: Engine) -> None:
    blob = saved(engine, 3)
    other = engine.new_sequence()
    engine.read(other, PROMPT[:20])
    before = (engine.save(other), engine.pages.num_used)
    for at in range(len(blob)):
        with pytest.raises((blobs.BlobDamagedError, blobs.BlobVersionError)):
            engine.restore(blob[:at] + bytes([blob[at] ^ (1 << at % 8)]) + blob[at + 1 :])
        with pytest.raises(blobs.BlobTruncatedError):
            engine.restore(blob[:at])
    assert (engine.save(other), engine.pages.num_used) == before
    other.release()


def test_another_model_salt_or_version_is_refused(
    tiny_artifact: Get, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = saved(engine, 20)
    with Engine(tiny_artifact("qwen3"), max_context=128) as other:
        with pytest.raises(blobs.BlobModelError, match="another model"):
            other.restore(blob)
        assert other.pages.num_used == 0
    with pytest.raises(blobs.BlobModelError, match="another adapter"):
        engine.restore(blob, salt=b"adapter")
    for name, version in (("BLOB_VERSION", 2), ("ARITHMETIC_VERSION", ARITHMETIC_VERSION + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(blobs, name, version)
            newer = saved(engine, 20)
        with pytest.raises(blobs.BlobVersionError, match=f" version {version}"):
            engine.restore(newer)


def test_no_room_is_refused(tiny_artifact: Get, engine: Engine) -> None:
    blob = saved(engine, 150)
    with Engine(tiny_artifact("llama"), max_context=100) as small:
        with pytest.raises(ContextError):
            small.restore(blob)
        assert small.pages.num_used == 0
    held = [engine.restore(blob), engine.restore(blob)]
    with pytest.raises(PagesExhaustedError):
        engine.restore(blob)
    for sequence in held:
        sequence.release()


@pytest.mark.parametrize("count", [0, 2**31, 2**63, 2**64 - 1])
def test_impossible_lengths_in_a_whole_header(engine: Engine, count: int) -> None:
    """With a right digest: made on purpose."""
    blob = saved(engine, 20)
    header = blob[: blobs._HEADER.size - 8] + count.to_bytes(8, "little")
    digest = blobs.hashlib.sha256(header).digest()
    with pytest.raises(HeadraceError, match="damaged|of [0-9,]+ bytes"):
        engine.restore(header + digest + blob[len(header) + 32 :])
    assert engine.pages.num_used == 0


def test_a_restored_prefix_can_be_kept_for_later_prompts(engine: Engine) -> None:
    restored = engine.restore(saved(engine, 100))
    engine.prefixes.keep(restored)
    restored.release()
    warm = [t.id for t in engine.generate(PROMPT, PARAMS)]
    assert engine.stats is not None
    assert engine.stats.reused_tokens == 100
    assert warm == [t.id for t in engine.generate(PROMPT, PARAMS, reuse=False)]
    engine.prefixes.clear()
