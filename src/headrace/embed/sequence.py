"""A sequence: what a caller holds of one generation."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np

from headrace.embed.adapter import Adapter
from headrace.embed.errors import (
    BufferTooSmallError,
    ContextExceededError,
    InvalidArgumentError,
    MidTokenError,
    PrefixAdapterError,
    PrefixNotFrozenError,
    PrefixSchemaError,
    SequenceNotEmptyError,
    TokenRangeError,
)
from headrace.embed.memory import Buffer, bytes_of, typed
from headrace.embed.pool import KVPool
from headrace.embed.prefix import Prefix
from headrace.embed.saving import become, capture, find_adapter, find_walk
from headrace.embed.schema import Schema
from headrace.embed.state import pack, unpack
from headrace.embed.timeline import Timeline


class Sequence(Timeline):
    """One generation. `prefill` and `decode_step` move it on; a call at a time, `release` from any thread."""

    name: ClassVar[str] = "sequence"
    kind: ClassVar[str] = "sequences"

    def __init__(self, pool: KVPool) -> None:
        """An empty one. Raises PoolSequencesError, ReleasedError."""
        super().__init__(pool)

    def __enter__(self) -> Self:
        self.check_live()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def reset(self) -> None:
        """Back to empty, from any state. Schema and adapter stay bound, the schema at its beginning; counts are 0."""
        with self.claimed():
            self.clear()

    def adopt_prefix(self, prefix: Prefix) -> None:
        """Begin an empty sequence with a frozen prefix, whose blocks it shares; it is ready for its next token then.

        The sequence's adapter is the one, by content, that the prefix was read with up to its end, and its schema that
        of the prefix if that has one. Raises
        InvalidArgumentError, SequenceNotEmptyError, PrefixNotFrozenError, PrefixAdapterError, PrefixSchemaError,
        BusyError, ReleasedError.
        """
        if not isinstance(prefix, Prefix) or prefix.pool is not self.pool:
            raise InvalidArgumentError("the prefix is none of this sequence's pool")
        with self.claimed(), self.pool.lock, prefix.claimed():
            if self.length or self.pending:
                raise SequenceNotEmptyError("only an empty sequence adopts a prefix")
            if not prefix.frozen:
                raise PrefixNotFrozenError("the prefix is not frozen yet")
            if prefix.length and prefix.read_history.current != self._salt:
                raise PrefixAdapterError("the prefix was read with another adapter")
            if prefix.schema is not None and not prefix.schema.same(self.schema):
                raise PrefixSchemaError("the prefix was read under another schema")
            self.share(prefix)

    def embed_token(self, token: int) -> None:
        """Give the next token, of a prompt, without reading it: decode steps do that, a few layers a call.

        Raises InvalidArgumentError, TokenRangeError, ContextExceededError, MidTokenError where one is pending already.
        """
        with self.claimed():
            if self.pending:
                raise MidTokenError("the sequence has a token that is not read yet")
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidArgumentError(f"token {token!r:.60} is no whole number")
            if not 0 <= token < self.model.vocab_size:
                raise TokenRangeError(f"token {token} is not in the vocabulary")
            if not self.room:
                raise ContextExceededError(f"the context of {self.model.context} is full")
            self.feed(int(token))

    @property
    def schema_bound(self) -> bool:
        """Whether a schema is bound. Raises ReleasedError."""
        self.check_live()
        return self.schema is not None

    def set_schema(self, schema: Schema | None) -> None:
        """Bind a schema, or none. Raises SchemaBindError unless the sequence is new or reset."""
        self.bind_schema(schema)

    def set_adapter(self, adapter: Adapter | None) -> None:
        """Use an adapter, or none, from the next token that is read on. Raises MidTokenError, InvalidArgumentError."""
        self.bind_adapter(adapter)

    def forced_span(self) -> list[int]:
        """The tokens that the schema leaves no choice about now: what `prefill(..., content=True)` may read at once."""
        with self.claimed():
            return [] if self.walk is None else self.walk.forced()

    def save(self) -> bytes:
        """All of the sequence, for `restore` in any process, on any kernel tier and with any number of threads."""
        with self.claimed():
            return pack(self.model, capture(self))

    def save_into(self, buffer: Buffer) -> int:
        """`save` into a caller's buffer, of `seq_state_size` bytes or as many as it takes; how many it took.

        Raises InvalidArgumentError, BufferTooSmallError, writing nothing.
        """
        target, blob = bytes_of(buffer, "a saved sequence"), self.save()
        if len(target) < len(blob):
            raise BufferTooSmallError("the saved sequence", len(blob), len(target))
        target[: len(blob)] = np.frombuffer(blob, np.uint8)
        return len(blob)

    def restore(
        self, blob: Buffer, *, adapter: Adapter | None = None, schema: Schema | None = None
    ) -> None:
        """Become what was saved, in place of what the sequence is. What follows the blob in its buffer is ignored.

        adapter: the one that the saved sequence had, unless this one is bound to it already. schema: its schema, if the
        artifact does not carry it. A restored sequence is reset before another schema is bound.

        Raises RestoreModelError, RestoreShapeError, RestoreVersionError, RestoreTruncatedError, RestoreDamagedError,
        RestoreAdapterError, RestoreSchemaError, PoolFullError, InvalidArgumentError, with the sequence as it was.
        One that an interrupt cuts off may leave it empty.
        """
        if adapter is not None:
            typed(adapter, Adapter, "the adapter")
        if schema is not None:
            typed(schema, Schema, "the schema")
        view = bytes_of(blob, "a saved sequence", writable=False).data
        with self.claimed():
            saved = unpack(view, self.model)
            walk = find_walk(self, saved, schema)
            become(self, saved, walk, find_adapter(self, saved, adapter))
