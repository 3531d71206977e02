"""What a request may take, decided from numbers alone: how long an answer may be, and how long it may wait."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import ContextError, PromptSizeError
from headrace.serve.failure import RequestError

PREFILL_DEADLINE = "prefill_deadline_exceeded"
PREFILL_WAIT = "prefill_wait_exceeded"
STOPPING = "server_stopping"


@dataclass(frozen=True)
class Room:
    """Tokens that an answer may have; by_window: whether the window ends it before its limit does."""

    tokens: int
    by_window: bool


def room(prompt_tokens: int, window: int, limit: int | None, default: int) -> Room:
    """How long an answer may be. limit: the client's; default: where it gave none. Raises ContextError."""
    left = window - prompt_tokens
    if left < 1:
        raise ContextError(prompt_tokens, window, 1)
    wanted = default if limit is None else limit
    return Room(min(wanted, left), wanted > left)


def check_items(turns: int, tools: int, window: int) -> None:
    """Refuse what surely has more tokens than the window: each turn and each tool is one at least.

    Raises PromptSizeError.
    """
    if turns + tools > window:
        raise PromptSizeError(turns + tools, window, "messages and tools" if tools else "messages")


def check_wait(
    missing_tokens: int, reading: float | None, waited: float, longest: float | None
) -> None:
    """Whether the first token can come in time. Raises RequestError if it surely cannot.

    missing_tokens: of the prompt, that no cache holds; reading: seconds that they take to read, None where it is not
    known; waited, longest: seconds since the request came, and how many may pass; None: any.
    """
    if longest is None or reading is None:
        return
    if reading > longest:
        raise RequestError(
            f"reading {missing_tokens:,} tokens takes about {_seconds(reading)}; "
            f"at most {_seconds(longest)} may pass",
            code=PREFILL_WAIT,
            hint="send less, or serve with a larger --max-prefill-wait",
        )
    if waited + reading > longest:
        raise RequestError(
            f"after {_seconds(waited)} in line, reading {missing_tokens:,} tokens takes about "
            f"{_seconds(reading)} more; at most {_seconds(longest)} may pass",
            status=503,
            code=PREFILL_DEADLINE,
            hint="try again when the server is free, or serve with a larger --max-prefill-wait",
        )


def too_late(longest: float) -> RequestError:
    """The first token did not come in time."""
    return RequestError(
        f"the first token did not come within {_seconds(longest)}",
        status=503,
        code=PREFILL_DEADLINE,
        hint="try again when the server is free, or serve with a larger --max-prefill-wait",
    )


def closing() -> RequestError:
    """The server ends."""
    return RequestError("the server is stopping", status=503, code=STOPPING)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"
