"""Errors as what a client is told: one mapping from the error tree, for every dialect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.errors import (
    ContextError,
    GrammarError,
    HeadraceError,
    InputError,
    MemoryBudgetError,
    PromptSizeError,
)
from headrace.serve.events import Failure

INVALID = "invalid_request"
TOO_LONG = "context_length_exceeded"
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
            return Failure(400, TOO_LONG, error.message, error.hint, *sizes)
        case MemoryBudgetError():
            return Failure(503, NO_MEMORY, error.message, error.hint)
        case MemoryError():
            return Failure(503, NO_MEMORY, "there is not enough memory for this request", HINT)
        case GrammarError():
            place = "tools" if error.kind.startswith("tool ") else None
            return Failure(error.http_status, error.code, error.message, error.hint, place=place)
        case HeadraceError():
            return Failure(error.http_status, error.code, error.message, error.hint)
        case _:
            return Failure(500, "inference_error", f"internal error: {type(error).__name__}")


# Causes that lie in the prompt, whatever finds them.
_OF_PROMPT = frozenset({TOO_LONG, "prefill_wait_exceeded", UNSUPPORTED_IMAGE})


def located(failure: Failure, *, prompt: str, answer: str) -> str | None:
    """Where in a body a failure has its cause. prompt, answer: a dialect's fields of what is read and is to follow."""
    if failure.place is not None:
        return failure.place
    if failure.code in _OF_PROMPT:
        return prompt
    return answer if failure.code == GrammarError.code else None


def worded(failure: Failure, *, answer: str) -> str:
    """A failure's text where errors have no field for a place: that of a schema begins with `answer`."""
    of_answer = failure.place is None and failure.code == GrammarError.code
    return f"{answer}: {failure.text}" if of_answer else failure.text


@contextmanager
def at(place: str) -> Iterator[None]:
    """Gives refusals of what is inside a place, where they have none."""
    try:
        yield
    except RequestError as error:
        error.place = error.place or place
        raise
