"""Whether an adapter's pairs fit a program: what every backend asks before it takes them."""

from __future__ import annotations

from headrace.arith.numbers import BLOCK, TILE
from headrace.errors import InputError
from headrace.kernels import program as p

MAX_RANK = 1024  # padded to blocks
_BLOCK_ROWS = 96  # of one adapter that are taken together


def adapts(program: p.Program) -> dict[tuple[int, str], int]:
    """The index of every Adapt of a program, by layer and name."""
    return {(op.layer, op.name): i for i, op in enumerate(program.ops) if isinstance(op, p.Adapt)}


def checked_pairs(program: p.Program, pairs: p.Pairs) -> dict[int, tuple[p.LowRank, ...]]:
    """Pairs by the index of their Adapt. Raises InputError for one that the program has no place for."""
    places = adapts(program)
    out = {}
    for (layer, name), each in pairs.items():
        if (layer, name) not in places:
            raise InputError(f"layer {layer} has no {name!r} that an adapter could change")
        index = places[layer, name]
        project = program.ops[index - 1]
        assert isinstance(project, p.Project), "an Adapt follows a Project"
        at = 0
        for pair in sorted(each, key=lambda pair: pair.offset):
            _check(f"layer {layer}, {name}", pair, project.weight, at)
            at = pair.offset + pair.b.n
        out[index] = each
    return out


def workspace_bytes(pairs: p.Pairs, capacity: int, threads: int) -> int:
    """What a native runner of that many rows takes beside an adapter's weights (src/native/adapt.cpp)."""
    width = max((sum(pair.a.n for pair in each) for each in pairs.values()), default=0)
    rank = max((pair.a.n for each in pairs.values() for pair in each), default=0)
    vector = rank + 3 * 2 * (rank // BLOCK) + 4
    return 4 * capacity * (width + 2) + 160 * capacity + threads * (_BLOCK_ROWS * vector + 640)


def _check(place: str, pair: p.LowRank, base: p.PackedWeight, at: int) -> None:
    a, b = pair.a, pair.b
    if a.k != base.k or not at <= pair.offset <= base.n - b.n:
        raise InputError(
            f"{place}: a pair of [{a.n}, {a.k}] and [{b.n}, {b.k}] at row {pair.offset} does not fit a weight of"
            f" [{base.n}, {base.k}]"
        )
    if a.n != b.k or a.n % BLOCK or a.n > MAX_RANK or pair.offset % TILE:
        raise InputError(f"{place}: a rank of {a.n} and {b.k} at row {pair.offset}")
    for weight in (a, b):
        if weight.bits != 8 or weight.mins is not None or weight.group != BLOCK:
            raise InputError(f"{place}: an adapter's weights have 8 bits in groups of {BLOCK}")
