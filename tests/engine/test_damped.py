"""Damped greedy decoding: the choice is R17's, its state is its history, and what is out of range is refused."""

from __future__ import annotations

import tracemalloc
from math import floor, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.arith import damping
from headrace.arith.damping import Damping, candidates, choose, followers, log2_q16, repetition
from headrace.arith.numbers import LOG2E_Q20
from headrace.engine.blob import (
    BlobDamagedError,
    BlobModelError,
    BlobTruncatedError,
    BlobVersionError,
)
from headrace.engine.damped import Damped, DampedParams
from headrace.errors import InputError, SettingError

ONE = 65536  # logits carry 16 fraction bits here
VOCAB = 12


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def chosen(
    logits: list[int], history: list[int], how: Damping, allowed: list[bool] | None = None
) -> int:
    """R17 token by token, in Python's integers."""
    able = [i for i in range(len(logits)) if allowed is None or allowed[i]]
    ranked = sorted(able, key=lambda i: (-logits[i], i))[: how.top_k]
    order = min(how.max_order, max(len(history), 1))
    after = history
    for n in range(order, 1, -1):
        tail = history[len(history) - n + 1 :]
        starts = range(len(history) - n + 1)
        after = [history[s + n - 1] for s in starts if history[s : s + n - 1] == tail]
        if after:
            break
    else:
        after = history

    def cost(token: int) -> int:
        below = (logits[ranked[0]] - logits[token]) * LOG2E_Q20 >> (how.fraction_bits + 4)
        count = after.count(token)
        repeated = count * int(log2_q16(np.array([1 + count]))[0]) // max(len(after), 1)
        return below + (how.alpha_q15 * repeated >> 15)

    return min(ranked, key=cost)  # of equal ones the first


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_choice_is_the_rules(data: st.DataObject) -> None:
    near = st.integers(-3 * ONE, 3 * ONE) | st.integers(-2, 2)
    logits = data.draw(st.lists(near, min_size=VOCAB, max_size=VOCAB))
    history = data.draw(st.lists(st.integers(0, 4), max_size=40))
    how = Damping(
        data.draw(st.integers(0, 2**20 - 1)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, VOCAB)),
        data.draw(st.sampled_from([8, 16, 24])),
    )
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB))
    if allowed is not None and not any(allowed):
        allowed = None
    mask = None if allowed is None else np.array(allowed)
    found = choose(i32(*logits), i32(*history), how, mask)
    assert found == chosen(logits, history, how, allowed)


def test_candidates_are_the_likeliest_and_equal_ones_are_by_id() -> None:
    logits = i32(1, 7, 7, 9, 7, 0)
    assert candidates(logits, 3, None).tolist() == [3, 1, 2]
    assert candidates(logits, 6, None).tolist() == [3, 1, 2, 4, 0, 5]
    allowed = np.array([True, False, True, False, True, True])
    assert candidates(logits, 2, allowed).tolist() == [2, 4]


def test_extreme_logits_do_not_overflow() -> None:
    lowest, highest = -(2**31) + 1, 2**31 - 1
    how = Damping(2**20 - 1, 1, 2, 8)
    assert choose(i32(lowest, highest), i32(*[1] * 1000), how) == 1
    penalised = np.array([-(2**38), 2**38], np.int64)
    assert choose(penalised, i32(*[1] * 1000), how) == 1


def test_the_longest_ngram_that_came_before_counts_alone() -> None:
    history = i32(1, 2, 3, 4, 2, 3, 5, 9, 3)
    assert followers(history, 1).tolist() == history.tolist()
    assert followers(history, 2).tolist() == [4, 5]  # what came after 3
    assert followers(history, 3).tolist() == [4, 5]  # 9, 3 is new
    assert followers(i32(1, 2, 3, 4, 2, 3), 7).tolist() == [4]
    assert followers(i32(1, 2), 2).tolist() == [1, 2]
    assert followers(i32(7, 7, 7), 99).tolist() == [7]
    assert followers(i32(), 2).tolist() == []


@pytest.mark.parametrize("max_order", [1, 2, 5, 2**31 - 1])
def test_blocks_of_the_history_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, max_order: int
) -> None:
    rng = np.random.default_rng(3)
    for length in (0, 1, 2, 3, 6, 7, 8, 40):
        history = rng.integers(0, 4, length).astype(np.int32)
        ids = np.arange(5, dtype=np.int64)[::-1].copy()
        wanted = followers(history, max_order), repetition(ids, history, max_order)
        for size in (1, 2, 3, 7):
            with monkeypatch.context() as patch:
                patch.setattr(damping, "BLOCK", size)
                found = followers(history, max_order), repetition(ids, history, max_order)
            assert [f.tolist() for f in found] == [w.tolist() for w in wanted]


def test_scratch_does_not_grow_with_the_history() -> None:
    ids = np.arange(6, dtype=np.int64)
    peaks = []
    for blocks in (2, 20):
        history = np.tile(i32(1, 2, 3, 4, 5), blocks * damping.BLOCK // 5)
        repetition(ids, history, 3)
        tracemalloc.start()
        repetition(ids, history, 3)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 4096


def test_logarithms_are_within_a_unit() -> None:
    values = np.array([*range(1, 2000), 2**16, 2**30, 2**31 - 1], np.int64)
    exact = [log2(int(v)) * ONE for v in values]
    found = log2_q16(values)
    assert all(floor(e) - 1 <= f <= e for e, f in zip(exact, found, strict=True))
    assert [int(log2_q16(np.array([1 << b]))[0]) for b in range(31)] == [b << 16 for b in range(31)]


def test_without_damping_it_is_greedy() -> None:
    damped = Damped(DampedParams(alpha_q15=0), VOCAB, 24)
    logits = i32(*[5] * 4, *[6] * 3, *[5] * 5)  # a unit of 2^-24: no distance in Q16
    for _ in range(5):
        assert damped.pick(logits) == 4
        damped.note(4)


def test_a_loop_ends() -> None:
    damped = Damped(DampedParams(), VOCAB, 16)
    logits = np.zeros((2, VOCAB), np.int32)
    logits[0, 1] = logits[1, 0] = 6 * ONE  # after 0 comes 1, after 1 comes 0, by 8.7 bits
    tokens = [0]
    for _ in range(80):
        tokens.append(damped.pick(logits[tokens[-1] % 2]))
        damped.note(tokens[-1])
    assert tokens[:10] == [0, 1] * 5
    assert set(tokens[40:]) - {0, 1}


def test_a_state_is_restored() -> None:
    damped = Damped(DampedParams(max_order=3), VOCAB, 16)
    other = Damped(DampedParams(max_order=3), VOCAB, 16)
    assert other.retained_bytes == 256
    other.restore(damped.state())
    for token in range(200):
        damped.note(token % VOCAB)
    other.restore(damped.state())
    assert other.history.tolist() == damped.history.tolist()
    assert other.state() == damped.state()
    assert other.retained_bytes == damped.retained_bytes == 4 * 256
    assert len(damped.state()) == 36 + 4 * 200 + 4


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    damped = Damped(DampedParams(), VOCAB, 16)
    for token in (1, 2, 3):
        damped.note(token)
    state = damped.state()
    other = Damped(DampedParams(), VOCAB, 16)
    other.note(5)
    before = other.state()
    for size in range(len(state)):
        with pytest.raises(BlobTruncatedError):
            other.restore(state[:size])
    for at in range(len(state)):
        for bit in (1, 128):
            flipped = bytearray(state)
            flipped[at] ^= bit
            with pytest.raises((BlobDamagedError, BlobTruncatedError, BlobVersionError)):
                other.restore(bytes(flipped))
    with pytest.raises(BlobDamagedError):
        other.restore(state + b"\0")
    assert other.state() == before


@pytest.mark.parametrize(
    "other",
    [
        Damped(DampedParams(alpha_q15=1), VOCAB, 16),
        Damped(DampedParams(max_order=3), VOCAB, 16),
        Damped(DampedParams(top_k=2), VOCAB, 16),
        Damped(DampedParams(), VOCAB + 1, 16),
        Damped(DampedParams(), VOCAB, 12),
    ],
)
def test_a_state_of_other_parameters_is_refused(other: Damped) -> None:
    with pytest.raises(BlobModelError):
        other.restore(Damped(DampedParams(), VOCAB, 16).state())


@pytest.mark.parametrize(
    "values",
    [
        {"alpha_q15": -1},
        {"alpha_q15": 2**20},
        {"alpha_q15": 1.0},
        {"max_order": 0},
        {"max_order": True},
        {"top_k": 0},
        {"top_k": "6"},
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(SettingError):
        DampedParams(**values)


def test_the_vocabulary_bounds_candidates_and_history() -> None:
    assert DampedParams() == DampedParams(65536, 2, 6) == DampedParams.for_vocab(6)
    assert DampedParams.for_vocab(4).top_k == 4
    with pytest.raises(SettingError, match="top_k is 6; the vocabulary has 5"):
        Damped(DampedParams(), 5, 16)
    with pytest.raises(InputError, match="token 12"):
        Damped(DampedParams(), VOCAB, 16).note(VOCAB)
