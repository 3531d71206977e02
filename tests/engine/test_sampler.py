"""The sampler is a function of (logits, history, parameters, seed, position), in integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.arith import philox
from headrace.engine.sampler import Sampler
from headrace.errors import SettingError
from headrace.kernels.reference import ReferenceBackend
from headrace.values import SamplingParams

ONE = 65536  # logits carry 16 fraction bits here


def sampler(seed: int = 1, vocab: int = 8, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), seed, vocab, 16, ReferenceBackend())  # type: ignore[arg-type]


def logits(*values: float) -> np.ndarray:
    return np.array([round(v * ONE) for v in values], dtype=np.int32)


def shares(draws: int, values: np.ndarray, **params: object) -> np.ndarray:
    """Frequencies of the picks over `draws` positions, without history effects."""
    picks = [sampler(7, len(values), **params).pick(values, p) for p in range(draws)]
    return np.bincount(picks, minlength=len(values)) / draws


def test_philox_equals_numpys() -> None:
    for counter, key in ((1, 0), (5, 42), (2**63, 2**64 - 1)):
        theirs = np.random.Philox(
            key=np.array([key, 0], np.uint64), counter=np.array([counter - 1, 0, 0, 0], np.uint64)
        ).random_raw(4)
        assert philox.philox((counter, 0, 0, 0), (key, 0)) == tuple(int(w) for w in theirs)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert sampler(temperature=0).pick(logits(1, 3, 3, 2, 3), 0) == 1


def test_frequencies_follow_the_softmax() -> None:
    values = logits(0, 1, 2, 3)
    expected = np.exp([0, 1, 2, 3]) / np.exp([0, 1, 2, 3]).sum()
    # 4 standard deviations of 3000 draws of the likeliest outcome; the draws are fixed by the seed.
    assert np.abs(shares(3000, values, temperature=1.0) - expected).max() < 0.036


def test_temperature_sharpens() -> None:
    values = logits(0, 1, 2, 3)
    assert shares(300, values, temperature=0.25)[3] > shares(300, values, temperature=2.0)[3] + 0.3


def test_top_k_keeps_k_and_breaks_ties_by_id() -> None:
    seen = shares(400, logits(5, 5, 5, 5, 1), temperature=1.0, top_k=2)
    assert set(np.flatnonzero(seen)) == {0, 1}


def test_top_p_keeps_the_shortest_prefix() -> None:
    values = np.round(np.log(np.array([0.5, 0.3, 0.15, 0.05])) * ONE).astype(np.int32)
    assert set(np.flatnonzero(shares(400, values, temperature=1.0, top_p=0.7))) == {0, 1}
    assert set(np.flatnonzero(shares(400, values, temperature=1.0, top_p=0.9))) == {0, 1, 2}
    assert set(np.flatnonzero(shares(50, values, temperature=1.0, top_p=0.0))) == {0}


def test_min_p_is_relative_to_the_likeliest() -> None:
    values = np.round(np.log(np.array([0.5, 0.3, 0.15, 0.05])) * ONE).astype(np.int32)
    assert set(np.flatnonzero(shares(400, values, temperature=1.0, min_p=0.29))) == {0, 1, 2}


def test_repetition_penalty_counts_the_prompt_and_presence_does_not() -> None:
    values = logits(4, 3.9)
    repeated = sampler(vocab=2, temperature=0, repetition_penalty=1.5)
    repeated.observe([0])
    assert repeated.pick(values, 0) == 1
    present = sampler(vocab=2, temperature=0, presence_penalty=0.5)
    present.observe([0])
    assert [present.pick(values, p) for p in range(2)] == [0, 1]


def test_repetition_penalty_lowers_negative_logits() -> None:
    s = sampler(vocab=2, temperature=0, repetition_penalty=2.0)
    s.observe([0])
    assert s.pick(logits(-1, -1.5), 0) == 1


def test_a_pick_depends_on_seed_and_position_alone() -> None:
    values = logits(*np.linspace(0, 1, 64))
    forward = [sampler(3, 64).pick(values, p) for p in range(20)]
    backward = [sampler(3, 64).pick(values, p) for p in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [sampler(0, 64).pick(values, p) for p in range(20)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=300),
    st.one_of(st.floats(0, 100), st.floats(0, 1e-5), st.sampled_from([5e-324, 2.0**-20, 1e-20])),
    st.floats(0, 1),
    st.integers(0, 400),
    st.floats(0, 1),
    st.floats(0.01, 100),
    st.floats(-100, 100),
    st.integers(0, 2**64 - 1),
)
def test_any_logits_and_parameters_give_a_token(
    values: list[int],
    t: float,
    top_p: float,
    top_k: int,
    min_p: float,
    rep: float,
    pres: float,
    seed: int,
) -> None:
    array = np.array(values, dtype=np.int32)
    params = SamplingParams(
        temperature=t,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=rep,
        presence_penalty=pres,
    )
    s = Sampler(params, seed, len(values), 16, ReferenceBackend())
    s.observe([0])
    assert all(0 <= s.pick(array, p) < len(values) for p in range(3))


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 1.5}, {"seed": -1}, {"seed": 2**64},
     {"top_k": -1}, {"max_tokens": 0}, {"stop": ("",)}],
)  # fmt: skip
def test_bad_parameters_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(SettingError):
        SamplingParams(**bad)  # type: ignore[arg-type]
