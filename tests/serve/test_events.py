"""A whole answer from its events."""

from __future__ import annotations

from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Failed,
    Failure,
    Finished,
    Reasoning,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.request import Text, ToolCall


def test_a_call_that_was_cut_is_none() -> None:
    usage = Usage(3, 1, 9)
    events = [
        Started(3, 1),
        ReasoningDelta("Hm"),
        ReasoningDelta("m."),
        TextDelta("So"),
        CallStarted(0, "x", "f"),
        CallDelta(0, '{"a":'),
        CallDelta(0, "1}"),
        CallEnded(0, '{"a":1}'),
        CallStarted(1, "y", "f"),
        CallDelta(1, "{"),
        Finished("length", usage),
    ]
    whole = Reply(
        "length",
        usage,
        (Reasoning("Hmm."), Text("So"), ToolCall("x", "f", '{"a":1}')),
        call_cut=True,
    )
    assert collected(events) == whole


def test_a_failure_is_the_answer() -> None:
    failure = Failure(500, "inference_error", "it broke")
    assert collected([Started(3, 0), TextDelta("So"), Failed(failure)]) == failure


def test_the_parts_keep_their_order() -> None:
    """Pieces of a kind are one part, unless something came between them."""
    a, b = ToolCall("x", "f", "{}"), ToolCall("y", "f", "{}")
    events = [
        Started(3, 1),
        TextDelta("a"),
        ReasoningDelta("H"),
        ReasoningDelta("m"),
        CallStarted(0, "x", "f"),
        CallEnded(0, "{}"),
        ReasoningDelta("mm"),
        TextDelta("z"),
        CallStarted(1, "y", "f"),
        CallEnded(1, "{}"),
        TextDelta("c"),
        Finished("stop", Usage()),
    ]
    reply = collected(events)
    parts = (Text("a"), Reasoning("Hm"), a, Reasoning("mm"), Text("z"), b, Text("c"))
    assert reply == Reply("stop", Usage(), parts)
    assert (reply.text, reply.reasoning, reply.calls) == ("azc", "Hmmm", (a, b))
