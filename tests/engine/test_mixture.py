"""A mixture in the engine: a failed read ends one request and nothing else; resizes change no token."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from headrace.artifact.container import Artifact, open_artifact
from headrace.engine.engine import Engine
from headrace.errors import ExpertReadError, FileError, InputError
from headrace.experts.stream import StreamOptions
from headrace.kernels.program import READY
from headrace.llm import LLM
from headrace.memory.facts import plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.machine import read_machine
from headrace.values import SamplingParams
from interrupts import Interrupt

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(70)]
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
SMALL = StreamOptions(slots=6, max_slots=8, reserve=2)


@pytest.fixture
def artifact(tiny_artifact: Callable[[str], Artifact], tmp_path: Path) -> Artifact:
    """A copy that a test may damage."""
    return open_artifact(shutil.copytree(tiny_artifact("mixtral").path, tmp_path / "mixtral"))


def instead(fd: int, path: Path) -> Callable[[], None]:
    """Let a descriptor lead to another file; returns what undoes it."""
    kept, other = os.dup(fd), os.open(path, os.O_RDONLY)
    os.dup2(other, fd)
    os.close(other)

    def undo() -> None:
        os.dup2(kept, fd)
        os.close(kept)

    return undo


def tokens(engine: Engine) -> list[int]:
    return [token.id for token in engine.generate(PROMPT, SAMPLED, reuse=False)]


@pytest.mark.parametrize("kernels", ["portable", "reference"])
def test_a_failed_read_ends_only_its_request(artifact: Artifact, kernels: str) -> None:
    file = artifact.records[0].path
    whole = file.read_bytes()
    with Engine(artifact, kernels=kernels, max_context=256, experts=SMALL) as engine:
        wanted = tokens(engine)
        stream = engine.experts
        assert stream is not None
        short = file.with_name("short")
        short.write_bytes(whole[: artifact.records[1].offset])
        mend = instead(stream.store._files[file].fd, short)  # layer 1 is gone
        with pytest.raises(ExpertReadError, match=rf"layer 1, expert \d+: .*{file.name}") as found:
            [tokens(engine) for _ in range(4)]
        assert found.value.layer == 1
        for layer, expert in zip(*(stream.slots.table >= 0).nonzero(), strict=True):
            assert stream.slots.state[stream.slots.table[layer, expert]] == READY
            record = artifact.records[int(layer)]
            at = record.offset + int(expert) * record.layout.nbytes
            slot = stream.slots.memory[stream.slots.table[layer, expert]]
            assert slot[: record.layout.nbytes].tobytes() == whole[at : at + record.layout.nbytes]
        mend()
        assert tokens(engine) == wanted


def test_a_pool_of_everything_reads_each_expert_once(artifact: Artifact) -> None:
    with Engine(artifact, max_context=256) as engine:
        first = tokens(engine)
        stats = engine.expert_stats()
        assert stats is not None
        total = sum(r.num_experts * r.layout.nbytes for r in artifact.records)
        assert stats.bytes_read <= total
        assert tokens(engine) == first
        again = engine.expert_stats()
        assert again is not None
        assert again.bytes_read - stats.bytes_read <= total - stats.bytes_read
        assert again.uses > stats.uses


def test_the_smallest_pool_holds_one_layers_choice(artifact: Artifact) -> None:
    with Engine(artifact, max_context=256) as engine:
        wanted = tokens(engine)
    options = StreamOptions(slots=2, max_slots=2, reserve=0)
    with Engine(artifact, max_context=256, experts=options) as engine:
        assert tokens(engine) == wanted


def test_doctor_and_loading_have_one_plan(artifact: Artifact) -> None:
    budget = tiny.beside(0.2)
    options = PlanOptions(memory_gb=budget, max_context=256)
    with LLM(artifact.path, memory=options, threads=1) as llm:
        again = plan_model(artifact.path, options, read_machine(), threads=1).for_loading()
        assert (again.window, again.pool_slots, again.chunk_rows, again.sweep_slots) == (
            llm.plan.window,
            llm.plan.pool_slots,
            llm.plan.chunk_rows,
            llm.plan.sweep_slots,
        )
        assert again.target_bytes == llm.plan.target_bytes == round(budget * 1e9)
        assert llm.engine.context == llm.plan.window
        stream = llm.engine.experts
        assert stream is not None
        assert stream.capacity == llm.plan.pool_slots + llm.plan.lookahead_slots


def test_an_adaptive_pool_is_resized_between_requests(artifact: Artifact) -> None:
    limit = PlanOptions(memory_limit_gb=tiny.beside(0.3), max_context=256)
    with LLM(artifact.path, memory=limit) as llm:
        wanted = llm.generate("abc", seed=1, max_tokens=8).tokens
        stream = llm.engine.experts
        assert stream is not None
        governor = llm._loaded.governor
        assert governor is not None
        for slots in (2, 9, 5):
            governor._pool.resize(slots)
            assert stream.capacity == slots + llm.plan.lookahead_slots
            assert llm.generate("abc", seed=1, max_tokens=8).tokens == wanted
    with LLM(artifact.path, memory=PlanOptions(memory_gb=tiny.beside(0.2), max_context=256)) as llm:
        assert llm._loaded.governor is None  # a fixed budget stays what it is


def test_a_dense_model_has_no_routes(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no experts"):
        Engine(tiny_artifact("llama"), trace_routes=tmp_path / "routes")


# ---- interrupts -------------------------------------------------------------------------------------


class ExpertsInterrupt(Interrupt):
    """At a line that the stream of experts runs."""

    PLACES = (os.path.join("headrace", "experts", ""), os.path.join("engine", "mixture.py"))


@pytest.mark.parametrize("kernels", ["portable", "reference"])
def test_an_interrupt_at_any_moment_leaves_an_engine_that_answers(
    tiny_artifact: Callable[[str], Artifact], kernels: str
) -> None:
    options = StreamOptions(slots=6, max_slots=8, reserve=2, sweep_slots=3, num_lanes=2)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=3)
    artifact = tiny_artifact("mixtral")
    with Engine(artifact, kernels=kernels, max_context=256, experts=options) as engine:
        wanted = [t.id for t in engine.generate(PROMPT, params)]
        interrupted = 0
        for at in [*range(1, 60, 3), *range(60, 6000, 211)]:
            try:
                with ExpertsInterrupt(at):
                    found = [t.id for t in engine.generate(PROMPT, params)]
                assert found == wanted
            except KeyboardInterrupt:
                interrupted += 1
            if at % 2:
                assert engine.experts is not None
                engine.experts.resize(5 + at % 4)
            assert [t.id for t in engine.generate(PROMPT, params)] == wanted
        assert interrupted > 20


# ---- files that change under a loaded model -----------------------------------------------------------


def test_a_file_that_is_written_to_is_no_answer(artifact: Artifact) -> None:
    file = artifact.records[0].path
    whole = file.read_bytes()
    with Engine(artifact, kernels="portable", max_context=256, experts=SMALL) as engine:
        wanted = tokens(engine)
        steps = engine.generate(PROMPT, SAMPLED)
        found = [next(steps).id for _ in range(3)]
        with file.open("r+b") as target:
            target.write(bytes(byte ^ 1 for byte in whole))
        with pytest.raises(FileError, match="was changed while the model is loaded"):
            found += [token.id for token in steps]
        assert found == wanted[:3]
        with pytest.raises(FileError):
            tokens(engine)
        with file.open("r+b") as target:
            target.write(whole)
        assert tokens(engine) == wanted


def test_new_names_and_modes_of_a_file_are_no_change(artifact: Artifact) -> None:
    file = artifact.records[0].path
    with Engine(artifact, kernels="portable", max_context=256, experts=SMALL) as engine:
        wanted = tokens(engine)
        steps = engine.generate(PROMPT, SAMPLED)
        found = [next(steps).id]
        file.chmod(0o600)
        found.append(next(steps).id)
        file.unlink()
        assert found + [token.id for token in steps] == wanted


def test_dense_weights_that_are_written_to_are_no_answer(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path
) -> None:
    copy = open_artifact(shutil.copytree(tiny_artifact("llama").path, tmp_path / "llama"))
    (file,) = [copy.path / name for name in copy.manifest.files if name.endswith(".safetensors")]
    whole = file.read_bytes()
    with Engine(copy, kernels="portable", max_context=256) as engine:
        wanted = tokens(engine)
        with file.open("r+b") as target:
            target.seek(len(whole) // 2)
            target.write(b"other bytes")
        with pytest.raises(FileError, match="was changed while the model is loaded"):
            tokens(engine)
        with file.open("r+b") as target:
            target.write(whole)
        assert tokens(engine) == wanted
