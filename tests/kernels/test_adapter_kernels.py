"""Adapters on every tier: the definition's bits, whatever the threads, the mates and the blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.artifact.container import Artifact
from headrace.errors import InputError
from headrace.kernels import program as p
from headrace.kernels.select import TIERS, select, unavailable
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program
from kernels.models import DENSE
from kernels.models import Model as Wide
from kernels.pairs import pairs

Get = Callable[[str], Artifact]
ALL = dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), 32)
ROWS = 120


@dataclass
class Model:
    program: p.Program
    config: DecoderConfig

    @staticmethod
    def of(artifact: Artifact) -> Model:
        config = DecoderConfig.from_json(artifact.manifest.config)
        bits = artifact.manifest.fraction_bits
        program = build_program(config, artifact.manifest.tensors, artifact.tensors, bits)
        return Model(program, config)

    def adapters(self) -> list[p.Pairs]:
        """Of one module, of all with different ranks, and one whose sums clip."""
        layers = range(self.config.num_layers)
        return [
            pairs(self.config, layers, {"q": 32, "v": 64}, 1),
            pairs(self.config, layers, {**ALL, "gate": 96, "k": 64, "down": 128}, 2, "painted"),
            pairs(self.config, [1], {"o": 32, "up": 32}, 3, louder=14),
        ]


def batch(sequences: list[int], adapters: list[int] | None, pages: int = 4) -> p.Batch:
    """Rows of sequences in order, each at its own positions; every row's logits are wanted."""
    ids = np.array(sequences, np.int32)
    count = int(ids.max()) + 1
    seen = [int((ids[:i] == s).sum()) for i, s in enumerate(sequences)]
    return p.Batch(
        tokens=(np.arange(len(ids), dtype=np.int32) * 37 + 11) % 256,
        positions=np.array(seen, np.int32),
        sequences=ids,
        page_tables=tuple(np.arange(pages, dtype=np.int32) + pages * s for s in range(count)),
        logit_rows=np.arange(len(ids), dtype=np.int32),
        adapters=None if adapters is None else np.array(adapters, np.int32),
    )


@dataclass
class Outcome:
    logits: NDArray[np.int32]
    cache: NDArray[np.uint8]
    clips: NDArray[np.int64]  # [rows, sites]

    @property
    def clipped(self) -> int:
        return int(self.clips[:, p.SITES.index("adapter")].sum())

    def equals(self, other: Outcome) -> bool:
        same = np.array_equal(self.logits, other.logits) and np.array_equal(self.clips, other.clips)
        return same and np.array_equal(self.cache, other.cache)


def outcome(
    model: Model, given: p.Batch, tier: str, threads: int = 2, mixed: list[p.Pairs] | None = None
) -> Outcome:
    if reason := unavailable().get(tier, ""):
        pytest.skip(f"tier {tier}: {reason}")
    runner = select(tier, threads=threads).compile(
        model.program, capacity=ROWS, logit_capacity=ROWS
    )
    for each in model.adapters() if mixed is None else mixed:
        runner.load_adapter(each)
    size = model.program.shape.page_bytes
    raw = np.zeros(16 * size + 64, np.uint8)
    cache = raw[-raw.ctypes.data % 64 :][: 16 * size].reshape(16, size)
    runner.run(0, len(model.program.ops), given, cache)
    logits = runner.logits(len(given.tokens)).copy()
    clips = runner.row_saturations().copy()
    runner.close()
    return Outcome(logits, cache, clips)


CASES = {
    "alone": ([0], [1]),
    "alone-clips": ([0], [2]),
    "one-each": ([0, 1, 2, 3], [0, 1, -1, 2]),
    "two-together": ([0, 0, 0, 1, 1, 2], [1, 1, 0]),
    "whole": ([0] * 20 + [1] * 17 + [2] * 3, [0, -1, 1]),
}


@pytest.fixture(scope="module")
def model(tiny_artifact: Get) -> Model:
    return Model.of(tiny_artifact("qwen3"))


@pytest.fixture(scope="module")
def wanted(model: Model) -> dict[str, Outcome]:
    return {n: outcome(model, batch(*case), "reference") for n, case in CASES.items()}


@pytest.mark.parametrize("tier", [t for t in TIERS if t != "reference"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_tier_is_the_definition(
    model: Model, wanted: dict[str, Outcome], tier: str, threads: int, name: str
) -> None:
    got = outcome(model, batch(*CASES[name]), tier, threads)
    assert got.equals(wanted[name])


def test_what_the_cases_are(model: Model, wanted: dict[str, Outcome]) -> None:
    """Adapters change logits and keys, and some sum clips; those of others do not matter."""
    plain = outcome(model, batch([0], None), "reference")
    assert not np.array_equal(plain.logits, wanted["alone"].logits)
    assert wanted["alone-clips"].clipped > 0
    assert wanted["alone"].clipped == 0


@pytest.mark.parametrize("tier", ["portable", "avx2", "avx512", "amx"])
def test_more_rows_than_a_block(model: Model, tier: str) -> None:
    """Rows of one adapter beyond a block's, in one sequence and in several, equal rows alone."""
    together = outcome(model, batch([0] * 60 + [1] * 60, [1, 1]), tier)
    for s in (0, 1):
        alone = batch([0] * 60, [1])
        alone = replace(alone, tokens=batch([0] * 60 + [1] * 60, None).tokens[60 * s : 60 * s + 60])
        assert np.array_equal(
            outcome(model, alone, tier).logits, together.logits[60 * s : 60 * s + 60]
        )


@pytest.mark.parametrize("tier", ["reference", "portable", "avx512"])
def test_load_and_unload(model: Model, tier: str) -> None:
    """Numbers are given again; what is left is what it was."""
    if reason := unavailable().get(tier, ""):
        pytest.skip(reason)
    first, second, third = model.adapters()
    runner = select(tier, threads=2).compile(model.program, capacity=ROWS, logit_capacity=ROWS)
    cache = np.zeros((16, model.program.shape.page_bytes + 64), np.uint8)
    raw = cache.ravel()
    cache = raw[-raw.ctypes.data % 64 :][: 16 * model.program.shape.page_bytes].reshape(16, -1)

    def logits(number: int) -> NDArray[np.int32]:
        given = batch([0, 0, 0], [number])
        runner.run(0, len(model.program.ops), given, cache)
        return runner.logits(3).copy()

    numbers = [runner.load_adapter(a) for a in (first, second)]
    before = [logits(n) for n in numbers]
    assert not np.array_equal(*before)
    runner.unload_adapter(numbers[0])
    assert np.array_equal(logits(numbers[1]), before[1])
    assert runner.load_adapter(third) == numbers[0]
    assert not np.array_equal(logits(numbers[0]), before[0])
    runner.unload_adapter(numbers[0])
    assert runner.load_adapter(first) == numbers[0]
    assert np.array_equal(logits(numbers[0]), before[0])
    runner.close()


@pytest.mark.parametrize("tier", ["reference", "portable"])
def test_pairs_that_do_not_fit(model: Model, tier: str) -> None:
    runner = select(tier, threads=1).compile(model.program, capacity=4, logit_capacity=4)
    good = pairs(model.config, [0], {"q": 32, "v": 32}, 1)
    (q, v), key = good[0, "qkv"], (0, "qkv")
    bad: dict[str, p.Pairs] = {
        "no 'qkv'": {(7, "qkv"): (q,)},
        "no 'norm'": {(0, "norm"): (q,)},
        "does not fit": {key: (replace(v, offset=v.offset + 16),)},
        "at row": {key: (q, replace(v, offset=q.offset + 16))},
        "rank": {key: (replace(q, b=pairs(model.config, [0], {"q": 64}, 1)[key][0].b),)},
        "8 bits": {key: (replace(q, a=replace(q.a, bits=4)),)},
    }
    for words, each in bad.items():
        with pytest.raises(InputError, match=words):
            runner.load_adapter(each)
    assert runner.load_adapter(good) == 0
    runner.close()


def test_a_batch_names_loaded_adapters_alone(model: Model) -> None:
    runner = select("portable", threads=1).compile(model.program, capacity=4, logit_capacity=4)
    cache = np.zeros((4, model.program.shape.page_bytes), np.uint8)
    for adapters in ([0], [-2], [0, 0]):
        with pytest.raises(ValueError, match="adapter"):
            runner.run(0, len(model.program.ops), batch([0], adapters), cache)
    runner.close()


@pytest.mark.parametrize("tier", ["reference", "portable", "avx512", "amx"])
@pytest.mark.parametrize("name", ["alone", "two-together"])
def test_paused_at_every_layer(
    model: Model, wanted: dict[str, Outcome], tier: str, name: str
) -> None:
    """X taken out and put back at every mark, as a pass that is spread over calls does it."""
    if reason := unavailable().get(tier, ""):
        pytest.skip(f"tier {tier}: {reason}")
    given, ends = batch(*CASES[name]), (*model.program.marks, len(model.program.ops))
    runner = select(tier, threads=2).compile(model.program, capacity=ROWS, logit_capacity=ROWS)
    for each in model.adapters():
        runner.load_adapter(each)
    size = model.program.shape.page_bytes
    raw = np.zeros(16 * size + 64, np.uint8)
    cache = raw[-raw.ctypes.data % 64 :][: 16 * size].reshape(16, size)
    begin = 0
    for end in ends:
        if begin:
            runner.put(runner.residual(len(given.tokens)).copy())
        runner.run(begin, end, given, cache)
        begin = end
    assert np.array_equal(runner.logits(len(given.tokens)), wanted[name].logits)
    assert np.array_equal(cache, wanted[name].cache)
    runner.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_beside_a_hosts_parallel_for(rows: int) -> None:
    """Projections that a host computes in blocks; what adapters add is not cut."""
    wide = Wide(replace(DENSE, vocab_size=5000, hidden_size=512, ffn_size=1000, num_heads=16))
    calls = []

    def host(count: int, task: Callable[[int], None]) -> None:
        calls.append(count)
        for index in reversed(range(count)):
            task(index)

    def logits(hook: p.ParallelFor | None) -> bytes:
        runner = select("portable", threads=1).compile(
            wide.program, capacity=rows, logit_capacity=rows
        )
        number = runner.load_adapter(pairs(wide.config, [0, 1], ALL, 5))
        runner.set_parallel_for(hook)
        cache = np.zeros((4, wide.program.shape.page_bytes), np.uint8)
        given = batch([0] * rows, [number])
        runner.run(0, len(wide.program.ops), replace(given, tokens=given.tokens % 64), cache)
        out = runner.logits(rows).tobytes() + cache.tobytes()
        runner.close()
        return out

    assert logits(p.ParallelFor(host, 8, matvec=True)) == logits(None)
    assert len(calls) >= (3 if rows == 1 else 1)  # with more rows the head alone
