"""What is to be told of one request: phases with their seconds, tokens, how it ended. No text of anybody's. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.serve.backend import Progress
from headrace.serve.events import Event, Failed, Finished, Started, Usage

GONE = "client_gone"  # the error of a request whose client left

Fields = dict[str, str | int | float]


@dataclass
class Account:
    """One request. Times are of the clock that `began` is of; `model`: as the client said it."""

    began: float
    id: str = ""
    dialect: str = "server"
    endpoint: str = "unknown"
    model: str | None = None
    status: int | None = None  # of HTTP, once an answer began
    submitted: float | None = None
    started: float | None = None
    first: float | None = None  # something came of the prompt
    ended: float | None = None
    usage: Usage | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0  # of the cached ones
    progress: Progress = Progress()  # of a generation, as far as it came
    finish: str | None = None
    error: str | None = None

    def heard(self, event: Event, now: float) -> None:
        """A generation told something."""
        if isinstance(event, Started):
            self.started = now
            self.prompt_tokens, self.cached_tokens = event.prompt_tokens, event.cached_tokens
            self.disk_tokens = event.disk_tokens
            return
        if isinstance(event, Failed):
            self.error = event.failure.code
        elif self.first is None:
            self.first = now
        if isinstance(event, Finished):
            self.usage, self.finish = event.usage, event.reason
            self.prompt_tokens = event.usage.prompt_tokens
            self.cached_tokens = event.usage.cached_tokens

    def end(self, now: float) -> None:
        """The request is over."""
        self.ended = now
        unfinished = self.submitted is not None and self.finish is None
        if self.error is None and (self.status is None or unfinished):
            self.error = GONE

    @property
    def new_tokens(self) -> int:
        """Tokens of the answer, or of what there is of one that was given up."""
        return self.progress.new_tokens if self.usage is None else self.usage.new_tokens

    @property
    def first_token_seconds(self) -> float | None:
        """From the request to what came of it first."""
        return None if self.first is None else self.first - self.began

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second behind the first."""
        if self.usage is None or self.usage.new_tokens < 2 or self.usage.decode_seconds <= 0:
            return None
        return (self.usage.new_tokens - 1) / self.usage.decode_seconds

    def fields(self) -> Fields:
        """Everything by name, for a line of a log. Seconds and tokens."""
        out: Fields = {"dialect": self.dialect, "endpoint": self.endpoint}
        if self.id:
            out = {"id": self.id, **out}
        if self.model is not None:
            out["model"] = self.model[:200]
        if self.status is not None:
            out["status"] = self.status
        end = self.began if self.ended is None else self.ended
        out["seconds"] = round(end - self.began, 3)
        if self.submitted is not None:
            out |= self._phases(end)
        if self.finish is not None:
            out["finish"] = self.finish
        if self.error is not None:
            out["error"] = self.error
        return out

    def standing(self, now: float) -> Fields:
        """Where a request is that has not ended: its phase, and how far its prompt is read or its answer has come."""
        if self.started is None:
            phase: Fields = {"phase": "queued"}
        elif self.first is None:
            phase = {"phase": "prefill", "read_tokens": self.progress.read_tokens}
        else:
            phase = {"phase": "decode", "new_tokens": self.new_tokens}
        if self.started is not None:
            phase["prompt_tokens"] = self.prompt_tokens
        return {"id": self.id, "seconds": round(now - self.began, 1), **phase}

    def _phases(self, end: float) -> Fields:
        read = end if self.first is None else self.first  # the prompt was
        begun = end if self.started is None else self.started
        if self.usage is not None and self.usage.prefill_seconds > 0:  # measured where it happened
            begun = max(self.began, read - self.usage.prefill_seconds)
        out: Fields = {"queued": round(begun - self.began, 3)}
        if self.started is None:
            return out
        out["prefill"] = round(read - begun, 3)
        if self.first is not None:
            out["decode"] = round(end - self.first, 3)
        out |= {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        if self.disk_tokens:
            out["disk_tokens"] = self.disk_tokens
        out["new_tokens"] = self.new_tokens
        if self.usage is not None:
            out["reasoning_tokens"] = self.usage.reasoning_tokens
        return out
