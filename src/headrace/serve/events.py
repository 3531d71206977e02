"""What a generation tells while it runs, whatever dialect hears it.

A stream is `Started`, then deltas, then `Finished`; or `Failed` in place of anything, and nothing after it. Calls have
indices 0, 1, …; deltas of a call come between its start and its end, and may mix with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from headrace.serve.request import Text, ToolCall

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
class Reasoning:
    """Some reasoning between two other parts of an answer, never empty."""

    text: str


Said = Reasoning | Text | ToolCall


@dataclass(frozen=True)
class Reply:
    """A finished answer as a whole.

    parts: what was said, in its order; texts that nothing came between are one part, and calls are complete.
    call_cut: a call that was begun at the end is not among them.
    """

    reason: Reason
    usage: Usage
    parts: tuple[Said, ...] = ()
    stop: str | None = None
    call_cut: bool = False

    @property
    def text(self) -> str:
        """All of the answer, for dialects that have one field for it."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def reasoning(self) -> str:
        """All of the reasoning, for dialects that have one field for it."""
        return "".join(part.text for part in self.parts if isinstance(part, Reasoning))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


def collected(events: Iterable[Event]) -> Reply | Failure:
    """A whole answer from its events."""
    parts: list[Said] = []
    kind: type[Reasoning] | type[Text] = Text
    pieces: list[str] = []  # of the part that grows
    begun: CallStarted | None = None
    for event in events:
        match event:
            case Failed(failure):
                return failure
            case TextDelta(piece) | ReasoningDelta(piece):
                grows = Text if isinstance(event, TextDelta) else Reasoning
                if grows is not kind:
                    parts += _part(kind, pieces)
                    kind, pieces = grows, []
                pieces.append(piece)
            case CallStarted():
                parts += _part(kind, pieces)
                begun, pieces = event, []
            case CallEnded(arguments=arguments) if begun is not None:
                parts.append(ToolCall(begun.id, begun.name, arguments))
                begun = None
            case Finished(reason, usage, stop):
                parts += _part(kind, pieces)
                return Reply(reason, usage, tuple(parts), stop, begun is not None)
            case _:
                pass
    raise AssertionError("the events have no end")


def _part(kind: type[Reasoning] | type[Text], pieces: Iterable[str]) -> list[Said]:
    text = "".join(pieces)
    return [kind(text)] if text else []
