"""The law under adapters: tokens, logits and KV bytes are a function of the adapter's content too, and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import loras
from headrace.artifact.adapter import Adapter
from headrace.artifact.container import Artifact
from headrace.engine.adapters import LoadedAdapter
from headrace.engine.blob import BlobModelError
from headrace.engine.engine import Engine
from headrace.engine.prefix_disk import DiskOptions, PrefixDisk
from headrace.engine.sequence import Sequence, Work
from headrace.errors import InputError
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import TIERS
from headrace.values import SamplingParams
from law import engines

Get = Callable[[str], Artifact]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(90)]
OTHER = [(5 * i * i + 11 * i + 1) % 256 for i in range(40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=10)
KERNELS = [("reference", 1), (None, 1), (None, 3), ("portable", 2), ("avx2", 2)]


@pytest.fixture(scope="module")
def adapters(
    tiny_artifact: Get, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[Adapter]]:
    """Three of a base: of all modules, of two, and the first with twice the alpha."""
    made: dict[str, list[Adapter]] = {}
    folder = tmp_path_factory.mktemp("adapters")

    def get(name: str) -> list[Adapter]:
        if name not in made:
            base = tiny_artifact(name)
            made[name] = [
                loras.make(folder / f"{name}-all", base),
                loras.make(folder / f"{name}-some", base, ("q", "v"), seed=1),
                loras.make(folder / f"{name}-louder", base, alpha=16),
            ]
        return made[name]

    return get


@contextmanager
def opened(
    artifact: Artifact,
    adapters: list[Adapter],
    kernels: str | None = None,
    threads: int = 2,
    chunk: int = 50,
    experts: StreamOptions | None = None,
) -> Iterator[tuple[Engine, list[LoadedAdapter]]]:
    """An engine whose answers no token ends, with adapters."""
    with engines.opened(
        artifact, kernels, threads, chunk, num_sequences=5, experts=experts
    ) as engine:
        engine.end_tokens = frozenset()
        yield engine, [engine.load_adapter(a) for a in adapters]


Outcome = tuple[bytes, bytes]  # logits of every position, and KV bytes


def alone(engine: Engine, salt: bytes, tokens: list[int], step: int = 16) -> Outcome:
    """A sequence read by itself."""
    sequence = engine.new_sequence(salt)
    logits = []
    for at in range(0, len(tokens), step):
        logits.append(engine.forward([Work(sequence, tokens[at : at + step], True)]).copy())
    out = np.concatenate(logits).tobytes(), engine.kv_bytes(sequence)
    sequence.release()
    return out


def run(
    engine: Engine, tokens: list[int], params: SamplingParams = SAMPLED, **how: object
) -> object:
    found = tuple(t.id for t in engine.generate(tokens, params, **how))  # type: ignore[arg-type]
    assert engine.stats is not None
    return found, engine.stats.fingerprint


def reused(engine: Engine) -> int:
    assert engine.stats is not None
    return engine.stats.reused_tokens


@pytest.fixture(scope="module")
def expected(tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]) -> list[Outcome]:
    """By the portable tier: under none, and under each of the three."""
    with opened(tiny_artifact("qwen2"), adapters("qwen2"), "portable", 1) as (engine, loaded):
        return [alone(engine, salt, PROMPT) for salt in (b"", *(a.salt for a in loaded))]


def test_adapters_differ(expected: list[Outcome]) -> None:
    assert len(set(expected)) == 4


@pytest.mark.parametrize(("kernels", "threads"), KERNELS)
@pytest.mark.parametrize("step", [1, 7, 16])
def test_chunked_is_whole_on_every_tier(
    tiny_artifact: Get,
    adapters: Callable[[str], list[Adapter]],
    expected: list[Outcome],
    kernels: str | None,
    threads: int,
    step: int,
) -> None:
    if kernels == "reference" and step == 1:
        pytest.skip("slow; the other chunks stand for it")
    count = 40 if kernels == "reference" else len(PROMPT)
    with opened(tiny_artifact("qwen2"), adapters("qwen2"), kernels, threads) as (engine, loaded):
        for adapter, (logits, kv) in zip(loaded[:2], expected[1:3], strict=True):
            got = alone(engine, adapter.salt, PROMPT[:count], step)
            assert got[0] == logits[: len(got[0])]
            if count == len(PROMPT):
                assert got[1] == kv


@pytest.mark.parametrize("tier", [t for t in TIERS if t != "reference"])
def test_batched_is_alone(
    tiny_artifact: Get,
    adapters: Callable[[str], list[Adapter]],
    expected: list[Outcome],
    tier: str,
) -> None:
    """Sequences at different depths, each under its own adapter or none, two under one."""
    order = [1, 0, 2, 1, 3]
    with opened(tiny_artifact("qwen2"), adapters("qwen2"), tier, 3) as (engine, loaded):
        salts = [b"", *(a.salt for a in loaded)]
        sequences = [engine.new_sequence(salts[i]) for i in order]
        logits: list[list[NDArray[np.int32]]] = [[] for _ in order]
        sizes = [3, 1, 2, 5, 4]
        while any(len(s) < len(PROMPT) for s in sequences):
            work = [
                (n, Work(s, PROMPT[len(s) : len(s) + size], True))
                for n, (s, size) in enumerate(zip(sequences, sizes, strict=True))
                if len(s) < len(PROMPT)
            ]
            rows = engine.forward([w for _, w in work])
            for n, w in work:
                logits[n].append(rows[: len(w.tokens)].copy())
                rows = rows[len(w.tokens) :]
        for which, sequence, got in zip(order, sequences, logits, strict=True):
            assert np.concatenate(got).tobytes() == expected[which][0]
            assert engine.kv_bytes(sequence) == expected[which][1]


@pytest.mark.parametrize("kernels", [None, "portable"])
def test_prefixes_of_adapters_never_mix(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]], kernels: str | None
) -> None:
    """Warm = cold under every adapter, with the same prompts under all of them."""
    with opened(tiny_artifact("llama"), adapters("llama"), kernels) as (engine, loaded):
        each = [None, *loaded]
        cold = [run(engine, PROMPT, adapter=a, reuse=False) for a in each]
        assert len(set(cold)) == 4
        for adapter in each:
            run(engine, PROMPT[:70], adapter=adapter)
            assert reused(engine) == 0
        for params in (GREEDY, SAMPLED):
            for adapter in (*each, *reversed(each)):
                warm = run(engine, PROMPT, params, adapter=adapter)
                assert reused(engine) >= 70
                assert warm == run(engine, PROMPT, params, adapter=adapter, reuse=False)


def test_prefixes_outlive_their_adapter(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]
) -> None:
    """Content is the key: another one in its place gets nothing, the same one again gets all."""
    one, two, _ = adapters("llama")
    with opened(tiny_artifact("llama"), [one]) as (engine, (first,)):
        cold = run(engine, PROMPT, adapter=first)
        engine.unload_adapter(first)
        with pytest.raises(InputError, match="not loaded"):
            engine.generate(PROMPT, SAMPLED, adapter=first)
        second = engine.load_adapter(two)
        run(engine, PROMPT, adapter=second)
        assert reused(engine) == 0
        assert run(engine, PROMPT, adapter=engine.load_adapter(one)) == cold
        assert reused(engine) == len(PROMPT) - 1


def test_the_disk_knows_adapters_apart(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]], tmp_path: Path
) -> None:
    for turn in range(2):
        with opened(tiny_artifact("llama"), adapters("llama"), threads=1) as (engine, loaded):
            engine.attach_disk(PrefixDisk(DiskOptions(tmp_path, min_tokens=10)))
            for adapter in (None, *loaded):
                warm = run(engine, PROMPT, adapter=adapter)
                assert reused(engine) == (len(PROMPT) - 1 if turn else 0)
                assert warm == run(engine, PROMPT, adapter=adapter, reuse=False)


def test_saved_and_restored(tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]) -> None:
    """In another engine, on another tier; under another adapter or none it is refused."""
    made = adapters("llama")
    with opened(tiny_artifact("llama"), made, None) as (engine, loaded):
        sequence = engine.new_sequence(loaded[0].salt)
        engine.read(sequence, PROMPT[:70])
        blob = engine.save(sequence)
        plain = run(engine, PROMPT, sequence=sequence)
    with opened(tiny_artifact("llama"), made[1:], "portable", 1) as (engine, loaded):
        for salt in (b"", *(a.salt for a in loaded)):
            with pytest.raises(BlobModelError):
                engine.restore(blob, salt)
        restored = engine.restore(blob, made[0].salt)
        with pytest.raises(InputError, match="not loaded"):
            run(engine, PROMPT, sequence=restored)
        engine.load_adapter(made[0])
        assert run(engine, PROMPT, sequence=restored) == plain
        restored.release()
        assert engine.pages.num_used == 0


@pytest.mark.parametrize("depth", [1, 4, "auto"])
def test_drafts_change_nothing(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]], depth: int | str
) -> None:
    prompt = (PROMPT[:20] * 3)[:50]
    with opened(tiny_artifact("qwen3"), adapters("qwen3")) as (engine, loaded):
        for adapter in loaded:
            for params in (GREEDY, SAMPLED):
                plain = run(engine, prompt, params, adapter=adapter, reuse=False)
                drafted = run(engine, prompt, params, adapter=adapter, reuse=False, speculate=depth)
                assert drafted == plain


def test_another_adapter_on_a_live_sequence(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]
) -> None:
    """Positions stay what they were; what follows is a function of which adapter each position got."""
    with opened(tiny_artifact("llama"), adapters("llama")) as (engine, loaded):
        a, b, _ = (x.salt for x in loaded)

        def switched(at: int) -> Sequence:
            sequence = engine.new_sequence(a)
            if at:
                engine.read(sequence, PROMPT[:at])
            sequence.set_adapter(b)
            engine.read(sequence, PROMPT[at:])
            return sequence

        whole, first = switched(30), engine.new_sequence(a)
        engine.read(first, PROMPT[:30])
        assert engine.kv_bytes(first) == engine.kv_bytes(whole.fork(30))
        assert len({whole.salt, first.salt, switched(31).salt, b""}) == 4
        # Rewound to the change or before it, and read again: as if it had been so from the beginning.
        for length in (30, 20, 0):
            again = whole.fork(length)
            engine.read(again, PROMPT[length:])
            fresh = switched(min(length, 30))
            assert again.history == fresh.history
            assert engine.kv_bytes(again) == engine.kv_bytes(fresh)
        assert whole.fork(0).salt == b
        # Saved with its history, and with that alone restored.
        blob = engine.save(whole)
        for salt in (a, b):
            with pytest.raises(BlobModelError):
                engine.restore(blob, salt)
        restored = engine.restore(blob, whole.history)
        assert run(engine, [*PROMPT, 7], sequence=restored) == run(
            engine, [*PROMPT, 7], sequence=whole
        )
        # No prompt begins like that, so nothing of it is kept.
        engine.keep(whole, len(PROMPT))
        assert engine.prefixes.num_tokens == 0


def test_set_back_before_anything_was_read(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]
) -> None:
    with opened(tiny_artifact("llama"), adapters("llama")) as (engine, loaded):
        a, b, _ = (x.salt for x in loaded)
        sequence = engine.new_sequence(a)
        sequence.set_adapter(b)
        assert sequence.salt == b
        engine.read(sequence, PROMPT[:5])
        sequence.set_adapter(a)
        sequence.set_adapter(b)
        assert sequence.salt == b
        sequence.set_adapter(b"")
        assert sequence.salt not in (a, b, b"")


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_attention_of_a_mixture(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]], family: str
) -> None:
    made = adapters(family)
    streams = StreamOptions(6, 32, reserve=2)
    with opened(tiny_artifact(family), made, "portable", 1) as (engine, loaded):
        wanted = [alone(engine, a.salt, PROMPT) for a in loaded]
        assert len({*wanted, alone(engine, b"", PROMPT)}) == 4
    with opened(tiny_artifact(family), made, experts=streams) as (engine, loaded):
        assert [alone(engine, a.salt, PROMPT, 5) for a in loaded] == wanted
        warm = [run(engine, PROMPT, adapter=a) for a in (*loaded, *loaded)]
        assert warm[:3] == warm[3:]


def test_one_that_is_loaded_twice_is_there_once(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]
) -> None:
    made = adapters("llama")
    with opened(tiny_artifact("llama"), [made[0], made[0]]) as (engine, (one, two)):
        assert engine.adapters.nbytes == made[0].nbytes
        engine.unload_adapter(one)
        run(engine, PROMPT, adapter=two)
        engine.unload_adapter(two)
        assert len(engine.adapters) == 0
        with pytest.raises(InputError, match="not loaded"):
            engine.unload_adapter(one)
        sequence = engine.new_sequence(one.salt)
        with pytest.raises(InputError, match="not loaded"):
            engine.read(sequence, PROMPT)
        assert len(sequence) == 0


def test_a_sequence_has_its_own_adapter(
    tiny_artifact: Get, adapters: Callable[[str], list[Adapter]]
) -> None:
    with opened(tiny_artifact("llama"), adapters("llama")) as (engine, loaded):
        with pytest.raises(InputError, match="its own adapter"):
            engine.generate(PROMPT, SAMPLED, sequence=engine.new_sequence(), adapter=loaded[0])
        sequence = engine.new_sequence(loaded[0].salt)
        kept = run(engine, PROMPT, sequence=sequence)
        assert kept == run(engine, PROMPT, adapter=loaded[0], reuse=False)
