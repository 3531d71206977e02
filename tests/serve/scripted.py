"""A backend that follows a script: for what a small model will not say, and what must not depend on a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.serve.backend import Progress
from headrace.serve.dialect import Card
from headrace.serve.events import Event, Failed, Finished
from headrace.serve.request import Request

CARD = Card(
    name="painted:1m",
    family="llama",
    context_window=8192,
    model_window=8192,
    created=1_700_000_000,
    digest="ab" * 32,
    num_parameters=1_000_000,
    size_bytes=700_000,
    quantization="4-bit",
    template="{{ messages }}",
    reasoning=True,
    version="0.0.1",
    adapters=("pirate",),
)

Script = Sequence[Event | float] | Callable[[Request], Sequence[Event | float]]


@dataclass
class ScriptedRunning:
    """Hands out events; a number in the script is seconds of silence."""

    script: list[Event | float]
    cancelled: bool = False
    taken: list[Event] = field(default_factory=list)
    progress: Progress = Progress()

    async def next(self) -> Event | None:
        while self.script and not self.cancelled:
            head = self.script.pop(0)
            if isinstance(head, int | float):
                await asyncio.sleep(head)
                continue
            self.taken.append(head)
            return head
        return None

    def cancel(self) -> None:
        self.cancelled = self.cancelled or bool(self.script)


class ScriptedBackend:
    """Answers every request with the script, and remembers what was asked."""

    def __init__(self, script: Script = (), card: Card = CARD, count: int = 7) -> None:
        self.card = card
        self.script = script
        self.requests: list[Request] = []
        self.runs: list[ScriptedRunning] = []
        self._count = count

    def submit(self, request: Request, *, request_id: str, arrived: float) -> ScriptedRunning:
        self.requests.append(request)
        script = self.script(request) if callable(self.script) else self.script
        assert not script or isinstance(script[-1], Finished | Failed | float)
        self.runs.append(ScriptedRunning(list(script)))
        return self.runs[-1]

    async def count(self, request: Request) -> int:
        self.requests.append(request)
        return self._count
