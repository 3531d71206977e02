"""A whole answer from its events."""

from __future__ import annotations

from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Failed,
    Failure,
    Finished,
    ReasoningDelta,
    Reply,
    Started,
    TextDelta,
    Usage,
    collected,
)
from headrace.serve.request import ToolCall


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
    whole = Reply("length", usage, "So", "Hmm.", (ToolCall("x", "f", '{"a":1}'),))
    assert collected(events) == whole


def test_a_failure_is_the_answer() -> None:
    failure = Failure(500, "inference_error", "it broke")
    assert collected([Started(3, 0), TextDelta("So"), Failed(failure)]) == failure
