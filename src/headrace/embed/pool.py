"""The KV pool: blocks of keys and values and the state of sequences, in one buffer of the caller's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headrace.embed import memory
from headrace.embed.errors import (
    EmbedError,
    LifecycleRefused,
    PoolFullError,
    PoolHasSequencesError,
    PoolSequencesError,
    ReleasedError,
)
from headrace.embed.memory import Buffer, SequenceMemory, typed, whole
from headrace.embed.model import Model
from headrace.engine.batch import copy_page
from headrace.engine.pages import PagePool, PagesExhaustedError

MAX_SEQUENCES = 1 << 16


def kv_block_size(model: Model) -> int:
    """Bytes of one block: 64 positions of every layer and kv head."""
    return typed(model, Model, "the model").program.shape.page_bytes


def kv_pool_overhead(model: Model, max_sequences: int) -> int:
    """Bytes that a pool needs beside its blocks: the state of so many sequences and prefixes."""
    typed(model, Model, "the model")
    count = whole("max_sequences", max_sequences, 1, MAX_SEQUENCES)
    return count * memory.sequence_bytes(model.hidden_size, model.context)


class Line(Protocol):
    """What lives in a pool."""

    @property
    def page_table(self) -> NDArray[np.int32]:
        """The blocks that it holds."""

    def sweep(self) -> None:
        """Give back what a release that was interrupted left."""


class KVPool:
    """Blocks that sequences and prefixes share. Its buffer is the caller's and must stay until `destroy`.

    Safe to use from several threads: who owns what changes under `lock`.
    """

    def __init__(
        self, model: Model, buffer: Buffer, *, num_blocks: int, max_sequences: int
    ) -> None:
        """buffer: of num_blocks * kv_block_size + kv_pool_overhead bytes at least; its content does not matter.

        Raises InvalidArgumentError, MisalignedBufferError, BufferTooSmallError, ReleasedError.
        """
        block, overhead = kv_block_size(model), kv_pool_overhead(model, max_sequences)
        size = whole("num_blocks", num_blocks, 1) * block
        raw = memory.memory_of(buffer, "a KV pool", size + overhead)
        model.hold("pools")
        self.model = model
        self.cache = raw[:size].reshape(num_blocks, block)
        self.lock = threading.RLock()
        self.pages = PagePool(num_blocks, partial(copy_page, self.cache))
        rows = raw[size:].reshape(max_sequences, -1)
        self._states: list[SequenceMemory] = [
            memory.sequence_memory(row, model.hidden_size, model.context) for row in rows
        ]
        self._lines: dict[int, Line] = {}  # by the number of their state
        self._torn = False  # a change of who holds which blocks has begun and not ended
        self._open = True

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with suppress(LifecycleRefused) if kind is not None else nullcontext():
            self.destroy()

    def check_open(self) -> None:
        if not self._open:
            raise ReleasedError("the KV pool was destroyed")

    @property
    def num_blocks(self) -> int:
        """Raises ReleasedError, as do the others."""
        self.check_open()
        return len(self.cache)

    @property
    def blocks_used(self) -> int:
        """Blocks that hold something; one that many sequences share counts once."""
        with self.changing() as pages:
            return pages.num_used

    @property
    def num_sequences(self) -> int:
        """Sequences and prefixes that live in it."""
        self.check_open()
        return len(self._lines)

    def lend(self, kind: str, line: Line) -> tuple[int, SequenceMemory]:
        """The memory of a new sequence or prefix, and its number. Raises PoolSequencesError, ReleasedError."""
        with self.lock:
            self.check_open()
            self._sweep()
            states = range(len(self._states))
            number = next((n for n in states if n not in self._lines), None)
            if number is None:
                raise PoolSequencesError(
                    f"the KV pool was made for {len(states)} sequences and prefixes"
                )
            self.model.hold(kind)
            self._lines[number] = line
            return number, self._states[number]

    def take_back(self, kind: str, number: int, line: Line) -> None:
        with self.changing() as pages:
            if self._lines.get(number) is line:
                del self._lines[number]
                pages.give(line.page_table.tolist())
                self.model.drop(kind)

    def _sweep(self) -> None:
        for line in list(self._lines.values()):
            line.sweep()

    @contextmanager
    def changing(self) -> Iterator[PagePool]:
        """Who holds which blocks changes inside: a line's table first says so, or no longer, and the books last.

        A change that an interrupt cut off is made good by the next one: from the tables, which are right at any moment.
        Not to be nested.
        """
        with self.lock:
            self.check_open()
            if self._torn:
                self.pages.recount(line.page_table.tolist() for line in self._lines.values())
            self._torn = True
            try:
                yield self.pages
            except PagesExhaustedError as error:  # nothing was taken
                self._torn = False
                raise PoolFullError(error.message) from None
            except EmbedError:
                self._torn = False
                raise
            self._torn = False

    def destroy(self) -> None:
        """Give the buffer back. Raises PoolHasSequencesError."""
        with self.lock:
            if not self._open:
                return
            self._sweep()
            if self._lines:
                raise PoolHasSequencesError(f"the KV pool has {len(self._lines)} live sequences")
            self._open = False
            del self.cache, self.pages
            self._states = []
        self.model.drop("pools")
