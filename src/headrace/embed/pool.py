"""The KV pool: blocks of keys and values and the state of sequences, in one buffer of the caller's."""

from __future__ import annotations

import threading
from functools import partial
from typing import Self

from headrace.embed import memory
from headrace.embed.errors import (
    PoolFullError,
    PoolHasSequencesError,
    PoolSequencesError,
    ReleasedError,
)
from headrace.embed.memory import Buffer, SequenceMemory, whole
from headrace.embed.model import Model
from headrace.engine.batch import copy_page
from headrace.engine.pages import PagePool, PagesExhaustedError

MAX_SEQUENCES = 1 << 16


def kv_block_size(model: Model) -> int:
    """Bytes of one block: 64 positions of every layer and kv head."""
    return model.program.shape.page_bytes


def kv_pool_overhead(model: Model, max_sequences: int) -> int:
    """Bytes that a pool needs beside its blocks: the state of so many sequences and prefixes."""
    count = whole("max_sequences", max_sequences, 1, MAX_SEQUENCES)
    return count * memory.sequence_bytes(model.hidden_size, model.context)


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
        self._max_sequences = max_sequences
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    @property
    def num_blocks(self) -> int:
        return len(self.cache)

    @property
    def blocks_used(self) -> int:
        """Blocks that hold something; one that many sequences share counts once."""
        return self.pages.num_used

    @property
    def num_sequences(self) -> int:
        """Sequences and prefixes that live in it."""
        return self._max_sequences - len(self._states)

    def lend(self, kind: str) -> SequenceMemory:
        """The memory of a new sequence or prefix. Raises PoolSequencesError, ReleasedError."""
        with self.lock:
            if not self._open:
                raise ReleasedError("the KV pool was destroyed")
            if not self._states:
                raise PoolSequencesError(
                    f"the KV pool was made for {self._max_sequences} sequences and prefixes"
                )
            self.model.hold(kind)
            return self._states.pop()

    def take_back(self, kind: str, state: SequenceMemory) -> None:
        with self.lock:
            self._states.append(state)
            self.model.drop(kind)

    def take(self, count: int) -> list[int]:
        """Raises PoolFullError, taking nothing."""
        try:
            return self.pages.take(count)
        except PagesExhaustedError as error:
            raise PoolFullError(error.message) from None

    def destroy(self) -> None:
        """Give the buffer back. Raises PoolHasSequencesError."""
        with self.lock:
            if not self._open:
                return
            if self.num_sequences:
                raise PoolHasSequencesError(f"the KV pool has {self.num_sequences} live sequences")
            self._open = False
            del self.cache, self.pages
            self._states = []
        self.model.drop("pools")
