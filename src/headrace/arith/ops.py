"""The definition of record: every operation of headrace, in NumPy integers, slow on purpose.

What a function here returns is right by definition; kernels are right when they return the same
bits. The rules are numbered as in docs/arithmetic.md, where their bounds are derived. Arrays are
int64 inside, so no intermediate can wrap; a value is narrowed only by `saturate`, which counts.
This module knows nothing of models, files, threads or memory layouts.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers as n

Int = NDArray[np.int64]
Table = NDArray[np.int32]


class Block(NamedTuple):
    """A quantised vector: value[k] = 2^exponent * scales[k // 32] * codes[k]  (R2)."""

    codes: Int  # i8 range [K], within +-127
    scales: Int  # [K / 32], 0..16513
    exponent: int

    def sums(self) -> Int:
        """Sum of each block's codes: [K / 32], within +-4064."""
        return _row_sums(self.codes.reshape(-1, n.BLOCK))


class Weight(NamedTuple):
    """An affine block weight [N, K]:

    value = mantissa * 2^exponent * (scales * codes + mins * 2^min_shift), scales and mins by group.
    """

    codes: Int  # [N, K], centred: [-8, 7] for 4 bits, [-128, 127] for 8
    scales: Int  # [N, K / group], within +-32767
    mins: Int | None  # [N, K / group], within +-32767
    mantissa: Int  # [N], 2^14 .. 2^15 - 1, or 0
    exponent: Int  # [N]
    min_shift: Int  # [N], 0..14
    bits: int  # 4 or 8
    group: int  # 32 or 64


class Saturated(NamedTuple):
    """An int32 result with the number of its elements that were clipped."""

    values: Int
    clipped: int


# R1 ---------------------------------------------------------------------------------------------


def shift_round(x: Int, shift: Int | int) -> Int:
    """x / 2^shift, rounded half up; a negative shift multiplies. |x| < 2^62.

    Shifts beyond 62 give 0; left shifts saturate at +-2^62, which `saturate` then clips anyway.
    """
    x, shift = np.broadcast_arrays(np.asarray(x, np.int64), np.asarray(shift, np.int64))
    right = np.clip(shift, 1, 62)
    down = (x + (np.int64(1) << (right - 1))) >> right
    left = np.clip(-shift, 0, 62)
    limit = np.int64(1 << 62) >> left
    up = np.clip(x, -limit, limit) << left
    return np.where(shift > 62, 0, np.where(shift > 0, down, up))


def saturate(x: Int) -> Saturated:
    """Narrow to int32, symmetric: within +-(2^31 - 1)."""
    values = np.clip(x, -n.INT32_MAX, n.INT32_MAX)
    return Saturated(values, int(np.count_nonzero(values != x)))


def bit_length(x: int) -> int:
    return int(x).bit_length()


def _row_sums(x: Int) -> Int:
    sums: Int = x.sum(axis=1)
    return sums


# R2 ---------------------------------------------------------------------------------------------


def quantize(x: Int, exponent: int) -> Block:
    """Quantise x * 2^exponent, int64 [K] with |x| < 2^62 and K a multiple of 32."""
    blocks = np.asarray(x, np.int64).reshape(-1, n.BLOCK)
    peaks = [int(p) for p in np.abs(blocks).max(axis=1)]
    peak = max(peaks)
    if peak == 0:
        return Block(np.zeros(x.shape, np.int64), np.zeros(len(peaks), np.int64), 0)
    shift = n.SCALE_BITS - bit_length(peak)
    scales = [_block_scale(p, shift) for p in peaks]
    codes = [_block_codes(b, p, a, shift) for b, p, a in zip(blocks, peaks, scales, strict=True)]
    return Block(np.concatenate(codes), np.array(scales, np.int64), exponent - shift)


def _block_scale(peak: int, shift: int) -> int:
    """ceil(peak * 2^shift / 127): at most 16513."""
    numerator, denominator = peak << max(shift, 0), n.CODE_MAX << max(-shift, 0)
    return -(-numerator // denominator)


def _block_codes(block: Int, peak: int, scale: int, shift: int) -> Int:
    """round(block * 2^shift / scale), through 16-bit values and a reciprocal of 22 bits."""
    if peak == 0:
        return np.zeros(n.BLOCK, np.int64)
    width = bit_length(peak)
    reduced = shift_round(block, width - 15)
    places = 7 + width + shift
    inverse = (1 << places) // scale if places >= 0 else 0
    return (reduced * inverse + (1 << 21)) >> 22


# R3 ---------------------------------------------------------------------------------------------


def combined_scale(s: Int, a: Int) -> Int:
    """The product of a weight's and an activation's scale in 16 bits: (s * a + 2^14) >> 15."""
    return (s * a + (1 << 14)) >> 15


def dot(x: Block, codes: Int, scales: Int, bits: int, group: int) -> Int:
    """The one primitive: accumulators of rows [N, K] of codes against one vector, int32 range [N].

    One unit is 2^(15 + h + r + x.exponent) times the row's own scale, with h = 0 for 4 bits and 4
    for 8, r = dot_shift(K / 32).
    """
    num_blocks = codes.shape[1] // n.BLOCK
    products = codes.reshape(-1, num_blocks, n.BLOCK) * x.codes.reshape(num_blocks, n.BLOCK)
    sums = products.sum(axis=2)
    narrow = sums if bits == 4 else (sums + 8) >> 4
    scale = combined_scale(np.repeat(scales, group // n.BLOCK, axis=1), x.scales)
    return _row_sums((narrow * scale) >> n.dot_shift(num_blocks))


def min_dot(x: Block, mins: Int, group: int) -> Int:
    """The minimum term of the rows: [N], one unit 2^(13 + r_m + min_shift + x.exponent)."""
    rounded = shift_round(x.scales * x.sums(), n.SUM_SHIFT)
    by_group = rounded.reshape(-1, group // n.BLOCK).sum(axis=1)
    pad = -mins.shape[1] % n.SUPERGROUP
    terms = np.pad(mins * by_group, ((0, 0), (0, pad)))
    supers = terms.reshape(len(mins), -1, n.SUPERGROUP).sum(axis=2)
    return _row_sums(supers >> n.min_shift(mins.shape[1]))


def project(
    x: Block,
    weight: Weight,
    fraction_bits: int,
    bias: Int | None = None,
    residual: Int | None = None,
) -> Saturated:
    """weight @ x (+ bias) (+ residual) in fixed point, int32 range [N]."""
    num_blocks = weight.codes.shape[1] // n.BLOCK
    num_groups = weight.scales.shape[1]
    r, r_m = n.dot_shift(num_blocks), n.min_shift(num_groups)
    h = 0 if weight.bits == 4 else 4
    acc = dot(x, weight.codes, weight.scales, weight.bits, weight.group)
    acc = acc << (2 + h + r - r_m)
    if weight.mins is not None:
        acc = acc + (min_dot(x, weight.mins, weight.group) << weight.min_shift)
    places = weight.exponent + x.exponent + n.SUM_SHIFT + r_m + fraction_bits
    out = shift_round(acc * weight.mantissa, -places)
    for term in (bias, residual):
        if term is not None:
            out = out + term
    return saturate(out)


# R4, R5 -----------------------------------------------------------------------------------------


def rms_norm(
    x: Int, gain: Int, gain_exponent: int, eps: tuple[int, int], fraction_bits: int
) -> tuple[Int, int]:
    """RMSNorm of fixed-point x (int32 range, [K], K <= 16384): (values of 31 bits, exponent)."""
    width = bit_length(int(np.abs(x).max()))
    shift = min(n.NORM_BITS - width, n.NORM_UP)
    reduced = shift_round(x, -shift)
    mean = int((reduced * reduced).sum()) // len(x)
    mean += _shift_floor(eps[0], -eps[1] - 2 * (fraction_bits + shift))
    if mean == 0:
        return np.zeros(len(x), np.int64), 0
    half_shift = (62 - bit_length(mean)) // 2
    root = isqrt(mean << (2 * half_shift))
    inverse = (1 << 61) // root
    normal = shift_round(reduced * inverse, 31)
    return shift_round(normal * gain, 17), 17 + half_shift - 30 + gain_exponent


def _shift_floor(value: int, places: int) -> int:
    return value >> places if places >= 0 else value << -places


def rescale(x: Int, exponent: int, fraction_bits: int) -> Saturated:
    """x * 2^exponent as fixed point."""
    return saturate(shift_round(x, -(exponent + fraction_bits)))


# R6 ---------------------------------------------------------------------------------------------


def rotary(low: Table, high: Table, position: int) -> tuple[Int, Int]:
    """Cosines and sines of a position, Q30, [head_dim / 2] each."""
    lc, ls = np.moveaxis(np.asarray(low[position % n.ROPE_LOW], np.int64), -1, 0)
    hc, hs = np.moveaxis(np.asarray(high[position // n.ROPE_LOW], np.int64), -1, 0)
    cos = shift_round(hc * lc - hs * ls, n.ROPE_BITS)
    sin = shift_round(hs * lc + hc * ls, n.ROPE_BITS)
    return cos, sin


def rope(x: Int, cos: Int, sin: Int) -> Saturated:
    """Rotate the pairs (i, i + head_dim / 2) of one head, fixed point [head_dim]."""
    a, b = np.split(np.asarray(x, np.int64), 2)
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin])
    return saturate(shift_round(turned, n.ROPE_BITS))


# R7, R8 -----------------------------------------------------------------------------------------


def exp2_negative(delta: Int) -> Int:
    """2^-delta for delta >= 0 in Q16: an integer in [0, 65536]."""
    c1, c2, c3, c4 = n.EXP2_Q16
    f = delta & 0xFFFF
    t = c3 - ((c4 * f) >> 16)
    t = c2 - ((t * f) >> 16)
    t = c1 - ((t * f) >> 16)
    p = 65536 - ((t * f + (1 << 15)) >> 16)
    return shift_round(p, np.minimum(delta >> 16, 31))


_EXP2_HIGH, _EXP2_LOW = (np.array(t, np.int64) for t in n.exp2_tables())


def exp2_negative_q30(delta: Int) -> Int:
    """2^-delta for delta >= 0 in Q16, for sampling: an integer in [0, 2^30]  (R11)."""
    high, low = _EXP2_HIGH[(delta >> 8) & 0xFF], _EXP2_LOW[delta & 0xFF]
    return shift_round(shift_round(high * low, 30), np.minimum(delta >> 16, 62))


class Keys(NamedTuple):
    """Keys or values of one head, in order of position: quantised vectors (R7)."""

    codes: Int  # [n, head_dim]
    scales: Int  # [n, head_dim / 32]
    exponents: Int  # [n]


def scores(q: Block, keys: Keys) -> Int:
    """log2-domain attention scores in Q16, int32 range within +-2^30: [n]."""
    head_dim = keys.codes.shape[1]
    mantissa, exponent = n.attention_scale(head_dim)
    acc = dot(q, keys.codes, keys.scales, 8, n.BLOCK)
    r = n.dot_shift(head_dim // n.BLOCK)
    places = 15 + 4 + r + q.exponent + keys.exponents + exponent + 16
    return np.clip(shift_round(acc * mantissa, -places), -(1 << 30), 1 << 30)


def attend(q: Int, keys: Keys, values: Keys, fraction_bits: int) -> Saturated:
    """One head's attention over its n visible keys: fixed point [head_dim]."""
    s = scores(quantize(q, -fraction_bits), keys)
    weights = exp2_negative(s.max() - s)
    top = int(values.exponents.max())
    places = 16 + (top - values.exponents)
    blocks = shift_round(weights[:, None] * values.scales, places[:, None])
    combined = np.repeat(blocks, n.BLOCK, axis=1)
    acc = (combined * values.codes).sum(axis=0)
    return _divide(acc, int(weights.sum()), top, fraction_bits)


def _divide(acc: Int, total: int, exponent: int, fraction_bits: int) -> Saturated:
    """acc * 2^(16 + exponent) / total in fixed point, for total >= 2^16 and |acc| <= 64 total."""
    width = bit_length(total)
    normal = total >> (width - 31) if width > 31 else total << (31 - width)
    inverse = (1 << 61) // normal
    reduced = shift_round(acc, width - 25)
    return saturate(shift_round(reduced * inverse, 39 - exponent - fraction_bits))


# R9, R10 ----------------------------------------------------------------------------------------


def silu_mul(gate: Int, up: Int, table: Table, fraction_bits: int) -> Int:
    """silu(gate) * up, fixed point with 2 * fraction_bits, |result| < 2^62: [K]."""
    return shift_round(gate * sigmoid(gate, table, fraction_bits), n.SIGMOID_BITS) * up


def sigmoid(gate: Int, table: Table, fraction_bits: int) -> Int:
    """The sigmoid of fixed-point values, Q24: [K]."""
    step_bits = fraction_bits - 6
    offset = gate + (n.SIGMOID_RANGE << fraction_bits)
    inside = np.clip(offset, 0, (2 * n.SIGMOID_RANGE << fraction_bits) - 1)
    index, rest = inside >> step_bits, inside & ((1 << step_bits) - 1)
    low, high = np.asarray(table, np.int64)[index], np.asarray(table, np.int64)[index + 1]
    inner = low + shift_round((high - low) * rest, step_bits)
    limit = n.SIGMOID_RANGE << fraction_bits
    return np.where(gate < -limit, 0, np.where(gate >= limit, 1 << n.SIGMOID_BITS, inner))


def embed(weight: Weight, row: int, fraction_bits: int) -> Saturated:
    """One row of an embedding in fixed point: [K]."""
    value = np.repeat(weight.scales[row], weight.group) * weight.codes[row]
    if weight.mins is not None:
        value = value + np.repeat(weight.mins[row] << weight.min_shift[row], weight.group)
    places = int(weight.exponent[row]) + fraction_bits
    return saturate(shift_round(value * weight.mantissa[row], -places))


# R12 .. R15 -------------------------------------------------------------------------------------


def route_logits(
    x: Int, exponent: int, codes: Int, exponents: Int, fraction_bits: int
) -> Saturated:
    """Router logits of a normed vector (R4's values and exponent) in fixed point: [E].

    The vector is rounded to 16 bits by its own largest element. codes int16 range [E, K]; a sum is
    below 2^30 K, so below 2^44.
    """
    peak = int(np.abs(x).max())
    shift = bit_length(peak) - 15
    reduced = np.minimum(shift_round(x, shift), n.CODE16_MAX)
    acc = codes.astype(np.int64) @ reduced
    return saturate(shift_round(acc, -(exponents + exponent + shift + fraction_bits)))


def choose_experts(logits: Int, top_k: int, normalise: bool, fraction_bits: int) -> tuple[Int, Int]:
    """The top_k likeliest experts, ties to the lower index, and their weights, Q30: [top_k] each.

    normalise: shares of the chosen; otherwise shares of all experts.
    """
    order = np.argsort(-logits, kind="stable")
    chosen = order[:top_k]
    below = (logits[chosen[0]] - logits) * n.LOG2E_Q20 >> (4 + fraction_bits)
    shares = exp2_negative_q30(below)
    total = int(shares[chosen].sum() if normalise else shares.sum())
    return chosen, (shares[chosen] << n.SHARE_BITS) // total


def mix_experts(x: Int, outputs: Int, weights: Int) -> Saturated:
    """x plus the weighted outputs of its chosen experts: outputs [top_k, K], weights [top_k], Q30.

    Outputs have EXPERT_HEADROOM fraction bits less than x: one that is many times x must not be clipped.
    Every product is rounded alone, so the order of the experts cannot matter.
    """
    parts = shift_round(outputs * weights[:, None], n.SHARE_BITS - n.EXPERT_HEADROOM)
    return saturate(x + parts.sum(axis=0))


def add_shared(x: Int, output: Int, gate: Int, table: Table, fraction_bits: int) -> Saturated:
    """x plus a shared expert's output [K] times the sigmoid of its gate [1]."""
    return saturate(x + shift_round(output * sigmoid(gate, table, fraction_bits), n.SIGMOID_BITS))


# R16 --------------------------------------------------------------------------------------------


def adapt(x: Block, a: Weight, b: Weight, fraction_bits: int, y: Int) -> Saturated:
    """y plus b @ (a @ x), fixed point [N]: the pair of a LoRA adapter beside the projection of x that gave y.

    The inner vector has x's own exponent, so its precision does not depend on how large x is; conversion scales
    `a` so that it cannot clip.
    """
    inner = project(Block(x.codes, x.scales, 0), a, 0)
    out = project(quantize(inner.values, x.exponent), b, fraction_bits, residual=y)
    return Saturated(out.values, inner.clipped + out.clipped)
