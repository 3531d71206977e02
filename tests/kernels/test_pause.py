"""A pass paused between layers goes on anywhere, in any company: same logits, same KV bytes, same counts of clips."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.errors import InputError
from headrace.kernels import program as p
from kernels.models import DENSE, VARIANTS, Model
from kernels.passes import HERE, batch, compiled, new_cache

I64 = NDArray[np.int64]
LOUD = 1 << 13
MODELS = {
    "dense": (DENSE, 1),
    "mixture": (VARIANTS["shared"], 1),
    "loud": (replace(DENSE, qk_norm_whole=True), LOUD),
    "loud mixture": (VARIANTS["shared"], LOUD),
}
ROWS = {0: range(37), 1: range(5), 2: range(1)}  # positions of each sequence in the pass
LAST = {s: len(rows) - 1 for s, rows in ROWS.items()}


class Outcome(NamedTuple):
    logits: dict[int, bytes]  # of the last row of each sequence
    clips: dict[int, list[list[int]]]  # of each row of a sequence, by site
    cache: bytes


def rows_of(sequences: list[int]) -> list[tuple[int, int]]:
    return [(s, i) for s in sequences for i in ROWS[s]]


def ends_of(sequences: list[int]) -> list[int]:
    """The last row of each sequence."""
    return (np.cumsum([len(ROWS[s]) for s in sequences]) - 1).tolist()


def split(x: NDArray[np.generic], sequences: list[int]) -> dict[int, NDArray[np.generic]]:
    parts = np.split(x.copy(), np.cumsum([len(ROWS[s]) for s in sequences])[:-1])
    return dict(zip(sequences, parts, strict=True))


def whole(model: Model, tier: str, threads: int, company: list[list[int]]) -> Outcome:
    """Passes of some sequences each, none of them paused."""
    runner, cache = compiled(model, tier, threads), new_cache(model)
    logits, clips = {}, {}
    for sequences in company:
        given = batch(rows_of(sequences), ends_of(sequences))
        runner.run(0, len(model.program.ops), given, cache)
        for i, s in enumerate(sequences):
            logits[s] = runner.logits(len(sequences))[i].tobytes()
        clips |= {s: c.tolist() for s, c in split(runner.row_saturations(), sequences).items()}
    return Outcome(logits, clips, cache.tobytes())


@lru_cache
def made(name: str) -> Model:
    config, gain = MODELS[name]
    return Model(config, gain=gain)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return made(request.param)


@pytest.fixture(scope="module")
def expected(model: Model) -> Outcome:
    return whole(model, "reference", 1, [[0], [1], [2]])


def paused(model: Model, runners: list[p.Runner], plan: list[list[list[int]]]) -> Outcome:
    """plan[i]: which sequences go together from mark i to the next one, each pass on the next of the runners."""
    cache, marks = new_cache(model), [*model.program.marks, len(model.program.ops)]
    x: dict[int, NDArray[np.generic]] = {}
    clips: dict[int, I64] = {s: np.zeros((len(r), len(p.SITES)), np.int64) for s, r in ROWS.items()}
    logits, turn = {}, 0
    begins = [0, *marks[1:-1]]
    for company, begin, end in zip(plan, begins, marks[1:], strict=True):
        after = {}
        for sequences in company:
            runner, turn = runners[turn % len(runners)], turn + 1
            if begin > 0:
                rows = np.concatenate([x[s] for s in sequences])
                runner.put(rows.astype(np.int32, copy=False))
            given = batch(rows_of(sequences), ends_of(sequences))
            assert runner.run(begin, end, given, cache) == end
            for s, counts in split(runner.row_saturations(), sequences).items():
                clips[s] += counts.astype(np.int64)
            if end < len(model.program.ops):
                after |= split(runner.residual(len(given.tokens)), sequences)
            else:
                for i, s in enumerate(sequences):
                    logits[s] = runner.logits(len(sequences))[i].tobytes()
        x = after
    return Outcome(logits, {s: c.tolist() for s, c in clips.items()}, cache.tobytes())


PLANS = [
    [[[0], [1], [2]], [[2, 0], [1]], [[0, 1, 2]]],
    [[[1, 0, 2]], [[0], [2, 1]], [[1], [2], [0]]],
    [[[2], [0, 1]], [[0, 1, 2]], [[2, 1, 0]]],
]


@pytest.mark.parametrize("plan", PLANS, ids=["apart", "together", "mixed"])
@pytest.mark.parametrize("tier", HERE)
def test_a_paused_pass_goes_on_in_other_company(
    model: Model, expected: Outcome, tier: str, plan: list[list[list[int]]]
) -> None:
    """Each pass on a runner of another number of threads, one of them of another tier."""
    runners = [compiled(model, tier, threads) for threads in (1, 3)]
    runners.append(compiled(model, HERE[0]))
    assert len(plan) == model.program.shape.num_layers + 1
    assert paused(model, runners, plan) == expected


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_clip_alike_in_any_company(
    model: Model, expected: Outcome, tier: str, threads: int
) -> None:
    for company in ([[0, 1, 2]], [[2, 0], [1]]):
        assert whole(model, tier, threads, company) == expected


def test_loud_models_clip_at_every_site() -> None:
    sites = np.zeros(len(p.SITES), np.int64)
    for name in ("loud", "loud mixture"):
        for rows in whole(made(name), HERE[0], 1, [[0], [1], [2]]).clips.values():
            sites += np.array(rows).sum(axis=0)
    quiet = {"attention", "adapter"}  # a mean of values that int32 holds; none has an adapter
    assert {name for name, count in zip(p.SITES, sites, strict=True) if count == 0} <= quiet


@pytest.mark.parametrize("tier", HERE)
def test_counts_of_rows_add_up(model: Model, tier: str) -> None:
    """Over passes, of which each begins with no clips."""
    runner, cache, size = compiled(model, tier), new_cache(model), len(model.program.ops)
    total = np.zeros(len(p.SITES), np.int64)
    for sequences in ([1], [2], [1, 2]):
        runner.run(0, size, batch(rows_of(sequences), ends_of(sequences)), cache)
        assert runner.row_saturations().shape == (len(rows_of(sequences)), len(p.SITES))
        total += runner.row_saturations().sum(axis=0)
    runner.put(np.zeros((3, model.program.shape.hidden), np.int32))
    assert not runner.row_saturations().any()
    assert dict(runner.saturations()) == dict(zip(p.SITES, total.tolist(), strict=True))


@pytest.mark.parametrize("tier", HERE)
def test_what_cannot_be_put_is_refused(tier: str) -> None:
    model = made("dense")
    runner, hidden, cache = (
        compiled(model, tier, capacity=8),
        model.program.shape.hidden,
        new_cache(model),
    )
    with pytest.raises(ValueError, match="as many rows as the pass"):
        runner.run(model.program.marks[1], len(model.program.ops), batch([(0, 0)], []), cache)
    for rows in (
        np.zeros((0, hidden), np.int32),
        np.zeros((9, hidden), np.int32),
        np.zeros((2, hidden + 1), np.int32),
        np.zeros(hidden, np.int32),
        np.zeros((2, hidden), np.int64),
    ):
        with pytest.raises(InputError, match="rows of X"):
            runner.put(rows)  # type: ignore[arg-type]
    runner.put(np.zeros((2, 2 * hidden), np.int32)[:, ::2])
    with pytest.raises(ValueError, match="as many rows as the pass"):
        runner.run(model.program.marks[1], len(model.program.ops), batch([(0, 0)], []), cache)
