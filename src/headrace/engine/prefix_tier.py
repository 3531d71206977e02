"""Between the KV cache's pages and the disk tier: pages are read into a sequence, and written from one.

A failure of the disk costs reuse and is told in a warning; it never fails a generation, and what is not verified is
not used.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.engine import blob
from headrace.engine.pages import PAGE_TOKENS, PagesExhaustedError, pages_for
from headrace.engine.prefix_disk import Binding, DiskOptions, Found, PrefixDisk
from headrace.engine.prefix_segment import DamagedSegmentError, InaccessibleSegmentError, Segment
from headrace.engine.sequence import Sequence, Work
from headrace.errors import HeadraceError
from headrace.kernels.layout import page_positions
from headrace.kernels.program import ModelShape

Reserve = Callable[[Tokens[Work]], None]


def open_disk(options: DiskOptions) -> PrefixDisk | None:
    """The disk tier, or None with a warning where the directory cannot be used; what was removed is named."""
    try:
        disk = PrefixDisk(options)
    except (HeadraceError, OSError) as error:
        _warn(error)
        return None
    for removed in disk.removed:
        _warn(f"removed {removed}")
    return disk


class DiskTier:
    """The disk of an engine; cache u8[pages, page_bytes]."""

    def __init__(self, disk: PrefixDisk, cache: NDArray[np.uint8], shape: ModelShape) -> None:
        self._disk = disk
        self._cache = cache
        self._positions = page_positions(shape).astype(np.int64)

    def close(self) -> None:
        self._disk.close()

    def extend(
        self, sequence: Sequence, tokens: Tokens[int], binding: blob.Binding, reserve: Reserve
    ) -> int:
        """Append to a sequence, which holds a prefix of `tokens`, as many more of them as the disk holds; how many."""
        begin = len(sequence)
        found = self._disk.find(_bound(binding), tokens)
        if found.length <= begin:
            return 0
        try:
            reserve([Work(sequence, tokens[begin : found.length])])
        except PagesExhaustedError:
            return 0  # there will be none to read them anew either
        end = self._load(found, begin, sequence.page_table())
        sequence.commit(tokens[begin:end])
        sequence.trim()
        if end > begin:
            self._disk.used(found)
        return end - begin

    def store(
        self, sequence: Sequence, prompt_tokens: int, binding: blob.Binding, head: int = 0
    ) -> None:
        """Write what the disk does not hold of a sequence. head: see `Engine.keep`."""
        table = sequence.page_table()

        def page(index: int, end: int) -> NDArray[np.uint8]:
            held: NDArray[np.uint8] = self._cache[table[index]].copy()
            held[self._positions + index * PAGE_TOKENS >= end] = 0
            return held

        try:
            self._disk.store(_bound(binding), sequence.tokens, prompt_tokens, page, head)
        except (HeadraceError, OSError) as error:
            _warn(error)

    def _load(self, found: Found, begin: int, table: NDArray[np.int32]) -> int:
        """Read pages, the one of position `begin` first; up to which position they are read."""
        end = begin
        for index in range(begin // PAGE_TOKENS, pages_for(found.length)):
            try:
                self._cache[table[index]] = found.page(index)
            except (DamagedSegmentError, InaccessibleSegmentError) as error:
                _warn(error)
                self._drop(found.holder(index), error)
                break
            end = min((index + 1) * PAGE_TOKENS, found.length)
        return end

    def _drop(self, segment: Segment, error: Exception) -> None:
        if isinstance(error, DamagedSegmentError):
            try:
                self._disk.drop(segment)
            except OSError as refused:
                _warn(refused)


def _bound(binding: blob.Binding) -> Binding:
    identity, salt, *shape = binding.fields()
    packed = struct.pack("<I32s32s4I", ARITHMETIC_VERSION, identity, salt, *shape)
    return Binding(identity, hashlib.sha256(packed).digest(), binding.shape.page_bytes)


def _warn(error: Exception | str) -> None:
    warnings.warn(f"the prefix cache on disk: {error}", RuntimeWarning, stacklevel=2)
