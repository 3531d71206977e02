"""What a typed configuration refuses, and a program that would leave its bounds."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from headrace.errors import InputError
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program

GOOD = DecoderConfig(
    vocab_size=272,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=112,
    context=1024,
    norm_eps="1e-05",
    rope_theta="10000.0",
    tied=True,
)


def with_eps(text: str) -> DecoderConfig:
    return DecoderConfig.from_json({**asdict(GOOD), "norm_eps": text})


@pytest.mark.parametrize("text", ["1e-19", "1e-05", "0.5", "0.999999999999999999999"])
def test_an_epsilon_below_one_is_taken(text: str) -> None:
    assert with_eps(text).norm_eps == text


@pytest.mark.parametrize("text", ["1", "1.0", "1e0", "1.5", "1e6", "9e19"])
def test_an_epsilon_of_one_or_more_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="norm_eps is .*; it must be below 1"):
        with_eps(text)


@pytest.mark.parametrize("text", ["0", "-1e-5", "nan", "inf", "1e-40", "x", ""])
def test_an_epsilon_that_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="norm_eps is .*; it must be a positive number"):
        with_eps(text)


@pytest.mark.parametrize(("text", "bits"), [("0.9", 24), ("0.001", 24), ("0.2", 20)])
def test_an_epsilon_too_large_for_the_fraction_is_refused(text: str, bits: int) -> None:
    """At 24 fraction bits, 0.001 in the units of R4's mean would not fit int64 beside it."""
    with pytest.raises(InputError, match=f"norm_eps is {text}; with {bits} fraction bits"):
        build_program(with_eps(text), {}, {}, bits)
