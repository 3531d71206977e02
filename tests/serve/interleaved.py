"""Answers that reason, speak and call more than once, and what a client's next request makes of them."""

from __future__ import annotations

from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    Finished,
    Reason,
    ReasoningDelta,
    Started,
    TextDelta,
    Usage,
)

USAGE = Usage(prompt_tokens=10, cached_tokens=4, new_tokens=6, reasoning_tokens=2)
ARGUMENTS = '{"city":"Bern","days":3}'


def call(index: int, name: str = "weather", arguments: str = ARGUMENTS) -> list[Event]:
    """A complete call, in two pieces."""
    half = len(arguments) // 2
    return [
        CallStarted(index, f"c{index}", name),
        CallDelta(index, arguments[:half]),
        CallDelta(index, arguments[half:]),
        CallEnded(index, arguments),
    ]


def script(*events: Event, reason: Reason = "stop") -> list[Event]:
    return [Started(10, 4), *events, Finished(reason, USAGE)]


A, B, C = TextDelta("a"), TextDelta("b"), TextDelta("\nc")
HM, MM = ReasoningDelta("Hm"), ReasoningDelta("mm")
CUT = [CallStarted(1, "c1", "weather"), CallDelta(1, '{"ci')]
# By what they show.
SCRIPTS: dict[str, list[Event]] = {
    "reasoning between calls": script(HM, *call(0), MM, *call(1), A, reason="tool_calls"),
    "text around reasoning": script(A, HM, C),
    "reasoning around text": script(HM, A, MM, B),
    "text around calls": script(A, *call(0), C, *call(1), B, reason="tool_calls"),
    "text behind a call, cut": script(*call(0), HM, A, reason="length"),
    "reasoning, cut": script(A, HM, reason="length"),
    "numbers that few parsers read": script(
        *call(0, arguments='{"city":"\\ud800","days":1e999}'),
        *call(1, arguments='{"days":' + "7" * 1000 + "}"),
        reason="tool_calls",
    ),
}
# Where a limit cuts a call, which chat's stream alone tells in part.
CUT_CALLS: dict[str, list[Event]] = {
    "reasoning before a cut call": script(A, HM, *CUT, reason="length"),
    "a call before a cut call": script(*call(0), MM, *CUT, reason="context"),
}
