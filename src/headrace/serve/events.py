"""What a generation tells while it runs, whatever dialect hears it.

A stream is `Started`, then deltas, then `Finished`; or `Failed` in place of anything, and nothing after it. Calls have
indices 0, 1, …; deltas of a call come between its start and its end, and may mix with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from headrace.serve.request import ToolCall

# "context": the answer filled the window before its own limit. "stop": the model ended its turn.
Reason = Literal["stop", "stop_sequence", "tool_calls", "length", "context"]


@dataclass(frozen=True)
class Usage:
    """Tokens and seconds. Of `prompt_tokens`, `cached_tokens` were not read again; of `new_tokens`,
    `reasoning_tokens` were reasoning."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    reasoning_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Started:
    """The request was admitted; its prompt is being read. The first event. disk_tokens: of those that were cached."""

    prompt_tokens: int
    cached_tokens: int
    disk_tokens: int = 0


@dataclass(frozen=True)
class ReasoningDelta:
    """Some reasoning, never empty."""

    text: str


@dataclass(frozen=True)
class TextDelta:
    """Some of the answer, never empty."""

    text: str


@dataclass(frozen=True)
class CallStarted:
    """The model calls a tool. id: unique, without a dialect's prefix."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallDelta:
    """The next piece of a call's arguments as JSON text, never empty. All pieces together are `CallEnded.arguments`."""

    index: int
    fragment: str


@dataclass(frozen=True)
class CallEnded:
    """A call is complete. A call without this was cut, and must not be run."""

    index: int
    arguments: str


@dataclass(frozen=True)
class Finished:
    """The answer is complete, or was cut by a limit. stop: the stop string that was met."""

    reason: Reason
    usage: Usage
    stop: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why a request failed: `code` names the cause, `status` is HTTP's, `place` is where in the body.

    Of a prompt that is too long, `prompt_tokens` (where they were counted) and `context_tokens`.
    """

    status: int
    code: str
    message: str
    hint: str | None = None
    prompt_tokens: int | None = None
    context_tokens: int | None = None
    place: str | None = None

    @property
    def text(self) -> str:
        """Message and hint."""
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


@dataclass(frozen=True)
class Failed:
    """The generation failed; what came before is not an answer."""

    failure: Failure


Event = (
    Started | ReasoningDelta | TextDelta | CallStarted | CallDelta | CallEnded | Finished | Failed
)


@dataclass(frozen=True)
class Reply:
    """A finished answer as a whole. calls: those that are complete."""

    reason: Reason
    usage: Usage
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    stop: str | None = None


def collected(events: Iterable[Event]) -> Reply | Failure:
    """A whole answer from its events."""
    text: list[str] = []
    reasoning: list[str] = []
    started: dict[int, CallStarted] = {}
    calls: list[ToolCall] = []
    for event in events:
        match event:
            case Failed(failure):
                return failure
            case TextDelta(piece):
                text.append(piece)
            case ReasoningDelta(piece):
                reasoning.append(piece)
            case CallStarted(index=index):
                started[index] = event
            case CallEnded(index, arguments):
                begun = started[index]
                calls.append(ToolCall(begun.id, begun.name, arguments))
            case Finished(reason, usage, stop):
                return Reply(reason, usage, "".join(text), "".join(reasoning), tuple(calls), stop)
            case _:
                pass
    raise AssertionError("the events have no end")
