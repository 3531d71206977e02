"""Prefill: many tokens of one sequence, or of a prefix, in passes of their own."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from headrace.embed.errors import (
    ContextExceededError,
    EmbedError,
    InvalidArgumentError,
    MidTokenError,
    SchemaUnboundError,
    SpanUnreachableError,
    TokenRangeError,
)
from headrace.embed.memory import typed
from headrace.embed.timeline import ANSWER, WALKED, Timeline
from headrace.embed.workspace import Workspace


def prefill(
    sequence: Timeline, tokens: Many[int], workspace: Workspace, *, content: bool = False
) -> int:
    """Read tokens behind those that a sequence has, its pending one first; decoding goes on behind them.

    content: they are forced on it by its schema, whose walk goes over them; otherwise they are a prompt. Returns how
    many were read: all of them. A token that cannot be read ends the call with an error whose `consumed` says how many
    were read, for good. Without tokens nothing happens.

    Raises before it looks at the tokens: InvalidArgumentError, BusyError, ReleasedError, MidTokenError,
    SchemaUnboundError, and SpanUnreachableError for the first token. Then: TokenRangeError, ContextExceededError,
    SpanUnreachableError, PoolFullError (nothing was read), ParallelForIncompleteError, ExpertReadError, FileError,
    BusyError of a mixture's experts, and whatever a hook raises. Each of them has `consumed`.
    """
    typed(sequence, Timeline, "the sequence")
    typed(workspace, Workspace, "the workspace")
    ids = _ids(tokens)
    with workspace.in_use(sequence.model), sequence.claimed():
        sequence.check_open()
        if sequence.depth:
            raise MidTokenError("the sequence is in mid-token; decode steps go on with it")
        if content:
            _check_content(sequence, ids)
        if ids:
            _read(sequence, ids, workspace, content)
        sequence.commit(fresh=False)
        return len(ids)


def _read(line: Timeline, ids: list[int], workspace: Workspace, content: bool) -> None:
    line.commit(has_hidden=False)
    before = line.length + line.pending
    try:
        admitted, refusal = _admitted(line, ids, content)
        line.reserve(line.pending + len(admitted))
        with workspace.over(line.pool):
            _read_chunks(line, admitted, workspace, content)
        if refusal is not None:
            raise refusal
    except BaseException as error:
        line.trim()
        vars(error)["consumed"] = max(0, line.length - before)  # whose error it may be
        raise
    line.memory.hidden[:] = line.residual
    line.commit(has_hidden=True)


def _ids(tokens: Many[int]) -> list[int]:
    if hasattr(tokens, "__array__"):
        tokens = np.asarray(tokens).tolist()
    whole = (
        isinstance(tokens, Many)
        and not isinstance(tokens, str | bytes | bytearray)
        and all(isinstance(t, int | np.integer) and not isinstance(t, bool) for t in tokens)
    )
    if not whole:
        raise InvalidArgumentError("the tokens are no sequence of whole numbers")
    return list(map(int, tokens))


def _check_content(line: Timeline, ids: list[int]) -> None:
    if line.walk is None:
        raise SchemaUnboundError("schema content for a sequence without a schema")
    known = ids and 0 <= ids[0] < line.model.vocab_size  # `_admitted` tells of others
    if known and not line.walk.reach(ids[:1]):
        raise SpanUnreachableError(f"the schema does not allow token {ids[0]} here")


def _admitted(line: Timeline, ids: list[int], content: bool) -> tuple[list[int], EmbedError | None]:
    """The tokens before the first that cannot be read, and why it cannot. Raises that where it is the first."""
    vocab, room = line.model.vocab_size, max(line.room, 0)
    count = next((i for i, token in enumerate(ids) if not 0 <= token < vocab), len(ids))
    refusal: EmbedError | None = None
    if count < len(ids):
        refusal = TokenRangeError(f"token {ids[count]} is not in the vocabulary of {vocab}")
    if content and line.walk is not None and (reach := line.walk.reach(ids[:count])) < count:
        count = reach
        refusal = SpanUnreachableError(f"the schema does not allow token {ids[count]} here")
    if count > room:
        count = room
        refusal = ContextExceededError(
            f"{len(ids)} tokens; the context of {line.model.context} has room for {room}"
        )
    if refusal is not None and not count:
        raise refusal
    return ids[:count], refusal


def _read_chunks(line: Timeline, ids: list[int], workspace: Workspace, content: bool) -> None:
    layers, step = line.model.num_layers, workspace.max_chunk
    due = [int(line.memory.tokens[line.length]), *ids] if line.pending else ids
    for at in range(0, len(due), step):
        part = due[at : at + step]
        batch = workspace.batch([(line, part)])
        last = at + step >= len(due)
        rows, clips = workspace.layers(0, layers, batch, line.residual[None], admit=last)
        new = part[1:] if line.pending else part
        marks = WALKED | ANSWER if content and line.walk is not None else 0
        if marks and line.walk is not None:
            for token in new:
                line.walk.take(token)
        line.read(new, marks, rows[-1], clips.sum(axis=0))
