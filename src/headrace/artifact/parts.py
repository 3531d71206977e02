"""Weights of a source as rows that can be read in slices: the streaming side of conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import BLOCK
from headrace.artifact.packing import AffineRows, quantize_rows, regroup, widen

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How affine rows are written down: bits of a code, explicit minimums, elements of a group."""

    bits: int
    mins: bool
    group: int

    @property
    def format(self) -> str:
        return f"q{self.bits}{'m' if self.mins else ''}"


@dataclass(frozen=True, eq=False)
class Part:
    """Rows [n, k] of one source tensor; `read(rows)` gives the affine rows of those indices.

    columns: how wide the source is, k without padding.
    """

    name: str
    n: int
    k: int
    columns: int
    layout: Layout
    read: Callable[[Index], AffineRows]


def float_part(
    name: str, n: int, k: int, bits: int, group: int, read: Callable[[Index], NDArray[np.float64]]
) -> Part:
    """A part that is quantised on the way; columns are padded with zeros to whole blocks of 32.

    Groups of 64 need whole groups: other widths take groups of 32.
    """
    width = -(-k // BLOCK) * BLOCK
    group = group if width % group == 0 else BLOCK

    def rows(index: Index) -> AffineRows:
        values = np.pad(read(index), ((0, 0), (0, width - k)))
        return quantize_rows(values, bits, group)

    return Part(name, n, width, k, Layout(bits, bits == 4, group), rows)


def permuted(part: Part, order: Index) -> Part:
    """The same part with row i taken from row order[i] of the source."""
    return replace(part, n=len(order), read=lambda index: part.read(order[index]))


def padded(part: Part, n: int) -> Part:
    """The same part with zero rows behind it, up to n."""
    if n == part.n:
        return part

    def rows(index: Index) -> AffineRows:
        real = part.read(np.minimum(index, part.n - 1))
        beyond = index >= part.n
        codes, scales = real.codes.copy(), real.scales.copy()
        mins = None if real.mins is None else real.mins.copy()
        codes[beyond], scales[beyond] = real.centre, 0.0
        if mins is not None:
            mins[beyond] = 0.0
        return AffineRows(scales, codes, mins, real.bits, real.group)

    return replace(part, n=n, read=rows)


def band(part: Part, begin: int, end: int) -> Part:
    """Rows [begin, end) of a part."""
    return replace(part, n=end - begin, read=lambda index: part.read(index + begin))


def columns(part: Part, begin: int, end: int) -> Part:
    """Columns [begin, end) of a part, multiples of 32; where they cut a group, in groups of 32."""
    if begin % part.layout.group or end % part.layout.group:
        part = in_layout(part, replace(part.layout, group=BLOCK))
    group = part.layout.group

    def rows(index: Index) -> AffineRows:
        whole, inside = part.read(index), slice(begin // group, end // group)
        mins = None if whole.mins is None else whole.mins[:, inside]
        codes = whole.codes[:, begin:end]
        return AffineRows(whole.scales[:, inside], codes, mins, whole.bits, group)

    return replace(part, k=end - begin, columns=end - begin, read=rows)


def widest(layouts: Iterable[Layout]) -> Layout:
    """The layout that holds the values of all of these exactly."""
    every = list(layouts)
    return Layout(
        max(w.bits for w in every), any(w.mins for w in every), min(w.group for w in every)
    )


def in_layout(part: Part, layout: Layout) -> Part:
    """The same values in a wider layout."""
    if part.layout == layout:
        return part

    def rows(index: Index) -> AffineRows:
        return widen(regroup(part.read(index), layout.group), layout.bits, layout.mins)

    return replace(part, layout=layout, read=rows)


def joined(name: str, parts: list[Part]) -> Part:
    """Parts on top of each other, all written in the widest of their layouts."""
    layout = widest(p.layout for p in parts)
    parts = [in_layout(p, layout) for p in parts]
    starts = np.cumsum([0, *(p.n for p in parts)])

    def rows(index: Index) -> AffineRows:
        pieces = []
        for part, begin, end in zip(parts, starts[:-1], starts[1:], strict=True):
            inside = index[(index >= begin) & (index < end)] - begin
            if len(inside):
                pieces.append(part.read(inside))
        return _stack(pieces)

    return Part(name, int(starts[-1]), parts[0].k, parts[0].columns, layout, rows)


def _stack(pieces: list[AffineRows]) -> AffineRows:
    """Rows in rising order of index, so pieces follow each other."""
    first = pieces[0]
    mins = None
    if first.mins is not None:
        mins = np.concatenate([p.mins for p in pieces if p.mins is not None])
    scales, codes = (np.concatenate([getattr(p, f) for p in pieces]) for f in ("scales", "codes"))
    return AffineRows(scales, codes, mins, first.bits, first.group)
