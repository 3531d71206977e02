"""The native draw equals its definition for any logits and parameters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.arith.sampling import MAX_INVERSE_TEMPERATURE, Draw, draw
from headrace.kernels.select import native_module, select

needs_native = pytest.mark.skipif(native_module() is None, reason="the native module was not built")
EXTREME = [1, 65536, 2**33, MAX_INVERSE_TEMPERATURE - 1, MAX_INVERSE_TEMPERATURE]
WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**64 - 1]))
SHARES = st.one_of(st.integers(0, 65536), st.sampled_from([0, 1, 65535, 65536]))


def parameters(bits: int = 16) -> st.SearchStrategy[Draw]:
    temperatures = st.one_of(
        st.integers(1, 2**20), st.integers(2**20, 2**36), st.sampled_from(EXTREME)
    )
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


@needs_native
@pytest.mark.parametrize("inverse", EXTREME)
@pytest.mark.parametrize("bits", [8, 16, 24])
@pytest.mark.parametrize("share", [0, 1, 65535, 65536])
def test_the_extremes(inverse: int, bits: int, share: int) -> None:
    """The widest logits, and logits whose distances are next to what has a weight."""
    edge = Draw(inverse, 0, 65536, 0, bits).reach
    near = [0, -1, -edge + 1, -edge, -edge - 1]
    for values in ([*near, -(2**62)], [2**63 - 1, 2**63 - 2, 0, -(2**63)], [-(2**63), 1 - 2**63]):
        logits = np.array(values, np.int64)
        for top_k in (0, 1, 2, 2**31 - 1):
            for top_p, min_p in ((share, 0), (65536, share), (share, share)):
                how = Draw(inverse, top_k, top_p, min_p, bits)
                for word in (0, 1, 2**63, 2**64 - 1):
                    assert select("portable").draw(logits, how, word) == draw(logits, how, word)


BOUNDS = {
    "inverse_temperature": (0, 2**36 + 1), "top_k": (-1, 2**31), "top_p": (-1, 65537),
    "min_p": (-1, 65537), "fraction_bits": (7, 25),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_parameters_out_of_bounds_are_refused(name: str) -> None:
    good = dict(inverse_temperature=65536, top_k=0, top_p=65536, min_p=0, fraction_bits=16)
    for value in BOUNDS[name]:
        with pytest.raises(ValueError, match=name):
            Draw(**{**good, name: value})
