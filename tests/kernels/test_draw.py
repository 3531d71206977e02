"""The native draw equals its definition for any logits and parameters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.arith.sampling import Draw, draw
from headrace.kernels.select import native_module, select

needs_native = pytest.mark.skipif(native_module() is None, reason="the native module was not built")
WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**64 - 1]))
SHARES = st.one_of(st.integers(0, 65536), st.sampled_from([0, 1, 65535, 65536]))


def parameters(bits: int = 16) -> st.SearchStrategy[Draw]:
    temperatures = st.one_of(st.integers(1, 2**20), st.just(65536), st.just(2**33))
    return st.builds(
        Draw, temperatures, st.sampled_from([0, 1, 2, 7, 40, 5000]), SHARES, SHARES, st.just(bits)
    )


@needs_native
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-(2**31) + 1, 2**31 - 1), min_size=1, max_size=200),
    st.integers(0, 26),
    st.booleans(),
    st.sampled_from([8, 16, 24]).flatmap(parameters),
    WORDS,
)
def test_native_equals_the_definition(
    values: list[int], narrower: int, wide: bool, how: Draw, word: int
) -> None:
    logits = np.array(values, np.int64) >> narrower  # close logits keep many tokens, with ties
    logits = logits * 3 if wide else logits.astype(np.int32)
    assert select("portable").draw(logits, how, word) == draw(logits, how, word)


@needs_native
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
def test_a_large_vocabulary(spread: float) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(0, spread, 1 << 20) * 65536).astype(np.int32)
    for top_k, top_p, min_p in (
        (0, 65536, 0),
        (0, 62259, 0),
        (40, 62259, 0),
        (0, 65536, 3277),
        (3000, 65536, 655),
    ):
        how = Draw(round(65536 / 0.7), top_k, top_p, min_p, 16)
        for word in rng.integers(0, 2**64, 4, dtype=np.uint64).tolist():
            assert select("portable").draw(logits, how, word) == draw(logits, how, word)
