"""What a dialect is: endpoints, each a pure translation. Knows no HTTP library and no engine.

A dialect's module has `ENDPOINTS`, and `error(failure)`, the JSON of an error in its own shape. `app` serves them; an
endpoint that generates opens an `Exchange`, which says what is asked and renders what is told.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.serve.events import Event, Failure, Reply
from headrace.serve.failure import UnknownNameError
from headrace.serve.request import Json, Request
from headrace.serve.validation import Wire

EVENT_STREAM = "text/event-stream"
LINES = "application/x-ndjson"
DEFAULT_LIMIT = (
    8192  # tokens of an answer that nobody limited, where a quarter of the window is more
)


@dataclass(frozen=True)
class Memory:
    """How memory is planned. source: the option that sized the plan, or auto; target_gb: the process's target now, None
    where experts were counted; limit_gb: the ceiling of an adaptive plan, if it was given; pool_gb: experts kept, now.
    GB are 10^9 bytes."""

    source: str = "auto"
    target_gb: float | None = None
    limit_gb: float | None = None
    pool_gb: float = 0.0


@dataclass(frozen=True)
class Card:
    """What the server serves, for the endpoints that tell.

    name: what clients call it; adapters: names that select one, as `name+adapter`. context_window: positions of prompt
    and answer together, as served; model_window: as trained. digest: the artifact's identity, hex. num_parameters and
    size_bytes count all experts. tools: whether the template renders them itself. template: its source.
    """

    name: str
    family: str
    context_window: int
    model_window: int
    created: int = 0  # Unix seconds
    adapters: tuple[str, ...] = ()
    digest: str = ""
    num_parameters: int = 0
    size_bytes: int = 0
    resident_bytes: int = 0  # planned, now
    memory: Memory = Memory()
    full_prefill_seconds: float | None = (
        None  # for a window full of new tokens; None: not known yet
    )
    quantization: str = ""
    architecture: Mapping[str, int | str] = field(default_factory=dict)
    template: str = ""
    vision: bool = False
    reasoning: bool = False
    version: str = ""
    max_prefill_wait: float | None = None  # seconds

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may give as its model."""
        return (self.name, *(f"{self.name}+{adapter}" for adapter in self.adapters))

    @property
    def default_limit(self) -> int:
        """Tokens of an answer that nobody limited."""
        return max(1, min(DEFAULT_LIMIT, self.context_window // 4))

    @property
    def context_policy(self) -> Json:
        """What bounds a request, for the endpoints that list models: windows in tokens, by mode too, and the wait."""
        modes = ("text", "image") if self.vision else ("text",)
        return {
            "configured_window": self.context_window,
            "model_window": self.model_window,
            "modes": dict.fromkeys(modes, self.context_window),
            "max_prefill_wait_seconds": self.max_prefill_wait,
        }


@dataclass(frozen=True)
class Context:
    """What a dialect may know beside the body. id: of this request, 32 hex digits; now: Unix seconds."""

    card: Card
    id: str
    now: float
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    path: Mapping[str, str] = field(default_factory=dict)  # parameters of the path


def served_name(name: str, card: Card, *, status: int = 400, prefix: str = "") -> str:
    """The served name that is meant: in any case, with `:latest` behind it or not; without a tag any tag is meant.

    prefix: in front of names where the dialect tells them. Raises UnknownNameError, with `status`.
    """
    bare = name.removeprefix(prefix)
    if bare in card.names:
        return bare
    bare = bare.lower().removesuffix(":latest")
    for served in card.names:
        base, _, adapter = served.partition("+")
        untagged = base.partition(":")[0] + (f"+{adapter}" if adapter else "")
        if bare in (served.lower(), untagged.lower()):
            return served
    raise UnknownNameError(name, [prefix + each for each in card.names], status=status)


class Exchange(ABC):
    """One generation in a dialect: what is asked, and the bytes that tell what came of it.

    Either `whole` is called, once, or `push` with every event in order. `ignored`: fields that were accepted and not
    looked at.
    """

    media_type = EVENT_STREAM
    ignored: tuple[str, ...] = ()

    def __init__(self, request: Request, *, stream: bool) -> None:
        self.request = request
        self.stream = stream

    @abstractmethod
    def whole(self, reply: Reply) -> Json:
        """The body of a response that is not streamed."""

    @abstractmethod
    def push(self, event: Event) -> Iterator[bytes]:
        """What is sent for an event of a streamed response. A failure ends it in the dialect's own way."""

    def keepalive(self) -> bytes:
        """What is sent when nothing happened for ten seconds; empty for nothing."""
        return b""


@dataclass(frozen=True)
class Generate:
    """An endpoint that generates. open: may raise RequestError, or return an answer that needs no model."""

    path: str
    body: type[Wire]
    open: Callable[[Any, Context], Exchange | Json]
    method: Literal["POST"] = "POST"


@dataclass(frozen=True)
class Counting:
    """A prompt whose tokens are wanted. ignored: see `Exchange`."""

    request: Request
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Count:
    """An endpoint that counts the tokens of a prompt."""

    path: str
    body: type[Wire]
    open: Callable[[Any, Context], Counting]
    whole: Callable[[int], Json]
    method: Literal["POST"] = "POST"


@dataclass(frozen=True)
class Tell:
    """An endpoint that tells what is known without the model. answer: gets the body, None without one."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    answer: Callable[[Any, Context], Json]
    body: type[Wire] | None = None


@dataclass(frozen=True)
class Page:
    """An endpoint that tells something that is no JSON."""

    path: str
    media_type: str
    answer: Callable[[Any, Context], str]
    method: Literal["GET"] = "GET"
    body: None = None


Endpoint = Generate | Count | Tell | Page
ErrorBody = Callable[[Failure], Json]


def one_line(body: Json) -> str:
    """JSON that is one line for every reader: some clients split at U+0085, U+2028 and U+2029 too."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def sse(data: str, event: str | None = None) -> bytes:
    """A frame of Server-Sent Events; data: one line."""
    head = "" if event is None else f"event: {event}\n"
    return f"{head}data: {data}\n\n".encode()
