"""Messages: whatever was answered is accepted again, and says to the model what the model said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Finished,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.request import Json, Text, ToolCall, Turn
from serve.dialects.anthropic_messages import GET, HI, asked, frames, opened

USAGE = Usage(3, 0, 5)
SAID: dict[str, list[Event]] = {
    "nothing": [],
    "thought": [ReasoningDelta("H"), ReasoningDelta("m")],
    "text": [TextDelta("Hello "), TextDelta("世界")],
    "blank": [TextDelta("\n\n")],
    "call": [CallStarted(0, "c0", "get"), CallDelta(0, "{}"), CallEnded(0, "{}")],
    "other call": [
        CallStarted(1, "c1", "get"),
        CallDelta(1, '{"x": "</tool_call>'),
        CallDelta(1, '}"}'),
        CallEnded(1, '{"x": "</tool_call>}"}'),
    ],
    "cut call": [CallStarted(2, "c2", "get"), CallDelta(2, '{"x')],
}
# Every order of up to three; calls in theirs, and nothing behind a call that was cut.
ORDERS = [
    order
    for size in range(4)
    for order in itertools.permutations(SAID, size)
    if "cut call" not in order[:-1]
    and not ("other call" in order and "call" in order[order.index("other call") :])
]


def streamed(events: list[Event], **fields: Any) -> list[Json]:
    """The blocks that a client makes of a stream."""
    blocks: list[Json] = []
    inputs: dict[int, str] = {}
    for frame in frames(events, **fields):
        if frame["type"] == "content_block_start":
            assert frame["index"] == len(blocks)
            blocks.append(frame["content_block"])
        if frame["type"] == "content_block_delta":
            assert frame["index"] == len(blocks) - 1
            for key, value in frame["delta"].items():
                if key == "partial_json":
                    inputs[frame["index"]] = inputs.get(frame["index"], "") + value
                elif key != "type":
                    blocks[-1][key] += value
    for at, text in inputs.items():
        blocks[at]["input"] = json.loads(text)
    return blocks


def replayed(content: list[Json]) -> Turn:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"]}
        for block in content
        if block["type"] == "tool_use"
    ]
    answered = [{"role": "user", "content": results[::-1]}] if results else []
    turns = asked(messages=[*HI, {"role": "assistant", "content": content}, *answered, *HI]).turns
    assert [turn.call_id for turn in turns if turn.role == "tool"] == [
        r["tool_use_id"] for r in results
    ]
    return turns[1]


def events_of(order: tuple[str, ...]) -> Iterator[Event]:
    yield Started(3, 0)
    for name in order:
        yield from SAID[name]
    yield Finished("length", USAGE)


@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_an_answer_is_accepted_again(order: tuple[str, ...], display: str) -> None:
    events = list(events_of(order))
    reply = collected(events)
    assert isinstance(reply, Reply)
    calls = tuple(
        ToolCall(f"toolu_{call.id}", call.name, json.dumps(json.loads(call.arguments)))
        for call in reply.calls
    )
    parts = (Text(reply.text),) if reply.text else ()
    said = Turn("assistant", parts, reasoning=reply.reasoning, calls=calls)
    fields: Json = {"tools": [GET], "thinking": {"type": "adaptive", "display": display}}
    assert replayed(opened(**fields).whole(reply)["content"]) == said
    assert replayed(streamed(events, **fields)) == said
