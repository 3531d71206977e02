"""What a sequence and a prefix have in common: tokens, the blocks that hold them, and how far the last one has come.

A token is `pending` from the moment it is chosen until its last layer; `depth` layers of it are done. After the last
layer of any token the timeline is `ready`: X of that position is there, and the next token follows from it.

All that a timeline is, is one frozen `State`, replaced by one assignment: an interrupt at any moment leaves what was or
what is to be. Memory that the new state speaks of is written before, where it does not count yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace.arith import ops
from headrace.embed.adapter import Adapter
from headrace.embed.calls import Call, User
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
from headrace.embed.memory import typed
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


@dataclass(frozen=True)
class State:
    """What a timeline is at a moment.

    length: tokens that were read. answered: of its generated tokens. walked: tokens that the schema's walk went over.
    row: of the residual and the clips in its memory. fresh: a schema may still be bound. The others: see the module and
    `SequenceStats`.
    """

    length: int = 0
    depth: int = 0
    pending: bool = False
    ready: bool = False
    answered: int = 0
    walked: int = 0
    has_hidden: bool = False
    fresh: bool = True
    forced_tokens: int = 0
    total_layers: int = 0
    layers_run: int = 0
    ceiling: int = 0
    row: int = 0
    history: History = History()
    schema: Schema | None = None
    adapter: Adapter | None = None


class Timeline:
    """State in the pool's memory. One call at a time; `release` may come from any thread."""

    kind: ClassVar[str]
    name: ClassVar[str]

    def __init__(self, pool: KVPool) -> None:
        self.pool = typed(pool, KVPool, "the pool")
        self.model = pool.model
        self.now = State()
        self.num_pages = 0
        self._walk: SchemaWalk | None = None
        self._user = User()
        self._released = self._freed = False
        self._number, self.memory = pool.lend(self.kind, self)
        self.memory.clips[:] = 0

    # ---- what it is -------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return self.now.length

    @property
    def depth(self) -> int:
        return self.now.depth

    @property
    def pending(self) -> bool:
        return self.now.pending

    @property
    def ready(self) -> bool:
        return self.now.ready

    @property
    def has_hidden(self) -> bool:
        return self.now.has_hidden

    @property
    def schema(self) -> Schema | None:
        return self.now.schema

    @property
    def adapter(self) -> Adapter | None:
        return self.now.adapter

    @property
    def residual(self) -> NDArray[np.int32]:
        """X of the last position, or of the pending one in mid-token, i32[hidden]."""
        row: NDArray[np.int32] = self.memory.residual[self.now.row]
        return row

    @property
    def clips(self) -> NDArray[np.int64]:
        """Counts of clipped values, i64[sites]."""
        row: NDArray[np.int64] = self.memory.clips[self.now.row]
        return row

    @property
    def walk(self) -> SchemaWalk | None:
        """The way through the schema; where it is not at the last token, an interrupt was, and it is gone again."""
        now, walk = self.now, self._walk
        if now.schema is None:
            return None
        if walk is None or walk.schema is not now.schema or walk.taken != now.walked:
            count = now.length + now.pending
            tokens = self.memory.tokens[:count][self.memory.marks[:count] & WALKED != 0]
            walk = self._walk = SchemaWalk.along(now.schema, tokens.tolist())
        return walk

    def take_walk(self, walk: SchemaWalk | None) -> None:
        """Where the schema's walk is, of the state that is about to be."""
        self._walk = walk

    def commit(
        self,
        *,
        residual: NDArray[np.int32] | None = None,
        clips: NDArray[np.int64] | None = None,
        **changes: Any,
    ) -> None:
        """Become another state, all at once. residual: its X. clips i64[sites]: that were clipped since the last."""
        now, memory = self.now, self.memory
        if residual is not None or clips is not None:
            row = changes["row"] = 1 - now.row
            memory.residual[row] = memory.residual[now.row] if residual is None else residual
            memory.clips[row] = memory.clips[now.row]
            if clips is not None:
                memory.clips[row] += clips
        self.now = replace(now, **changes)

    # ---- one call at a time -----------------------------------------------------------------------

    def claim(self, call: Call) -> None:
        """A call begins to use it. Raises ReleasedError, BusyError."""
        with self.pool.lock:
            self.check_live()
            if self._user.call is not None:
                raise BusyError(f"another call uses this {self.name}")
            self._user.become(call)

    def unclaim(self, call: Call) -> bool:
        """The call, if it did, uses it no longer; whether it still lives."""
        with self.pool.lock:
            self._user.leave(call)
            self.sweep()
            return not self._released

    @contextmanager
    def claimed(self) -> Iterator[None]:
        call = Call()
        try:
            self.claim(call)
            yield
        finally:
            self.unclaim(call)

    def check_live(self) -> None:
        if self._released:
            raise ReleasedError(f"the {self.name} was released")

    def check_open(self) -> None:
        """Whether it may be changed; raises a LifecycleRefused."""

    @property
    def live(self) -> bool:
        return not self._released

    def release(self) -> None:
        """Give blocks and state back, at the end of the call that runs, if one does. A second time does nothing."""
        with self.pool.lock:
            self._released = True
            self.sweep()

    def sweep(self) -> None:
        """What was released is given back, once no call uses it."""
        if not self._released or self._freed or self._user.call is not None:
            return
        if (adapter := self.now.adapter) is not None:
            self.now = replace(self.now, adapter=None)
            adapter.unbind()
        self._walk = None
        self.pool.take_back(self.kind, self._number, self)
        self._freed = True
        del self.memory  # the buffer may go once the pool is destroyed

    def clear(self) -> None:
        """Back to empty; schema and adapter stay."""
        now, row = self.now, 1 - self.now.row
        self.memory.clips[row] = 0
        self.now = State(
            row=row, history=History().then(0, self._salt), schema=now.schema, adapter=now.adapter
        )
        self.give_pages(0)

    # ---- blocks -----------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Positions that are left, the pending token's taken off. Raises ReleasedError."""
        self.check_live()
        return self.model.context - self.length - self.pending

    @property
    def page_table(self) -> NDArray[np.int32]:
        if not self.num_pages:
            return np.empty(0, np.int32)
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
        self.trim()  # blocks behind what it holds, which an interrupt left, may be others' as well
        with self.pool.changing() as pages:
            table = self.memory.pages
            last = self.length // PAGE_TOKENS
            shared = last < self.num_pages and pages.owners(int(table[last])) > 1
            missing = max(0, pages_for(end) - self.num_pages)
            taken = pages.take(missing + shared)
            if shared:
                own, source = taken.pop(), int(table[last])
                pages.copy(source, own)
                table[last] = own
                pages.give([source])
            table[self.num_pages : self.num_pages + missing] = taken
            self.num_pages += missing

    def give_pages(self, keep: int) -> None:
        """Give back all blocks but the first `keep`."""
        if keep < self.num_pages:
            with self.pool.changing() as pages:
                gone = self.memory.pages[keep : self.num_pages].tolist()
                self.num_pages = keep
                pages.give(gone)

    def trim(self) -> None:
        """Give back blocks that hold nothing."""
        self.give_pages(pages_for(self.held))

    def check_pages(self, count: int) -> None:
        """Whether `replace_pages` can. Raises PoolFullError."""
        with self.pool.changing() as pages:
            free = pages.num_free + sum(pages.owners(page) == 1 for page in self.page_table)
            if count > free:
                raise PoolFullError(f"{count} KV blocks are needed, {free} can be had")

    def replace_pages(self, count: int) -> None:
        """Blocks for other content: `count` of the timeline's own. Raises PoolFullError; its blocks are gone then."""
        self.give_pages(0)
        with self.pool.changing() as pages:
            self.memory.pages[:count] = pages.take(count)
            self.num_pages = count

    # ---- tokens -----------------------------------------------------------------------------------

    def read(
        self, tokens: list[int], marks: int, residual: NDArray[np.int32], clips: NDArray[np.int64]
    ) -> None:
        """All layers of the pending token, if there is one, and of the next tokens are done.

        residual: X of the last. clips: of all of them.
        """
        now, memory = self.now, self.memory
        begin = now.length + now.pending
        end, count = begin + len(tokens), len(tokens)
        memory.tokens[begin:end], memory.marks[begin:end] = tokens, marks
        answered, walked = count * bool(marks & ANSWER), count * bool(marks & WALKED)
        memory.answer[now.answered : now.answered + answered] = tokens[:answered]
        self.commit(
            residual=residual,
            clips=clips,
            length=end,
            depth=0,
            pending=False,
            ready=True,
            fresh=False,
            answered=now.answered + answered,
            walked=now.walked + walked,
            forced_tokens=now.forced_tokens + walked,
        )

    def share(self, other: Timeline) -> None:
        """Become, from empty, what `other` is; its blocks are then both's."""
        ours, theirs, new, end = self.memory, other.memory, other.now, other.length
        self.give_pages(0)
        with self.pool.changing() as pages:
            ours.pages[: other.num_pages] = other.page_table
            self.num_pages = other.num_pages
            pages.share(other.page_table.tolist())
        ours.tokens[:end], ours.marks[:end] = theirs.tokens[:end], theirs.marks[:end]
        ours.answer[: new.answered] = other.answer
        ours.hidden[:], ours.clips[self.now.row] = theirs.hidden, 0
        if new.schema is not None:
            walk = other.walk
            self.take_walk(None if walk is None else walk.fork())
        self.commit(
            residual=other.residual,
            clips=other.clips,
            length=end,
            answered=new.answered,
            walked=new.walked,
            ready=new.ready,
            has_hidden=new.has_hidden,
            forced_tokens=new.forced_tokens,
            history=other.read_history.then(end, self._salt),
            schema=self.now.schema if new.schema is None else new.schema,
            fresh=False,
        )

    def choose(self, token: int, clips: NDArray[np.int64]) -> None:
        """A token was chosen; it is to be read next. clips: of its choice."""
        answered, walks = self.now.answered, self.now.schema is not None
        self.memory.answer[answered] = token
        self.feed(
            token,
            ANSWER | (WALKED if walks else 0),
            clips=clips,
            answered=answered + 1,
            walked=self.now.walked + walks,
        )

    def feed(self, token: int, marks: int = 0, **changes: Any) -> None:
        """A token is to be read next."""
        self.memory.tokens[self.length] = token
        self.memory.marks[self.length] = marks
        self.commit(pending=True, ready=False, depth=0, fresh=False, **changes)

    def advanced(self, depth: int, residual: NDArray[np.int32], clips: NDArray[np.int64]) -> None:
        """The pending token is done up to layer `depth`; residual: its X there. clips: of these layers."""
        now, done = self.now, depth == self.model.num_layers
        self.commit(
            residual=residual,
            clips=clips,
            length=now.length + done,
            depth=0 if done else depth,
            pending=not done,
            ready=done,
            layers_run=now.layers_run + depth - now.depth,
            total_layers=now.total_layers + depth - now.depth,
        )

    @property
    def answer(self) -> NDArray[np.int32]:
        """The generated tokens, i32[any]."""
        return self.memory.answer[: self.now.answered]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens that were read, and the pending one. Raises ReleasedError."""
        self.check_live()
        return tuple(self.memory.tokens[: self.length + self.pending].tolist())

    # ---- schema and adapter -----------------------------------------------------------------------

    def bind_schema(self, schema: Schema | None) -> None:
        if schema is not None and not typed(schema, Schema, "the schema").of(self.model.tokenizer):
            raise InvalidArgumentError("the schema was compiled by another model")
        with self.claimed():
            self.check_open()
            if not self.now.fresh:
                raise SchemaBindError("a schema is bound to a new or reset sequence only")
            self.commit(schema=schema, walked=0)

    def bind_adapter(self, adapter: Adapter | None) -> None:
        if adapter is not None and typed(adapter, Adapter, "the adapter").model is not self.model:
            raise InvalidArgumentError("the adapter was mapped on another model")
        with self.claimed():
            self.check_open()
            before = self.adapter
            if self.depth:
                raise MidTokenError("an adapter is changed between tokens only")
            if adapter is before:
                return
            if adapter is not None:
                adapter.bind()
            salt = b"" if adapter is None else adapter.salt
            self.commit(adapter=adapter, history=self.now.history.then(self.length, salt))
            if before is not None:
                before.unbind()

    @property
    def _salt(self) -> bytes:
        """What identifies the adapter; empty for none."""
        return b"" if self.adapter is None else self.adapter.salt

    @property
    def read_history(self) -> History:
        """Under which adapters the positions that there are were computed: no span begins behind them."""
        spans = tuple(span for span in self.now.history.spans if span[0] < self.length)
        return History(spans) if spans else History()

    @property
    def adapter_history(self) -> tuple[tuple[int, str], ...]:
        """The position from which on each adapter was used, by identity; "" where none was. Raises ReleasedError."""
        self.check_live()
        return tuple((at, salt.hex()) for at, salt in self.now.history.spans)

    # ---- what can be asked ------------------------------------------------------------------------

    def stats(self) -> SequenceStats:
        """Raises ReleasedError, BusyError."""
        with self.claimed():
            now = self.now
            return SequenceStats(
                tokens=now.length,
                decode_step_ceiling=now.ceiling,
                layers_run=now.layers_run,
                total_layers=now.total_layers,
                forced_token_count=now.forced_tokens,
                kv_blocks=self.num_pages,
                schema_accepting=self.walk is not None and self.walk.accepting,
                saturations=dict(zip(SITES, self.clips.tolist(), strict=True)),
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
