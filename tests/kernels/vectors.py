"""Painted vectors: inputs by formula, outputs as SHA-256, one JSON an operation in tests/vectors.

Run as a script it writes the files from the definition. tests/native/vectors.cpp paints the same inputs, so
that an instruction set can be held to the definition where there is no Python (Arm under qemu).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.arith import numbers, ops
from headrace.kernels.layout import TileView, unpack
from headrace.kernels.program import PackedWeight
from kernels.cases import Activation, painted

FOLDER = Path(__file__).parent.parent / "vectors"
Case = Mapping[str, int]
Int = NDArray[np.int64]
EPS = numbers.epsilon("1e-5")
TABLE = np.arange(2049, dtype=np.int32) * np.int32(8191)  # stands for the sigmoid table


def vector(c: Case, count: int, start: int = 0) -> Int:
    """Values whose size falls from block to block: within +-2^bits, shifted by 0, 3, 6, 9 places."""
    bits = min(c["bits"], 54)  # what `painted` can do without wrapping
    x = painted(count, -(1 << bits) + 1, (1 << bits) - 1, start) << (c["bits"] - bits)
    shifted: Int = x >> (np.arange(count) // 32 % 4 * 3)
    return shifted


def block_bytes(block: ops.Block) -> list[Any]:
    return list(Activation([block]).arrays())


def packed(c: Case) -> PackedWeight:
    n, k, bits, group = c["n"], c["k"], c["bits"], c["group"]
    tiles, groups = -(-n // 16), k // group
    codes = painted(tiles * k * 2 * bits, 0, 255).astype(np.uint8)
    scales = painted(tiles * groups * 16, -32767, 32767, 1).astype(np.int16)
    mins = painted(tiles * -(-groups // 4) * 64, -32767, 32767, 2).astype(np.int16)
    wide = mins.reshape(tiles, -1, 16, 4)
    wide *= np.arange(wide.shape[1] * 4).reshape(-1, 1, 4) < groups  # the last group's padding is 0
    rows = np.stack([painted(tiles * 16, 1 << 14, (1 << 15) - 1, 3), painted(tiles * 16, -55, -30, 4),
                     painted(tiles * 16, 0, 14, 5) * c["mins"]])  # fmt: skip
    return PackedWeight(
        codes=codes.reshape(tiles, k // 32, bits, 16, 4),
        scales=scales.reshape(tiles, groups, 16),
        mins=wide if c["mins"] else None,
        row=rows.astype(np.int32),
        n=n,
        k=k,
        bits=bits,
        group=group,
    )


def quantize(c: Case) -> list[Any]:
    return block_bytes(ops.quantize(vector(c, c["k"]), c["exponent"]))


def gain(k: int) -> Int:
    return painted(k, -(1 << 22), (1 << 23) - 1, 7)


def norm(c: Case) -> list[Any]:
    values = ops.rms_norm(vector(c, c["k"]), gain(c["k"]), -22, EPS, c["fraction_bits"])
    return block_bytes(ops.quantize(*values))


def head_norm(c: Case) -> list[Any]:
    f = c["fraction_bits"]
    out = ops.rescale(*ops.rms_norm(vector(c, c["k"]), gain(c["k"]), -22 + c["louder"], EPS, f), f)
    return [out.values.astype(np.int32), np.int64(out.clipped)]


def rope(c: Case) -> list[Any]:
    half, limit = c["head_dim"] // 2, 1 << 30
    low = painted(256 * half * 2, -limit, limit, 1).reshape(256, half, 2).astype(np.int32)
    high = painted(2 * half * 2, -limit, limit, 2).reshape(2, half, 2).astype(np.int32)
    turn = ops.rotary(low, high, c["position"])
    out = ops.rope(vector(c, c["head_dim"]), *turn)
    return [out.values.astype(np.int32), np.int64(out.clipped)]


def landed(c: Case) -> tuple[NDArray[np.uint8], ops.Keys, ops.Keys]:
    """KV tiles of `keys` positions; keys and values grow and shrink with the position."""
    d, count, f = c["head_dim"], c["keys"], c["fraction_bits"]
    tiles = np.zeros((-(-count // 16), 32 * d + 2 * d + 64), np.uint8)
    views = [TileView(t, d) for t in tiles]
    for at in range(count):
        key = vector(c, d, 11 * at) >> (at % 5)
        value = vector(c, d, 17 * at + 3) >> (at % 3)
        views[at // 16].write(at % 16, ops.quantize(key, -f), ops.quantize(value, -f))
    keys, values = ([v.keys() for v in views], [v.values() for v in views])
    join = [
        ops.Keys(*(np.concatenate(part) for part in zip(*k, strict=True))) for k in (keys, values)
    ]
    return tiles, join[0], join[1]


def attend(c: Case) -> list[Any]:
    """`rows` queries; query i sees all keys but 3 i, one at least."""
    tiles, keys, values = landed(c)
    out: list[Any] = [tiles]
    clipped = 0
    for i in range(c["rows"]):
        seen = max(1, c["keys"] - 3 * i)
        q = vector(c, c["head_dim"], 29 * i + 1)
        visible = [ops.Keys(*(f[:seen] for f in side)) for side in (keys, values)]
        result = ops.attend(q, visible[0], visible[1], c["fraction_bits"])
        out.append(result.values.astype(np.int32))
        clipped += result.clipped
    return [*out, np.int64(clipped)]


def silu_mul(c: Case) -> list[Any]:
    f = c["fraction_bits"]
    gate, up = vector(c, c["k"]), vector(c, c["k"], 5)
    return block_bytes(ops.quantize(ops.silu_mul(gate, up, TABLE, f), -2 * f))


def embed(c: Case) -> list[Any]:
    out = ops.embed(unpack(packed(c)), c["token"], 16)
    return [out.values.astype(np.int32), np.int64(out.clipped)]


def project(c: Case) -> list[Any]:
    """`rows` vectors, a bias and a residual."""
    w, k, n = unpack(packed(c)), c["k"], c["n"]
    bias, clipped, out = painted(n, -(1 << 20), 1 << 20, 6), 0, []
    for i in range(c["rows"]):
        x = ops.quantize(vector({"bits": 24}, k, 31 * i), -16)
        held = painted(n, -(1 << 22), 1 << 22, 37 * i)
        result = ops.project(x, w, 16, bias, held)
        out.append(result.values.astype(np.int32))
        clipped += result.clipped
    return [*out, np.int64(clipped)]


def adapt(c: Case) -> list[Any]:
    """`rows` vectors under one pair of a rank that is padded to blocks."""
    k, n, rank, clipped, out = c["k"], c["n"], c["rank"], 0, []
    sizes = {"bits": 8, "group": 32, "mins": 0}
    a = unpack(packed({**sizes, "n": rank, "k": k}))
    b = unpack(packed({**sizes, "n": n, "k": -(-rank // 32) * 32}))
    for i in range(c["rows"]):
        x = ops.quantize(vector({"bits": 24}, k, 31 * i), -16)
        held = painted(n, -(1 << 22), 1 << 22, 37 * i)
        result = ops.adapt(x, a, b, 16, held)
        out.append(result.values.astype(np.int32))
        clipped += result.clipped
    return [*out, np.int64(clipped)]


def _grid(**axes: Iterable[int]) -> list[dict[str, int]]:
    cases: list[dict[str, int]] = [{}]
    for name, values in axes.items():
        cases = [{**c, name: v} for c in cases for v in values]
    return cases


def _weights(**more: Iterable[int]) -> list[dict[str, int]]:
    shapes = _grid(n=(1, 16, 33), k=(64, 128, 576), bits=(4, 8), group=(32, 64), mins=(0, 1))
    return [{**s, **m} for s in shapes for m in _grid(**more)]


Operation = Callable[[Case], list[Any]]

OPERATIONS: dict[str, tuple[Operation, list[dict[str, int]]]] = {
    "quantize_i32": (quantize, _grid(k=(32, 64, 96, 576, 4128), bits=(3, 15, 31), exponent=(-16,))),
    "quantize_i64": (quantize, _grid(k=(32, 96, 1536), bits=(10, 32, 62), exponent=(-32,))),
    "norm": (norm, _grid(k=(32, 96, 576, 4096), bits=(4, 20, 31), fraction_bits=(8, 16, 24))),
    "head_norm": (head_norm, _grid(k=(32, 64, 128), bits=(6, 20, 31), fraction_bits=(16,), louder=(0, 16))),
    "rope": (rope, _grid(head_dim=(32, 64, 128), bits=(20, 31), position=(0, 77, 300))),
    "attend": (attend, _grid(head_dim=(32, 64, 96, 128, 256), keys=(1, 15, 16, 17, 100, 530), bits=(8, 18, 30),
                             rows=(1, 5, 9), fraction_bits=(16,))),
    "silu_mul": (silu_mul, _grid(k=(32, 96, 1536), bits=(12, 20, 31), fraction_bits=(8, 16, 20, 24))),
    "embed": (embed, _weights(token=(0,))),
    "project": (project, _weights(rows=(1, 3, 17))),
    "adapt": (adapt, _grid(n=(16, 40), k=(64, 576), rank=(16, 32, 48), rows=(1, 17))),
}  # fmt: skip


def digest(outputs: list[Any]) -> str:
    """SHA-256 of the outputs' little-endian bytes, one after the other."""
    sha = hashlib.sha256()
    for array in outputs:
        data = np.ascontiguousarray(array)
        sha.update(data.astype(data.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def document(name: str) -> dict[str, Any]:
    """The vectors of one operation, from the definition."""
    operation, cases = OPERATIONS[name]
    return {"operation": name, "cases": [{**c, "sha256": digest(operation(c))} for c in cases]}


def text(name: str) -> str:
    parts = document(name)
    rows = ",\n".join("  " + json.dumps(c) for c in parts["cases"])
    return f'{{"operation": "{name}", "cases": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for operation_name in OPERATIONS:
        (FOLDER / f"{operation_name}.json").write_text(text(operation_name))
