"""The constants of the arithmetic and the tables that conversion writes into an artifact.

Owns every number that the definition (`ops.py`) and the kernels share. Tables are computed in decimal
and integer arithmetic alone, so that they are the same bytes on every machine; nothing here knows
about models, files or CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from math import isqrt

import numpy as np
from numpy.typing import NDArray

ARITHMETIC_VERSION = 1

BLOCK = 32  # elements that share one activation scale
TILE = 16  # weight rows that the kernels read together
SUPERGROUP = 4  # weight groups whose minimum terms are summed before one shift
FRACTION_BITS = 16  # default fixed-point fraction of residual, projections and logits

INT32_MAX = 2**31 - 1
SCALE_BITS = 21  # the largest |value| of a quantised vector is normalised to this many bits
CODE_MAX = 127
SUM_SHIFT = 13  # scale * code sum is stored rounded by this many bits (R3)
NORM_BITS = 24  # RMSNorm normalises its input to this many bits
NORM_UP = 12  # and shifts it up by no more than this
GAIN_BITS = 23  # width of the integer gains of a norm
ROPE_LOW = 256  # positions of the low rotary table
ROPE_BITS = 30
SIGMOID_RANGE = 16  # the table covers [-16, 16)
SIGMOID_STEPS = 64  # intervals for one unit
SIGMOID_BITS = 24
CODE16_MAX = 32767  # of a router's codes and its input (R12)
SHARE_BITS = 30  # of an expert's weight (R13)
EXPERT_HEADROOM = (
    4  # an expert's output has so many fraction bits less: shares bring it back into range (R14)
)
LOG2E_Q20 = 1512775  # log2(e) * 2^20 (R11, R13)

# 2^-f = 1 - f (C1 - f (C2 - f (C3 - f C4))) for f in [0, 1), Q16; largest error 2 units (R8).
EXP2_Q16 = (45423, 15698, 3496, 454)

_DIGITS = 60


def _cos_sin(angle: Decimal) -> tuple[Decimal, Decimal]:
    """Cosine and sine by their Taylor series; exact to the decimal context for |angle| < 8."""
    cos, sin, term = Decimal(0), Decimal(0), Decimal(1)
    for n in range(120):
        sign = -1 if n % 4 >= 2 else 1
        if n % 2 == 0:
            cos += sign * term
        else:
            sin += sign * term
        term = term * angle / (n + 1)
    return cos, sin


def rope_frequencies(
    head_dim: int, theta: Decimal, factors: Sequence[Decimal] | None = None
) -> list[Decimal]:
    """Angles of one position step, radians: theta^(-2i/head_dim) / factors[i]."""
    half = head_dim // 2
    with localcontext() as context:
        context.prec = _DIGITS
        log_theta = theta.ln()
        base = [(-log_theta * 2 * i / head_dim).exp() for i in range(half)]
        return base if factors is None else [b / f for b, f in zip(base, factors, strict=True)]


def _powers(frequency: Decimal, step: int, count: int) -> list[tuple[int, int]]:
    """(cos, sin) of k * step * frequency for k < count, in Q30, by repeated exact rotation."""
    bits = 128
    with localcontext() as context:
        context.prec = _DIGITS
        angle = frequency * step
        turn = Decimal("6.283185307179586476925286766559005768394338798750211641949889")
        angle -= (angle / turn).to_integral_value() * turn
        c1, s1 = (int((v * 2**bits).to_integral_value()) for v in _cos_sin(angle))
    c, s, out = 1 << bits, 0, []
    half = 1 << (bits - ROPE_BITS - 1)
    for _ in range(count):
        out.append(((c + half) >> (bits - ROPE_BITS), (s + half) >> (bits - ROPE_BITS)))
        c, s = (c * c1 - s * s1) >> bits, (s * c1 + c * s1) >> bits
    return out


def rope_tables(
    frequencies: Sequence[Decimal], context_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rotary tables: low i32[256, half, 2] and high i32[ceil(context/256), half, 2], cos and sin, Q30.

    The angle of position p is low[p % 256] rotated by high[p // 256] (R6).
    """
    rows = -(-context_tokens // ROPE_LOW)
    low = [_powers(f, 1, ROPE_LOW) for f in frequencies]
    high = [_powers(f, ROPE_LOW, rows) for f in frequencies]
    as_table = [np.array(t, dtype=np.int32).transpose(1, 0, 2).copy() for t in (low, high)]
    return as_table[0], as_table[1]


def sigmoid_table() -> NDArray[np.int32]:
    """Sigmoid at -16, -16 + 1/64, ..., 16, Q24: i32[2049] (R9)."""
    points = range(-SIGMOID_RANGE * SIGMOID_STEPS, SIGMOID_RANGE * SIGMOID_STEPS + 1)
    with localcontext() as context:
        context.prec = 40
        scale = Decimal(2**SIGMOID_BITS)
        values = [scale / (1 + (Decimal(-i) / SIGMOID_STEPS).exp()) for i in points]
        return np.array([int(v.to_integral_value()) for v in values], dtype=np.int32)


def exp2_tables() -> tuple[list[int], list[int]]:
    """2^(-i / 256) and 2^(-i / 65536) for i < 256, Q30, from square roots of one half (R11)."""
    bits = 160
    root, roots = 1 << (bits - 1), []
    for _ in range(16):
        root = isqrt(root << bits)
        roots.append(root)
    return tuple(_integer_powers(roots[i], bits) for i in (7, 15))  # type: ignore[return-value]


def _integer_powers(ratio: int, bits: int) -> list[int]:
    value, out = 1 << bits, []
    for _ in range(256):
        out.append((value + (1 << (bits - 31))) >> (bits - 30))
        value = value * ratio >> bits
    return out


def mantissa_exponent(value: Fraction, bits: int) -> tuple[int, int]:
    """The nearest m * 2^e to a positive rational with m of exactly `bits` bits."""
    if value <= 0:
        raise ValueError("a positive value is needed")
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - bits
    mantissa = round(value / Fraction(2) ** exponent)
    while mantissa >= 1 << bits:
        exponent += 1
        mantissa = round(value / Fraction(2) ** exponent)
    while mantissa < 1 << (bits - 1):
        exponent -= 1
        mantissa = round(value / Fraction(2) ** exponent)
    return mantissa, exponent


def epsilon(text: str) -> tuple[int, int]:
    """A norm's epsilon, given as decimal text, as (mantissa of 31 bits, exponent)."""
    return mantissa_exponent(Fraction(text), 31)


def attention_scale(head_dim: int) -> tuple[int, int]:
    """log2(e) / sqrt(head_dim) as (mantissa of 30 bits, exponent)."""
    with localcontext() as context:
        context.prec = _DIGITS
        value = 1 / (Decimal(2).ln() * Decimal(head_dim).sqrt())
    return mantissa_exponent(Fraction(value), 30)


def dot_shift(num_blocks: int) -> int:
    """r of R3: how far a block's product is shifted so that num_blocks of them fit int32."""
    return max(0, (num_blocks - 1).bit_length() - 2)


def min_shift(num_groups: int) -> int:
    """r_m of R3: how far a supergroup's minimum term is shifted."""
    supergroups = -(-num_groups // SUPERGROUP)
    return max(0, (supergroups - 1).bit_length())
