"""A guide's spans and picks over a written-out language, and draws among the allowed tokens alone."""

from __future__ import annotations

from typing import Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.constraint import Choices, Guide
from headrace.engine.sampler import Sampler
from headrace.errors import ConstraintError
from headrace.kernels.reference import ReferenceBackend
from headrace.values import SamplingParams

VOCAB = 40
END = 33
ENDS = frozenset({END, 35})


class Words:
    """A language of a few sentences of tokens, as a constraint."""

    def __init__(self, sentences: list[list[int]], taken: tuple[int, ...] = ()) -> None:
        self._sentences = sentences
        self._taken = list(taken)

    @property
    def _next(self) -> set[int]:
        at = len(self._taken)
        return {s[at] for s in self._sentences if s[:at] == self._taken and len(s) > at}

    @property
    def can_end(self) -> bool:
        return self._taken in self._sentences

    @property
    def ended(self) -> bool:
        return self.can_end and not self._next

    def mask(self) -> np.ndarray:
        words = np.zeros(2, np.uint32)
        for token in self._next | ({END} if self.can_end else set()):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def forced(self) -> list[int]:
        return []

    def advance(self, token: int) -> None:
        self._taken.append(token)

    def fork(self) -> Self:
        return type(self)(self._sentences, tuple(self._taken))

    def rollback(self, count: int) -> None:
        del self._taken[len(self._taken) - count :]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200), st.data())
def test_choices_are_the_bits_of_a_mask(vocab: int, data: st.DataObject) -> None:
    """Also where a mask has fewer or more words than the vocabulary needs."""
    size = data.draw(st.integers(1, 8))
    bits = data.draw(st.sets(st.integers(0, 32 * size - 1)))
    words = np.zeros(size, np.uint32)
    for bit in bits:
        words[bit // 32] |= np.uint32(1 << bit % 32)
    wanted = [t for t in range(vocab) if t in bits]
    choices = Choices(words, vocab)
    assert len(choices) == len(wanted)
    assert [t for t in range(vocab) if choices[t]] == wanted
    if wanted:
        assert choices.first() == wanted[0]
    array = np.asarray(choices)
    assert (array.dtype, array.shape) == (np.bool_, (vocab,))
    assert np.flatnonzero(array).tolist() == wanted


def test_a_span_goes_up_to_the_next_choice() -> None:
    guide = Guide(Words([[1, 2, 3, 34], [1, 2, 5]]), VOCAB, ENDS)
    assert guide.span(10) == [1, 2]
    assert guide.allowed is not None
    assert np.flatnonzero(guide.allowed).tolist() == [3, 5]
    guide.take(3)
    assert guide.span(10) == [34, END]
    assert guide.finished
    assert (guide.forced_tokens, guide.forced_spans) == (4, 2)


def test_an_end_is_a_choice_where_more_may_follow() -> None:
    guide = Guide(Words([[1], [1, 2]]), VOCAB, ENDS)
    assert guide.span(10) == [1]
    assert guide.allowed is not None
    assert np.flatnonzero(guide.allowed).tolist() == [2, END]


def test_a_span_keeps_to_its_limit() -> None:
    guide = Guide(Words([[1, 2, 3, 4]]), VOCAB, ENDS)
    assert guide.span(3) == [1, 2, 3]
    assert not guide.finished
    assert guide.span(1) == [4]
    assert guide.finished


def test_a_vocabulary_without_ends_finishes() -> None:
    guide = Guide(Words([[1]]), VOCAB, frozenset())
    assert guide.span(9) == [1]
    assert guide.finished
    assert guide.span(9) == []


def test_a_dead_end_is_an_error() -> None:
    guide = Guide(Words([]), VOCAB, ENDS)
    assert guide.span(5) == []
    with pytest.raises(ConstraintError) as caught:
        _ = guide.allowed
    assert caught.value.dead_end


def test_tokens_beyond_the_models_vocabulary_are_not_allowed() -> None:
    guide = Guide(Words([[1], [2], [39]]), 39, ENDS)
    assert guide.span(5) == []
    assert guide.allowed is not None
    assert np.flatnonzero(guide.allowed).tolist() == [1, 2]


def test_without_a_constraint_everything_is_let_through() -> None:
    guide = Guide(None, VOCAB, ENDS)
    assert guide.span(5) == []
    guide.take(3)
    assert guide.allowed is None
    assert not guide.finished


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.3, 1.0, 100.0]),
    st.sampled_from([0, 1, 3]),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([1.0, 1.7]),
    st.data(),
)
def test_a_pick_is_that_of_a_vocabulary_without_the_others(
    values: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition: float,
    data: st.DataObject,
) -> None:
    """However likely a masked token is: it takes part in no filter and in no sum."""
    kept = sorted(data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1)))
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
    )
    logits = np.array(values, np.int32)
    masked = Sampler(params, 7, len(values), 16, ReferenceBackend())
    alone = Sampler(params, 7, len(kept), 16, ReferenceBackend())
    for position in range(4):
        found = masked.pick(logits, position, np.isin(np.arange(len(values)), kept))
        assert found == kept[alone.pick(logits[kept], position)]


def test_a_token_that_was_not_picked_is_history_all_the_same() -> None:
    logits = np.array([4, 3], np.int32) << 16
    sampler = Sampler(
        SamplingParams(temperature=0, presence_penalty=2), 0, 2, 16, ReferenceBackend()
    )
    sampler.note(0)
    assert sampler.pick(logits, 0) == 1


class Strict(Words):
    """Refuses what cannot follow, as grammars do."""

    def advance(self, token: int) -> None:
        if token not in self._next:
            raise ConstraintError("cannot follow")
        super().advance(token)


def test_drafts_are_cut_where_the_grammar_forbids_them() -> None:
    guide = Guide(Strict([[1, 2, 3, 4], [1, 5, 6]]), VOCAB, ENDS)
    assert guide.span(10) == [1]
    for drafts, kept in (
        ([2, 3, 4], 3), ([2, 3, 6], 2), ([2, 6, 4], 1), ([5, 6, 1], 2), ([9, 2], 0), ([5], 1), ([9], 0), ([], 0),
    ):  # fmt: skip
        assert guide.permitted(drafts) == drafts[:kept]
    assert guide.span(10) == []  # it is where it was
    guide.take(5)
    assert guide.span(10)[0] == 6
    assert Guide(None, VOCAB, ENDS).permitted([7, 8]) == [7, 8]
