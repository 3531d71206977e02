"""What a client asks for, in whatever dialect. Frozen values, equal by content; knows no wire format and no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.values import Role, Tool

Json = dict[str, Any]
Effort = Literal["low", "medium", "high", "xhigh", "max"]
ChoiceMode = Literal["auto", "none", "required"]
FormatKind = Literal["text", "json", "schema"]


@dataclass(frozen=True)
class Text:
    """Some text of a message."""

    text: str


@dataclass(frozen=True)
class Image:
    """A picture that came inline: its bytes as they were sent, checked by `serve.images`."""

    data: bytes = field(repr=False)
    media_type: str


Part = Text | Image


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made. arguments: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message. An assistant's has its reasoning and calls, a tool's the id of the call that it answers."""

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    tool_name: str | None = None  # where a dialect repeats it beside a result

    @property
    def text(self) -> str:
        """Its parts that are text, one after the other."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model has to call a tool; `name`: that one, with mode "required"."""

    mode: ChoiceMode = "auto"
    name: str | None = None


@dataclass(frozen=True)
class Format:
    """What the answer has to be: any text, any JSON object ("json"), or what a schema allows."""

    kind: FormatKind = "text"
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens, as far as the client said; None takes the default of the kind of request."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """One generation.

    turns: the conversation, results of tools in the order of their calls (`history.arranged`); empty with `raw`, a
    prompt that no chat template is put around. limit: tokens that the client allows; None: a quarter of the window, at
    most 8,192; a limit over the room that the prompt leaves is cut to it. window: prompt and answer together, below the
    served one. effort: None does not reason. parallel_calls: whether more than one call may follow.
    """

    model: str
    turns: tuple[Turn, ...] = ()
    raw: str | None = None
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    answer: Format = Format()
    effort: Effort | None = None
    sampling: Sampling = Sampling()
    limit: int | None = None
    stop: tuple[str, ...] = ()
    window: int | None = None
