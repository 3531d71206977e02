"""The block formats of GGUF tensors: bytes of rows to affine groups of 32, with their codes kept.

Facts of each layout are those of the GGUF specification; every decoder takes u8 [rows, blocks, bytes].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.packing import AffineRows, quantize_rows

Bytes = NDArray[np.uint8]
Float = NDArray[np.float64]


@dataclass(frozen=True)
class BlockFormat:
    """A quantised GGUF tensor type: elements and bytes of one block, and its decoder.

    `bits` and `mins` say what the decoder returns.
    """

    name: str
    elements: int
    nbytes: int
    bits: int
    mins: bool
    decode: Callable[[Bytes], AffineRows]


def _half(b: Bytes, at: int) -> Float:
    """float16 at byte `at` of every block: [rows, blocks]."""
    return np.ascontiguousarray(b[..., at : at + 2]).view("<f2")[..., 0].astype(np.float64)


def _nibbles(b: Bytes) -> Bytes:
    """Low nibbles of all bytes, then the high ones: [..., 2 * bytes]."""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def _rows(scales: Float, codes: Bytes, mins: Float | None, bits: int) -> AffineRows:
    n = len(codes)
    flat = None if mins is None else mins.reshape(n, -1)
    return AffineRows(scales.reshape(n, -1), codes.reshape(n, -1), flat, bits, 32)


def _fifth_bits(b: Bytes) -> Bytes:
    """The 32 single bits of 4 little-endian bytes: [..., 32]."""
    return np.unpackbits(np.ascontiguousarray(b), axis=-1, bitorder="little")


def _q4_0(b: Bytes) -> AffineRows:
    return _rows(_half(b, 0), _nibbles(b[..., 2:18]), None, 4)


def _q4_1(b: Bytes) -> AffineRows:
    return _rows(_half(b, 0), _nibbles(b[..., 4:20]), _half(b, 2), 4)


# Five-bit codes are kept inside 8-bit ones with the same centre: q - 16 = (q + 112) - 128.
def _q5_0(b: Bytes) -> AffineRows:
    codes = _nibbles(b[..., 6:22]) + 16 * _fifth_bits(b[..., 2:6]) + np.uint8(112)
    return _rows(_half(b, 0), codes, None, 8)


def _q5_1(b: Bytes) -> AffineRows:
    codes = _nibbles(b[..., 8:24]) + 16 * _fifth_bits(b[..., 4:8]) + np.uint8(112)
    scales = _half(b, 0)
    return _rows(scales, codes, _half(b, 2) - 112 * scales, 8)


def _q8_0(b: Bytes) -> AffineRows:
    return _rows(_half(b, 0), b[..., 2:34] ^ np.uint8(0x80), None, 8)


def _k_scales(b: Bytes) -> tuple[Float, Float]:
    """The eight 6-bit scales and minimums of a K block's 12 bytes: [..., 8] each."""
    low, high, rest = b[..., 0:4], b[..., 4:8], b[..., 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=-1)
    mins = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=-1)
    return scales.astype(np.float64), mins.astype(np.float64)


def _k_codes(b: Bytes) -> Bytes:
    """128 bytes of nibbles: each 32 bytes hold 32 low codes, then 32 high ones: [..., 8, 32]."""
    parts = b.reshape(*b.shape[:-1], 4, 1, 32)
    both = np.concatenate([parts & 15, parts >> 4], axis=-2)
    return both.reshape(*b.shape[:-1], 8, 32)


def _q4_k(b: Bytes) -> AffineRows:
    scales, mins = _k_scales(b[..., 4:16])
    d, dmin = _half(b, 0)[..., None], _half(b, 2)[..., None]
    return _rows(d * scales, _k_codes(b[..., 16:144]), -dmin * mins, 4)


def _q5_k(b: Bytes) -> AffineRows:
    scales, mins = _k_scales(b[..., 4:16])
    d, dmin = _half(b, 0)[..., None] * scales, _half(b, 2)[..., None] * mins
    high = (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _k_codes(b[..., 48:176]) + 16 * high + np.uint8(112)
    return _rows(d, codes, -dmin - 112 * d, 8)


def _q6_k(b: Bytes) -> AffineRows:
    """Groups of 16 do not fit groups of 32, so the values are quantised again, to 8 bits."""
    low = b[..., :128].reshape(*b.shape[:-1], 2, 1, 64)
    nibbles = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*b.shape[:-1], 2, 4, 32)
    pairs = (
        b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    ) & 3
    codes = (nibbles | (pairs << 4)).astype(np.float64).reshape(*b.shape[:-1], 16, 16) - 32
    scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8) * _half(b, 208)[..., None]
    values = (codes * scales[..., None]).reshape(len(b), -1)
    return quantize_rows(values, 8, 32)


BLOCK_FORMATS = {
    code: BlockFormat(*fields)
    for code, fields in {
        2: ("Q4_0", 32, 18, 4, False, _q4_0),
        3: ("Q4_1", 32, 20, 4, True, _q4_1),
        6: ("Q5_0", 32, 22, 8, False, _q5_0),
        7: ("Q5_1", 32, 24, 8, True, _q5_1),
        8: ("Q8_0", 32, 34, 8, False, _q8_0),
        12: ("Q4_K", 256, 144, 4, True, _q4_k),
        13: ("Q5_K", 256, 176, 8, True, _q5_k),
        14: ("Q6_K", 256, 210, 8, False, _q6_k),
    }.items()
}

FLOAT_TYPES = {0: "F32", 1: "F16", 30: "BF16"}


def floats(dtype: str, data: NDArray[np.generic]) -> Float:
    """F32, F16 or BF16 (raw 16-bit words) as float64."""
    if dtype == "BF16":
        wide = data.astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    return data.astype(np.float64)
