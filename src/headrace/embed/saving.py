"""From a timeline to what a blob holds, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.embed.adapter import Adapter
from headrace.embed.errors import RestoreAdapterError, RestoreDamagedError, RestoreSchemaError
from headrace.embed.schema import Schema, SchemaWalk
from headrace.embed.state import Saved
from headrace.embed.timeline import ANSWER, WALKED, Timeline
from headrace.engine.pages import PAGE_TOKENS, pages_for
from headrace.kernels.layout import page_positions


def capture(line: Timeline) -> Saved:
    """What a timeline is now."""
    memory, count = line.memory, line.length + line.pending
    return Saved(
        length=line.length,
        depth=line.depth,
        pending=line.pending,
        ready=line.ready,
        forced_tokens=line.now.forced_tokens,
        total_layers=line.now.total_layers,
        tokens=memory.tokens[:count],
        marks=memory.marks[:count],
        schema=None if line.schema is None else (line.schema.name, line.schema.digest),
        history=line.now.history,
        clips=line.clips,
        residual=line.residual if line.ready or line.depth else None,
        hidden=memory.hidden if line.has_hidden else None,
        pages=_held_pages(line),
    )


def _held_pages(line: Timeline) -> NDArray[np.uint8]:
    """A copy of its blocks, u8[blocks, block bytes], zero where no position is."""
    shape, count = line.model.program.shape, pages_for(line.held)
    pages: NDArray[np.uint8] = line.pool.cache[line.page_table[:count]]
    if count:
        base = line.length - (count - 1) * PAGE_TOKENS  # the first position that is not whole
        last = pages[-1].reshape(shape.num_layers, -1)
        positions = page_positions(shape).reshape(shape.num_layers, -1)
        last[: line.depth][positions[: line.depth] > base] = 0
        last[line.depth :][positions[line.depth :] >= base] = 0
    return pages


def find_adapter(line: Timeline, saved: Saved, given: Adapter | None) -> Adapter | None:
    """The adapter that a saved sequence had: as given, or bound already. Raises RestoreAdapterError."""
    found = given
    if given is None and line.adapter is not None and line.adapter.identity == saved.adapter:
        found = line.adapter
    if not saved.adapter and found is None:
        return None
    if found is None:
        raise RestoreAdapterError(f"the saved sequence has adapter {saved.adapter:.16}…; give it")
    if found.identity != saved.adapter or found.model is not line.model:
        raise RestoreAdapterError("the saved sequence has another adapter than the given one")
    return found


def find_walk(line: Timeline, saved: Saved, given: Schema | None) -> SchemaWalk | None:
    """The way of a saved sequence through its schema. Raises RestoreSchemaError, RestoreDamagedError."""
    walked = saved.tokens[saved.marks & WALKED != 0]
    if saved.schema is None:
        if given is not None:
            raise RestoreSchemaError("the saved sequence has no schema")
        if len(walked):
            raise RestoreDamagedError("the saved sequence has no schema that it followed")
        return None
    walk = SchemaWalk(line.model.schemas.saved(*saved.schema, given))
    if not all(walk.take(token) for token in walked.tolist()):
        raise RestoreDamagedError("the saved sequence did not follow its schema")
    return walk


def become(line: Timeline, saved: Saved, walk: SchemaWalk | None, adapter: Adapter | None) -> None:
    """Put a timeline into a saved state. Raises PoolFullError, ReleasedError of the adapter, changing nothing.

    An interrupt on the way leaves it as it was, empty, or as saved.
    """
    with line.pool.lock:
        line.check_pages(len(saved.pages))
        before = line.adapter
        if adapter is not None:
            adapter.bind()
        line.clear()
        line.replace_pages(len(saved.pages))
    memory, count, new = line.memory, len(saved.tokens), 1 - line.now.row
    line.pool.cache[line.page_table] = saved.pages
    memory.tokens[:count], memory.marks[:count] = saved.tokens, saved.marks
    answer = saved.tokens[saved.marks & ANSWER != 0]
    memory.answer[: len(answer)] = answer
    memory.clips[new] = saved.clips
    if saved.residual is not None:
        memory.residual[new] = saved.residual
    if saved.hidden is not None:
        memory.hidden[:] = saved.hidden
    line.take_walk(walk)
    line.commit(
        row=new,
        length=saved.length,
        depth=saved.depth,
        pending=saved.pending,
        ready=saved.ready,
        fresh=False,
        answered=len(answer),
        walked=0 if walk is None else walk.taken,
        has_hidden=saved.hidden is not None,
        forced_tokens=saved.forced_tokens,
        total_layers=saved.total_layers,
        history=saved.history,
        schema=None if walk is None else walk.schema,
        adapter=adapter,
    )
    if before is not None:
        before.unbind()
