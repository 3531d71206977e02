"""Every tier equals the definition bit for bit: one body for every operation, `==`, no tolerance."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.arith import numbers, ops
from headrace.kernels.layout import TileView, unpack
from headrace.kernels.program import PackedWeight
from headrace.kernels.select import unavailable
from kernels import cases

NATIVE_TIERS = ("portable", "avx2", "avx512", "neon")
F = 16
INT32 = st.integers(-(2**31) + 1, 2**31 - 1)


@pytest.fixture(params=NATIVE_TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    reason = unavailable()[request.param]
    if reason:
        pytest.skip(f"tier {request.param}: {reason}")
    return str(request.param)


def native() -> Any:
    return import_module("headrace.kernels._native")


def operands(w: PackedWeight) -> dict[str, Any]:
    return {f: getattr(w, f) for f in ("codes", "scales", "mins", "row", "n", "k", "bits", "group")}


def project(
    tier: str, w: PackedWeight, x: cases.Activation, bias: Any, y: NDArray[np.int32], cut: int
) -> list[int]:
    """Clips of each vector. Run in two ranges of tiles, so that an offset into a range shows."""
    tiles = w.codes.shape[0]
    names = ("x_codes", "x_scales", "x_sums", "x_rounded", "x_exponent")
    arrays = dict(zip(names, x.arrays(), strict=True))
    clipped = [0] * len(x.blocks)
    for first, last in ((0, cut), (cut, tiles)):
        counts = native().op_project(
            tier, **operands(w), **arrays, first_tile=first, last_tile=last, bias=bias, residual=True, y=y,
            fraction_bits=F,
        )  # fmt: skip
        clipped = [a + b for a, b in zip(clipped, counts, strict=True)]
    return clipped


def expect_project(tier: str, w: PackedWeight, x: cases.Activation, with_bias: bool = True) -> None:
    start = cases.painted(len(x.blocks) * w.n, -(2**20), 2**20).reshape(-1, w.n).astype(np.int32)
    bias = cases.painted(w.n, -(2**18), 2**18).astype(np.int32) if with_bias else None
    y = np.full((len(x.blocks), w.n + 3), 77, np.int32)
    y[:, : w.n] = start
    clipped = project(tier, w, x, bias, y, w.codes.shape[0] // 2)
    logical = unpack(w)
    wide = None if bias is None else bias.astype(np.int64)
    wanted = [
        ops.project(b, logical, F, wide, s.astype(np.int64))
        for b, s in zip(x.blocks, start, strict=True)
    ]
    assert np.array_equal(y[:, : w.n], np.stack([r.values for r in wanted]))
    assert (y[:, w.n :] == 77).all()
    assert clipped == [r.clipped for r in wanted]


@pytest.mark.parametrize("k", [32, 64, 96, 128, 160, 576, 1536, 2048])
@pytest.mark.parametrize(("bits", "mins"), [(4, False), (4, True), (8, False), (8, True)])
@pytest.mark.parametrize("n", [1, 15, 16, 33])
def test_projection_at_structural_edges(tier: str, n: int, k: int, bits: int, mins: bool) -> None:
    for group in (32, 64) if k % 64 == 0 else (32,):
        for m in (1, 2, 5):
            expect_project(tier, cases.weight(n, k, bits, group, mins), cases.activation(m, k))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 8, 11, 12, 13, 16, 17, 24, 25, 33, 64])
def test_projection_of_any_number_of_vectors(tier: str, m: int) -> None:
    for bits, mins in ((4, True), (8, False)):
        expect_project(
            tier,
            cases.weight(32, 160, bits, 32, mins, "random", m),
            cases.activation(m, 160, "random", m),
        )


@pytest.mark.parametrize("fill", ["high", "low", "zero", "random"])
@pytest.mark.parametrize("x_fill", ["high", "low", "zero", "outlier"])
def test_projection_at_the_limits(tier: str, fill: str, x_fill: str) -> None:
    for bits in (4, 8):
        for k in (128, 4096, 16384):
            w = cases.weight(17, k, bits, 32, True, fill)
            expect_project(tier, w, cases.activation(3, k, x_fill), with_bias=False)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    blocks=st.integers(1, 24),
    m=st.integers(1, 20),
    bits=st.sampled_from([4, 8]),
    mins=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_projection_of_random_operands(
    n: int, blocks: int, m: int, bits: int, mins: bool, seed: int
) -> None:
    w = cases.weight(n, 32 * blocks, bits, 32, mins, "random", seed)
    x = cases.activation(m, 32 * blocks, "random", seed)
    for name in NATIVE_TIERS:
        if not unavailable()[name]:
            expect_project(name, w, x)


def expect_quantize(tier: str, x: NDArray[np.int64], exponent: int) -> None:
    wanted = cases.Activation([ops.quantize(x, exponent)])
    out = cases.Activation.blank(len(x))
    native().op_quantize(tier, x, exponent, *out)
    for got, array in zip(out, wanted.arrays(), strict=True):
        assert np.array_equal(got, array.reshape(-1))
    if np.abs(x).max() < 2**31:
        out = cases.Activation.blank(len(x))
        native().op_quantize_i32(tier, x.astype(np.int32), exponent, *out)
        for got, array in zip(out, wanted.arrays(), strict=True):
            assert np.array_equal(got, array.reshape(-1))


@pytest.mark.parametrize("width", [0, 1, 2, 7, 8, 14, 15, 16, 20, 21, 22, 30, 31, 32, 45, 61])
def test_quantize_every_width(tier: str, width: int) -> None:
    peak = (1 << width) - 1
    expect_quantize(tier, cases.painted(160, -min(peak, 2**40), min(peak, 2**40)), -16)
    edge = np.zeros(96, np.int64)
    edge[[0, 33, 95]] = peak, -peak, 1
    expect_quantize(tier, edge, 3)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-(2**62) + 1, 2**62 - 1), min_size=32, max_size=32),
    st.lists(INT32, min_size=32, max_size=32),
)
def test_quantize_anything(first: list[int], second: list[int]) -> None:
    for name in NATIVE_TIERS:
        if not unavailable()[name]:
            expect_quantize(name, np.array(first + second, np.int64), 0)
            expect_quantize(name, np.array(second * 3, np.int64), -16)


def expect_norm(tier: str, x: NDArray[np.int64], eps: str) -> None:
    k = len(x)
    gain = cases.painted(k, -(2**23) + 1, 2**23 - 1)
    values, exponent = ops.rms_norm(x, gain, -22, numbers.epsilon(eps), F)
    wanted = cases.Activation([ops.quantize(values, exponent)])
    out = cases.Activation.blank(k)
    native().op_norm(
        tier, x.astype(np.int32), gain.astype(np.int32), -22, numbers.epsilon(eps), F, *out
    )
    for got, array in zip(out, wanted.arrays(), strict=True):
        assert np.array_equal(got, array.reshape(-1))
    head = x.astype(np.int32)
    clipped = native().op_head_norm(tier, head, gain.astype(np.int32), -22, numbers.epsilon(eps), F)
    scaled = ops.rescale(values, exponent, F)
    assert np.array_equal(head, scaled.values)
    assert clipped == scaled.clipped


@pytest.mark.parametrize("peak", [0, 1, 3, 255, 2**12, 2**23, 2**24, 2**25, 2**31 - 1])
def test_norm_of_every_size(tier: str, peak: int) -> None:
    for eps in ("1e-5", "1e-6", "0.9", "1e-12"):
        expect_norm(tier, cases.painted(96, -peak, peak), eps)
        outlier = cases.painted(64, -1, 1)
        outlier[5] = peak
        expect_norm(tier, outlier, eps)


@settings(max_examples=60, deadline=None)
@given(st.lists(INT32, min_size=32, max_size=32))
def test_norm_of_anything(values: list[int]) -> None:
    for name in NATIVE_TIERS:
        if not unavailable()[name]:
            expect_norm(name, np.array(values, np.int64), "1e-5")


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_rope(tier: str, head_dim: int) -> None:
    from decimal import Decimal

    low, high = numbers.rope_tables(numbers.rope_frequencies(head_dim, Decimal(10000)), 1024)
    for position in (0, 1, 255, 256, 257, 1023):
        for peak in (1, 2**16, 2**31 - 1):
            x = cases.painted(head_dim, -peak, peak)
            wanted = ops.rope(x, *ops.rotary(low, high, position))
            got = x.astype(np.int32)
            assert native().op_rope(tier, got, low, high, position) == wanted.clipped
            assert np.array_equal(got, wanted.values)


def tiles_of(count: int, head_dim: int, peak: int, tier: str | None) -> NDArray[np.uint8]:
    """Landed keys and values of `count` positions; by the definition when tier is None."""
    size = 32 * head_dim + 64 * (head_dim // 32) + 64
    tiles = -(-count // 16)
    raw = np.zeros(tiles * size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + tiles * size].reshape(tiles, size)
    for position in range(count):
        spread = peak >> (position % 5 * 3)  # exponents differ between positions
        key, value = (cases.painted(head_dim, -spread, spread, position + s) for s in (0, 97))
        if tier is None:
            blocks = (ops.quantize(v, -F) for v in (key, value))
            TileView(out[position // 16], head_dim).write(position % 16, *blocks)
        else:
            arrays = (v.astype(np.int32) for v in (key, value))
            native().op_land(tier, out[position // 16], position % 16, *arrays, F)
    return out


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("peak", [0, 1, 2**14, 2**20, 2**31 - 1])
def test_landing_and_attention(tier: str, head_dim: int, peak: int) -> None:
    count = 70
    tiles = tiles_of(count, head_dim, peak, tier)
    assert np.array_equal(tiles, tiles_of(count, head_dim, peak, None))
    views = [TileView(t, head_dim) for t in tiles]
    keys, values = (
        ops.Keys(
            *(np.concatenate(f) for f in zip(*(getattr(v, side)() for v in views), strict=True))
        )
        for side in ("keys", "values")
    )
    visible = np.array([1, 2, 15, 16, 17, 64, 70], np.int32)
    for q_peak in (0, 1, 2**16, 2**31 - 1):
        q = np.stack([cases.painted(head_dim, -q_peak, q_peak, i) for i in range(len(visible))])
        out = np.full(q.shape, -7, np.int32)
        clipped = native().op_attend(
            tier, tiles, q.astype(np.int32), visible, numbers.attention_scale(head_dim), F, out
        )
        wanted = [
            ops.attend(
                q[i], ops.Keys(*(f[:v] for f in keys)), ops.Keys(*(f[:v] for f in values)), F
            )
            for i, v in enumerate(visible)
        ]
        assert np.array_equal(out, np.stack([w.values for w in wanted]))
        assert clipped == [w.clipped for w in wanted]


def test_attention_over_many_equal_keys(tier: str) -> None:
    """Equal scores give every key the largest weight: the sums that int32 could not hold."""
    count, head_dim = 1600, 32
    tiles = tiles_of(16, head_dim, 0, None)
    view = TileView(tiles[0], head_dim)
    extreme = ops.Block(np.full(head_dim, 127, np.int64), np.full(1, 16513, np.int64), -21)
    for slot in range(16):
        view.write(slot, extreme, extreme)
    raw = np.zeros(count // 16 * tiles.shape[1] + 64, np.uint8)
    start = -raw.ctypes.data % 64
    many = raw[start : start + count // 16 * tiles.shape[1]].reshape(-1, tiles.shape[1])
    many[:] = tiles[0]
    q = np.full((1, head_dim), 2**16, np.int64)
    out = np.zeros((1, head_dim), np.int32)
    native().op_attend(
        tier,
        many,
        q.astype(np.int32),
        np.array([count], np.int32),
        numbers.attention_scale(head_dim),
        F,
        out,
    )
    held = view.keys()
    field = ops.Keys(*(np.concatenate([f] * (count // 16)) for f in held))
    assert np.array_equal(out[0], ops.attend(q[0], field, field, F).values)


@pytest.mark.parametrize("fraction_bits", [8, 12, 16, 20])
def test_silu(tier: str, fraction_bits: int) -> None:
    table = numbers.sigmoid_table()
    edges = [0, 1, -1, 16, -16, 2**31 - 1, -(2**31) + 1]
    near = [(s * 16 << fraction_bits) + d for s in (-1, 1) for d in (-1, 0, 1)]
    gate = np.concatenate(
        [np.array(edges + near, np.int64), cases.painted(160 - 13, -(2**21), 2**21)]
    )
    for up_peak in (1, 2**16, 2**31 - 1):
        up = cases.painted(160, -up_peak, up_peak)
        product = ops.silu_mul(gate, up, table, fraction_bits)
        wanted = cases.Activation([ops.quantize(product, -2 * fraction_bits)])
        out = cases.Activation.blank(160)
        native().op_silu_mul(
            tier, gate.astype(np.int32), up.astype(np.int32), table, fraction_bits, *out
        )
        for got, array in zip(out, wanted.arrays(), strict=True):
            assert np.array_equal(got, array.reshape(-1))


def expect_mix(tier: str, x: Any, outputs: Any, shares: Any, cuts: list[int]) -> None:
    """R14 at once, and in groups of terms: `cuts` are where one ends."""
    wanted = ops.mix_experts(x, outputs, shares)
    narrow = [np.ascontiguousarray(a.astype(np.int32)) for a in (outputs, shares)]
    got = x.astype(np.int32)
    assert native().op_mix(tier, got, *narrow) == wanted.clipped
    assert np.array_equal(got, wanted.values)
    got = x.astype(np.int32)
    counts = np.diff([0, *sorted(cuts), len(shares)]).tolist()
    assert native().op_mix_groups(tier, got, *narrow, counts) == wanted.clipped
    assert np.array_equal(got, wanted.values)


@pytest.mark.parametrize("count", [1, 2, 8, 64])
@pytest.mark.parametrize("width", [32, 96, 512, 544, 1056])
def test_mixture(tier: str, count: int, width: int) -> None:
    for peak in (1, 2**16, 2**31 - 1):
        outputs = cases.painted(count * width, -peak, peak).reshape(count, width)
        for share in (1, 2**30 // count, 2**30):
            shares = np.full(count, share, np.int64)
            x = cases.painted(width, -(2**31) + 1, 2**31 - 1, 7)
            for cuts in ([], [0], [count // 2], [0, count // 3, count // 3, count]):
                expect_mix(tier, x, outputs, shares, cuts)
    limit = np.full((count, width), 2**31 - 1, np.int64)
    for sign in (1, -1):
        expect_mix(tier, sign * limit[0], sign * limit, np.full(count, 2**30, np.int64), [1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.lists(st.integers(0, 12), max_size=5))
def test_mixture_of_anything(seed: int, count: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    outputs = rng.integers(-(2**31) + 1, 2**31, (count, 64)) >> rng.integers(0, 31, (count, 1))
    shares = rng.integers(0, 2**30 + 1, count)
    x = rng.integers(-(2**31) + 1, 2**31, 64) >> rng.integers(0, 31)
    for name in NATIVE_TIERS:
        if not unavailable()[name]:
            expect_mix(name, x, outputs, shares, [min(c, count) for c in cuts])


@pytest.mark.parametrize(
    ("bits", "mins", "group"), [(4, True, 32), (8, False, 32), (8, True, 64), (4, False, 64)]
)
def test_embedding(tier: str, bits: int, mins: bool, group: int) -> None:
    w = cases.weight(37, 192, bits, group, mins, "random", 5)
    for row in (0, 15, 16, 36):
        wanted = ops.embed(unpack(w), row, F)
        out = np.zeros(192, np.int32)
        clipped = native().op_embed(tier, **operands(w), token=row, fraction_bits=F, out=out)
        assert np.array_equal(out, wanted.values)
        assert clipped == wanted.clipped
