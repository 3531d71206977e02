"""Errors as what a client is told: one mapping from the error tree, for every dialect."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import (
    ContextError,
    HeadraceError,
    InputError,
    MemoryBudgetError,
    PromptSizeError,
)
from headrace.serve.events import Failure

INVALID = "invalid_request"
NO_MEMORY = "insufficient_memory"
UNSUPPORTED_IMAGE = "unsupported_image"
HINT = "free memory, ask for less, or serve with a smaller --memory-gb or --max-context"


class RequestError(InputError):
    """A request that cannot be served as it stands. status, code: what the client is told; place: where in it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = INVALID,
        place: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.cause = code
        self.place = place


class UnknownNameError(RequestError):
    """A model that is not served here."""

    def __init__(self, name: str, served: Sequence[str], *, status: int = 400) -> None:
        known = ", ".join(map(repr, served))
        super().__init__(
            f"the model {name!r:.200} is not served here; {known} {'is' if len(served) == 1 else 'are'}",
            status=status,
            code="model_not_found",
            place="model",
        )


def failure(error: BaseException) -> Failure:
    """What a client is told of an error. What is no error of the house is told as such, without its insides."""
    match error:
        case RequestError():
            return Failure(error.status, error.cause, error.message, error.hint, place=error.place)
        case ContextError() | PromptSizeError():
            counted = error.prompt_tokens if isinstance(error, ContextError) else None
            sizes = (counted, error.context_tokens)
            return Failure(400, "context_length_exceeded", error.message, error.hint, *sizes)
        case MemoryBudgetError():
            return Failure(503, NO_MEMORY, error.message, error.hint)
        case MemoryError():
            return Failure(503, NO_MEMORY, "there is not enough memory for this request", HINT)
        case HeadraceError():
            return Failure(error.http_status, error.code, error.message, error.hint)
        case _:
            return Failure(500, "inference_error", f"internal error: {type(error).__name__}")
