"""Adapters of sequences: each as alone, in any company and slices; changed between tokens; refused by cause."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loras
from embed.frames import CONTEXT, PROMPT, Frame, generated, make_workspace, opened, step
from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed import errors
from headrace.engine.engine import Engine
from headrace.kernels.select import TIERS

Get = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def folders(tiny_artifact: Get, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of one base: the third is the first at another scale."""
    base, path = tiny_artifact("qwen3"), tmp_path_factory.mktemp("adapters")
    made = [("a", 1, 8), ("b", 2, 8), ("c", 1, 16)]
    return [loras.make(path / n, base, seed=seed, alpha=alpha).path for n, seed, alpha in made]


@pytest.fixture
def frame(tiny_artifact: Get) -> Iterator[Frame]:
    with opened(tiny_artifact("qwen3")) as made:
        yield made


def with_adapter(frame: Frame, adapter: embed.Adapter | None, prompt: list[int]) -> embed.Sequence:
    sequence = frame.new()
    sequence.set_adapter(adapter)
    embed.prefill(sequence, prompt, frame.space)
    return sequence


def engine_tokens(artifact: Artifact, folder: Path, prompt: list[int], count: int) -> list[int]:
    from headrace.artifact.adapter import open_adapter

    with Engine(artifact, threads=1, max_context=CONTEXT) as engine:
        loaded = engine.load_adapter(open_adapter(folder, artifact))
        sequence, due, out = engine.new_sequence(loaded.salt), prompt, list[int]()
        while len(out) < count:
            out.append(int(engine.read(sequence, due).argmax()))
            due = out[-1:]
        sequence.release()
        return out


@pytest.mark.parametrize("kernels", TIERS)
def test_a_batch_of_different_adapters_is_each_alone(
    tiny_artifact: Get, folders: list[Path], kernels: str
) -> None:
    artifact = tiny_artifact("qwen3")
    with opened(artifact, kernels) as frame:
        adapters = [embed.Adapter(frame.model, folder) for folder in folders[:2]]
        kinds = [None, *adapters]
        lines = [with_adapter(frame, adapter, PROMPT[: 9 + i]) for i, adapter in enumerate(kinds)]
        step(frame, lines[0])
        step(frame, lines[0], 1)  # at another depth
        found: list[list[int]] = [[], [], []]
        while min(map(len, found)) < 3:
            for index, outcome in enumerate(embed.decode_step(lines, 1, frame.space)):
                if isinstance(outcome, embed.Token):
                    found[index].append(outcome.id)
        for index in (1, 2):
            wanted = engine_tokens(artifact, folders[index - 1], PROMPT[: 9 + index], 3)
            assert found[index][:3] == wanted
        with frame.new(PROMPT[:9]) as plain:
            assert generated(frame, plain, 4)[1:] == found[0][:3]


def test_content_and_scale_tell_adapters_apart(frame: Frame, folders: list[Path]) -> None:
    adapters = [embed.Adapter(frame.model, folder) for folder in folders]
    assert len({a.identity for a in adapters}) == 3
    tokens = [tuple(generated(frame, with_adapter(frame, a, PROMPT), 8)) for a in adapters]
    assert len(set(tokens)) == 3


def test_swapped_between_tokens_only(frame: Frame, folders: list[Path]) -> None:
    first, second = (embed.Adapter(frame.model, folder) for folder in folders[:2])
    sequence = with_adapter(frame, first, PROMPT[:9])
    generated(frame, sequence, 2)
    step(frame, sequence, 1)
    with pytest.raises(errors.MidTokenError):
        sequence.set_adapter(second)
    assert sequence.adapter is first
    generated(frame, sequence, 1)
    sequence.set_adapter(second)
    sequence.set_adapter(None)
    sequence.set_adapter(second)
    assert sequence.adapter_history == ((0, first.identity), (11, second.identity))
    generated(frame, sequence, 2)
    sequence.reset()  # the binding stays, its history begins anew
    assert sequence.adapter is second
    assert sequence.adapter_history == ((0, second.identity),)
    assert sequence.save() == with_adapter(frame, second, []).save()


def test_release(frame: Frame, folders: list[Path]) -> None:
    adapter = embed.Adapter(frame.model, folders[0])
    assert adapter.residency > 0
    sequence = with_adapter(frame, adapter, PROMPT[:9])
    with pytest.raises(errors.AdapterHasSequencesError):
        adapter.release()
    sequence.set_adapter(None)
    other = with_adapter(frame, adapter, [1])
    other.release()  # unbinds
    sequence.release()
    frame.space.destroy()
    frame.pool.destroy()
    with pytest.raises(errors.ModelHasAdaptersError):
        frame.model.unmap()
    adapter.release()
    adapter.release()
    assert adapter.residency == 0
    frame.model.unmap()


def test_a_released_adapter_is_not_bound_and_its_place_is_taken(
    frame: Frame, folders: list[Path]
) -> None:
    first, second = (embed.Adapter(frame.model, folder) for folder in folders[:2])
    with with_adapter(frame, second, PROMPT) as sequence:
        wanted = generated(frame, sequence, 3)
    with with_adapter(frame, first, PROMPT) as sequence:
        generated(frame, sequence, 3)
    first.release()
    with frame.new() as sequence, pytest.raises(errors.ReleasedError):
        sequence.set_adapter(first)
    again = embed.Adapter(frame.model, folders[1])
    second.release()
    with with_adapter(frame, again, PROMPT) as sequence:
        assert generated(frame, sequence, 3) == wanted


def test_a_prefix_goes_with_its_adapter(frame: Frame, folders: list[Path]) -> None:
    adapter = embed.Adapter(frame.model, folders[0])
    with embed.Prefix(frame.pool) as prefix, frame.new() as sequence:
        prefix.set_adapter(adapter)
        prefix.prefill(PROMPT, frame.space)
        prefix.freeze()
        with pytest.raises(errors.PrefixAdapterError):
            sequence.adopt_prefix(prefix)
        sequence.set_adapter(adapter)
        sequence.adopt_prefix(prefix)
        alone = with_adapter(frame, adapter, PROMPT)
        assert generated(frame, sequence, 3) == generated(frame, alone, 3)
        assert sequence.save() == alone.save()


@pytest.mark.parametrize("name", ["boundary", "mid"])
def test_a_save_holds_the_adapter_and_its_history(
    tiny_artifact: Get, frame: Frame, folders: list[Path], name: str
) -> None:
    first, second = (embed.Adapter(frame.model, folder) for folder in folders[:2])
    sequence = with_adapter(frame, first, PROMPT)
    generated(frame, sequence, 2)
    sequence.set_adapter(second)
    if name == "mid":
        step(frame, sequence, 1)
    blob = sequence.save()
    assert len(blob) <= embed.seq_state_size(frame.model)
    history, wanted = sequence.adapter_history, generated(frame, sequence, 4)
    with opened(tiny_artifact("qwen3"), "reference") as other, other.new([1]) as target:
        before = target.save()
        mapped = [embed.Adapter(other.model, folder) for folder in folders]
        for wrong in (None, mapped[0], mapped[2], second):
            with pytest.raises(errors.RestoreAdapterError):
                target.restore(blob, adapter=wrong)
        with pytest.raises(errors.RestoreAdapterError):
            target.restore(before, adapter=mapped[0])
        assert (target.save(), target.adapter) == (before, None)
        target.restore(blob, adapter=mapped[1])
        assert target.adapter_history == history
        assert target.save() == blob
        target.restore(blob)  # it is bound to it already
        assert generated(other, target, 4, 1) == wanted
        target.restore(before)
        assert target.adapter is None
        mapped[1].release()


def test_two_workspaces(frame: Frame, folders: list[Path]) -> None:
    adapter, second = embed.Adapter(frame.model, folders[0]), make_workspace(frame.model)
    sequence, other = (with_adapter(frame, adapter, PROMPT) for _ in range(2))
    for _ in range(4):
        a = embed.decode_step([sequence], 9, frame.space)
        assert a == embed.decode_step([other], 9, second)


def test_what_does_not_fit(tiny_artifact: Get, folders: list[Path], tmp_path: Path) -> None:
    with opened(tiny_artifact("qwen3")) as frame, opened(tiny_artifact("llama")) as other:
        with pytest.raises(errors.AdapterBaseError):
            embed.Adapter(other.model, folders[0])
        with pytest.raises(errors.ArtifactRejectedError):
            embed.Adapter(frame.model, tmp_path)
        adapter = embed.Adapter(frame.model, folders[0])
        with other.new() as foreign, pytest.raises(errors.InvalidArgumentError):
            foreign.set_adapter(adapter)
        assert other.model.live["adapters"] == 0


def test_sizes_that_are_not_the_bases(
    tiny_artifact: Get, folders: list[Path], tmp_path: Path
) -> None:
    """A manifest that names a module which the model does not have, with the right identities."""
    from headrace.artifact.adapter import read_adapter_manifest

    manifest = read_adapter_manifest(folders[0])
    target = next(iter(manifest.targets.values()))
    forged = type(manifest)(**{**vars(manifest), "targets": {"layers.99.q": target}})
    folder = tmp_path / "forged"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(forged.to_bytes())
    (folder / "adapter.safetensors").write_bytes((folders[0] / "adapter.safetensors").read_bytes())
    assert json.loads(forged.to_bytes())["base"] == tiny_artifact("qwen3").identity
    with opened(tiny_artifact("qwen3")) as frame, pytest.raises(errors.AdapterShapeError):
        embed.Adapter(frame.model, folder)


def test_a_prefix_goes_by_the_content_that_it_was_read_with(
    frame: Frame, folders: list[Path]
) -> None:
    first, again = (embed.Adapter(frame.model, folders[0]) for _ in range(2))
    second = embed.Adapter(frame.model, folders[1])
    wanted = generated(frame, with_adapter(frame, first, PROMPT), 3)
    for last in (first, None, second):  # what it was bound to in the end reads nothing
        with embed.Prefix(frame.pool) as prefix:
            prefix.set_adapter(first)
            prefix.prefill(PROMPT, frame.space)
            prefix.set_adapter(last)
            prefix.freeze()
            for wrong in (None, second):
                with frame.new() as sequence:
                    sequence.set_adapter(wrong)
                    with pytest.raises(errors.PrefixAdapterError):
                        sequence.adopt_prefix(prefix)
            for right in (first, again):
                with frame.new() as sequence:
                    sequence.set_adapter(right)
                    sequence.adopt_prefix(prefix)
                    assert sequence.adapter is right
                    assert sequence.adapter_history == ((0, first.identity),)
                    assert generated(frame, sequence, 3) == wanted
