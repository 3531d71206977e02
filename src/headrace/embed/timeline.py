"""What a sequence and a prefix have in common: tokens, the blocks that hold them, and how far the last one has come.

A token is `pending` from the moment it is chosen until its last layer; `depth` layers of it are done. After the last
layer of any token the timeline is `ready`: X of that position is there, and the next token follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.arith import ops
from headrace.embed.adapter import Adapter
from headrace.embed.errors import (
    BusyError,
    ContextExceededError,
    HiddenUnavailableError,
    InvalidArgumentError,
    MidTokenError,
    PoolFullError,
    ReleasedError,
    SchemaBindError,
)
from headrace.embed.pool import KVPool
from headrace.embed.schema import Schema, SchemaWalk
from headrace.engine.adapters import History
from headrace.engine.pages import PAGE_TOKENS, pages_for
from headrace.kernels.program import SITES, Norm

WALKED = 1  # of a token: the schema's walk went over it
ANSWER = 2  # it was generated: chosen, or content of a schema


@dataclass(frozen=True)
class Hidden:
    """The hidden state behind the final norm (R4): values i64[hidden], each times 2^exponent."""

    values: NDArray[np.int64]
    exponent: int


@dataclass(frozen=True)
class SequenceStats:
    """Counts of a sequence since it was made or reset.

    tokens: that were read. decode_step_ceiling, layers_run: layers that the last decode step could run, and did;
    total_layers: of all decode steps. forced_token_count: tokens that a schema forced on it. kv_blocks: that it holds,
    shared ones too. schema_accepting: whether a schema is bound and what was generated satisfies it. saturations:
    clipped values by site. adapter: identity of the bound one.
    """

    tokens: int
    decode_step_ceiling: int
    layers_run: int
    total_layers: int
    forced_token_count: int
    kv_blocks: int
    schema_accepting: bool
    saturations: Mapping[str, int]
    adapter: str | None


class Timeline:
    """State in the pool's memory. One call at a time; `release` may come from any thread."""

    kind: ClassVar[str]

    def __init__(self, pool: KVPool) -> None:
        self.memory = pool.lend(self.kind)
        self.pool = pool
        self.model = pool.model
        self.adapter: Adapter | None = None
        self.schema: Schema | None = None
        self._busy = self._released = False
        self.num_pages = self.length = 0
        self.clear()

    # ---- one call at a time -----------------------------------------------------------------------

    def claim(self) -> None:
        """Begin a call. Raises ReleasedError, BusyError."""
        with self.pool.lock:
            if self._released:
                raise ReleasedError(f"the {self.kind[:-1]} was released")
            if self._busy:
                raise BusyError("another call uses this sequence")
            self._busy = True

    def unclaim(self) -> bool:
        """End a call; whether the sequence still lives."""
        with self.pool.lock:
            self._busy = False
            if self._released:
                self._free()
            return not self._released

    @contextmanager
    def claimed(self) -> Iterator[None]:
        self.claim()
        try:
            yield
        finally:
            self.unclaim()

    def check_open(self) -> None:
        """Whether it may be changed; raises a LifecycleRefused."""

    @property
    def live(self) -> bool:
        return not self._released

    def release(self) -> None:
        """Give blocks and state back, at the end of the call that runs, if one does. A second time does nothing."""
        with self.pool.lock:
            if self._released:
                return
            self._released = True
            if not self._busy:
                self._free()

    def _free(self) -> None:
        self.schema = None
        self.clear()
        if self.adapter is not None:
            self.adapter.unbind()
            self.adapter = None
        self.pool.take_back(self.kind, self.memory)
        del self.memory  # the buffer may go once the pool is destroyed

    def clear(self) -> None:
        """Back to empty; schema and adapter stay."""
        self.give_pages(0)
        self.length = self.depth = self.answered = 0
        self.pending = self.ready = self.has_hidden = False
        self.fresh = True  # a schema may still be bound
        self.forced_tokens = self.total_layers = self.layers_run = self.ceiling = 0
        self.history = History().then(0, self._salt)
        self.walk = None if self.schema is None else SchemaWalk(self.schema)
        self.memory.clips[:] = 0

    # ---- blocks -----------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Positions that are left, the pending token's taken off."""
        return self.model.context - self.length - self.pending

    @property
    def page_table(self) -> NDArray[np.int32]:
        return self.memory.pages[: self.num_pages]

    @property
    def held(self) -> int:
        """Positions of which keys and values are there, of a token in mid-way some layers'."""
        return self.length + (self.depth > 0)

    def reserve(self, count: int) -> None:
        """Blocks for `count` more positions that nobody else reads. Raises PoolFullError, ContextExceededError."""
        end = self.length + count
        if end > self.model.context:
            raise ContextExceededError(f"position {end} of a context of {self.model.context}")
        with self.pool.lock:
            pages, table = self.pool.pages, self.memory.pages
            last = self.length // PAGE_TOKENS
            shared = last < self.num_pages and pages.owners(int(table[last])) > 1
            missing = max(0, pages_for(end) - self.num_pages)
            taken = self.pool.take(missing + shared)
            if shared:
                own, source = taken.pop(), int(table[last])
                pages.copy(source, own)
                table[last] = own
                pages.give([source])
            table[self.num_pages : self.num_pages + missing] = taken
            self.num_pages += missing

    def give_pages(self, keep: int) -> None:
        """Give back all blocks but the first `keep`."""
        with self.pool.lock:
            if keep < self.num_pages:
                self.pool.pages.give(self.memory.pages[keep : self.num_pages].tolist())
                self.num_pages = keep

    def trim(self) -> None:
        """Give back blocks that hold nothing."""
        self.give_pages(pages_for(self.held))

    def replace_pages(self, count: int) -> None:
        """Blocks for other content: `count` of the timeline's own. Raises PoolFullError, changing nothing."""
        with self.pool.lock:
            pages, held = self.pool.pages, self.page_table.tolist()
            if count > pages.num_free + sum(pages.owners(page) == 1 for page in held):
                raise PoolFullError(f"{count} KV blocks are needed, {pages.num_free} are free")
            self.give_pages(0)
            self.memory.pages[:count] = self.pool.take(count)
            self.num_pages = count

    # ---- tokens -----------------------------------------------------------------------------------

    def read(self, tokens: list[int], marks: int, residual: NDArray[np.int32]) -> None:
        """All layers of the next tokens are done; residual: X of the last."""
        end = self.length + len(tokens)
        self.memory.tokens[self.length : end] = tokens
        self.memory.marks[self.length : end] = marks
        if marks & ANSWER:
            self.memory.answer[self.answered : self.answered + len(tokens)] = tokens
            self.answered += len(tokens)
        self.memory.residual[:] = residual
        self.length, self.depth = end, 0
        self.pending, self.ready = False, True

    def settle(self, residual: NDArray[np.int32]) -> None:
        """All layers of the pending token are done; residual: X of it."""
        self.memory.residual[:] = residual
        self.length += 1
        self.depth, self.pending, self.ready = 0, False, True

    def share(self, other: Timeline) -> None:
        """Become, from empty, what `other` is; its blocks are then both's."""
        ours, theirs, end = self.memory, other.memory, other.length
        with self.pool.lock:
            self.give_pages(0)
            self.pool.pages.share(other.page_table.tolist())
            ours.pages[: other.num_pages] = other.page_table
            self.num_pages = other.num_pages
        ours.tokens[:end], ours.marks[:end] = theirs.tokens[:end], theirs.marks[:end]
        ours.answer[: other.answered] = other.answer
        ours.residual[:], ours.hidden[:], ours.clips[:] = (
            theirs.residual,
            theirs.hidden,
            theirs.clips,
        )
        self.length, self.answered, self.ready = end, other.answered, other.ready
        self.has_hidden = other.has_hidden
        self.forced_tokens = other.forced_tokens
        self.history = other.history
        if other.walk is not None:
            self.schema, self.walk = other.schema, other.walk.fork()

    def choose(self, token: int) -> None:
        """A token was chosen; it is to be read next."""
        self.feed(token, ANSWER | (WALKED if self.walk is not None else 0))
        self.memory.answer[self.answered] = token
        self.answered += 1

    def feed(self, token: int, marks: int = 0) -> None:
        """A token is to be read next."""
        self.memory.tokens[self.length] = token
        self.memory.marks[self.length] = marks
        self.pending, self.ready, self.depth = True, False, 0

    def advanced(self, depth: int, residual: NDArray[np.int32]) -> None:
        """The pending token is done up to layer `depth`; residual: its X there."""
        self.layers_run += depth - self.depth
        self.total_layers += depth - self.depth
        self.memory.residual[:] = residual
        self.depth = depth
        if depth == self.model.num_layers:
            self.settle(residual)

    def count(self, clips: NDArray[np.int64]) -> None:
        """Values were clipped, i64[sites]."""
        np.add(self.memory.clips, clips, out=self.memory.clips)

    @property
    def answer(self) -> NDArray[np.int32]:
        """The generated tokens, i32[any]."""
        return self.memory.answer[: self.answered]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that were read, and the pending one. Raises ReleasedError."""
        if self._released:
            raise ReleasedError(f"the {self.kind[:-1]} was released")
        return tuple(self.memory.tokens[: self.length + self.pending].tolist())

    # ---- schema and adapter -----------------------------------------------------------------------

    def bind_schema(self, schema: Schema | None) -> None:
        if schema is not None and schema.grammar.vocabulary is not self.model.tokenizer:
            raise InvalidArgumentError("the schema was compiled by another model")
        with self.claimed():
            self.check_open()
            if not self.fresh:
                raise SchemaBindError("a schema is bound to a new or reset sequence only")
            self.schema = schema
            self.walk = None if schema is None else SchemaWalk(schema)

    def bind_adapter(self, adapter: Adapter | None) -> None:
        if adapter is not None and adapter.model is not self.model:
            raise InvalidArgumentError("the adapter was mapped on another model")
        with self.claimed():
            self.check_open()
            if self.depth:
                raise MidTokenError("an adapter is changed between tokens only")
            if adapter is self.adapter:
                return
            if adapter is not None:
                adapter.bind()
            if self.adapter is not None:
                self.adapter.unbind()
            self.adapter = adapter
            self.history = self.history.then(self.length, self._salt)

    @property
    def _salt(self) -> bytes:
        """What identifies the adapter; empty for none."""
        return b"" if self.adapter is None else bytes.fromhex(self.adapter.identity)

    @property
    def adapter_history(self) -> tuple[tuple[int, str], ...]:
        """The position from which on each adapter was used, by identity; "" where none was."""
        return tuple((at, salt.hex()) for at, salt in self.history.spans)

    # ---- what can be asked ------------------------------------------------------------------------

    def stats(self) -> SequenceStats:
        """Raises ReleasedError, BusyError."""
        with self.claimed():
            return SequenceStats(
                tokens=self.length,
                decode_step_ceiling=self.ceiling,
                layers_run=self.layers_run,
                total_layers=self.total_layers,
                forced_token_count=self.forced_tokens,
                kv_blocks=self.num_pages,
                schema_accepting=self.walk is not None and self.walk.accepting,
                saturations=dict(zip(SITES, self.memory.clips.tolist(), strict=True)),
                adapter=None if self.adapter is None else self.adapter.identity,
            )

    def read_prefill_final_hidden(self) -> Hidden:
        """The hidden state of the last position of the last prefill that ended well. Raises HiddenUnavailableError."""
        with self.claimed():
            if not self.has_hidden:
                raise HiddenUnavailableError("no prefill has left a hidden state")
            program = self.model.program
            norm = program.ops[program.marks[-1] + 1]
            assert isinstance(norm, Norm)
            gain, f = norm.gain, program.shape.fraction_bits
            wide = gain.values.astype(np.int64)
            row = self.memory.hidden.astype(np.int64)
            return Hidden(*ops.rms_norm(row, wide, gain.exponent, gain.eps, f))
