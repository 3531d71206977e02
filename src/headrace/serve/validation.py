"""JSON of a request's body as the typed values of a dialect, or a refusal that names the field.

Every wire type derives from `Wire`: unknown fields are refused, nothing is converted, and null is an unset field, of a
field that nobody knows too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from headrace.serve.failure import INVALID, RequestError

MAX_DEPTH = 200  # brackets of a body that may be open at a time
MAX_VALUES = 1 << 17  # of a body's objects and arrays; each wrong one costs a kilobyte to say so
MAX_STOPS = 64  # stop strings of one request
MAX_STOP = 1000  # characters of each

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

W = TypeVar("W", bound="Wire")


class Wire(BaseModel):
    """Base of all wire types. Declare optional fields as `X | None = None`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {key: each for key, each in value.items() if each is not None or key in known}


class OpenWire(Wire):
    """A wire type whose unknown fields are kept, for the dialect to say which they were (`model_extra`)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


UNSUPPORTED = (
    "unsupported_field"  # the code of what is known and not offered, and of what is not known
)


def not_offered(said: str) -> PydanticCustomError:
    """What a validator raises for a value that is known and not offered here."""
    return PydanticCustomError(UNSUPPORTED, "{said}", {"said": said})


def _offered(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"].endswith("_type"):
            raise
        raise not_offered(first["msg"]) from None


# Of a field that has values elsewhere which it may not have here.
Offered = WrapValidator(_offered)


def decoded(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises RequestError for what is none, nested too deeply, or has a key twice."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_once, parse_constant=_constant, parse_float=_finite
        )
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error!s:.200}") from None
    if _too_deep(value):
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH}")
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    if _too_many(value):
        raise RequestError(
            f"the body has more than {MAX_VALUES:,} values", status=413, code="request_too_large"
        )
    return mended(value, text)


def read(kind: type[W], value: dict[str, Any]) -> W:
    """A value as a wire type. Raises RequestError, which names the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, value) from None


def _refusal(error: ValidationError, value: object) -> RequestError:
    # Of a union's branches, the one that went furthest says what is wrong.
    found = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
    place = _place(found, value)
    if found["type"] == "extra_forbidden":
        return RequestError(f"unknown field {place}", code=UNSUPPORTED, place=place)
    if found["type"] == "missing":
        return RequestError(f"{place} is missing", place=place)
    said = found["msg"].removeprefix("Value error, ")
    code = UNSUPPORTED if found["type"] == UNSUPPORTED else INVALID
    return RequestError(f"{place}: {said[:1].lower()}{said[1:]}"[:600], code=code, place=place)


def _place(found: ErrorDetails, value: object) -> str:
    """Where in the body: messages[0].content. Between keys stand names of a union's branches, which are no place."""
    place = ""
    loc, missing = found["loc"], found["type"] == "missing"
    for at, key in enumerate(loc):
        if isinstance(key, int):
            place += f"[{key}]"
            value = value[key] if isinstance(value, list) and key < len(value) else None
        elif isinstance(value, dict) and key in value and not _branch(loc[at:], value, missing):
            place += f".{key}" if place else key
            value = value[key]
        elif missing and at == len(loc) - 1:
            place += f".{key}" if place else key
    return place or "the body"


def _branch(rest: tuple[int | str, ...], value: dict[str, Any], missing: bool) -> bool:
    """Whether a key of an object is the name of a branch that happens to be one of its keys."""
    if len(rest) < 2 or isinstance(rest[1], int):
        return False
    return rest[1] in value or (
        missing and len(rest) == 2 and not isinstance(value[str(rest[0])], dict)
    )


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            below
            for node in level
            if isinstance(node, dict | list)
            for below in (node.values() if isinstance(node, dict) else node)
            if isinstance(below, dict | list)
        ]
        if not level:
            return False
    return True


def _too_many(value: dict[str, Any]) -> bool:
    left = MAX_VALUES
    stack: list[dict[str, Any] | list[Any]] = [value]
    while stack and left >= 0:
        node = stack.pop()
        left -= len(node)
        below = node.values() if isinstance(node, dict) else node
        stack += [each for each in below if isinstance(each, dict | list)]
    return left < 0


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return out


def mended(value: dict[str, Any], text: str) -> dict[str, Any]:
    """What `text` was read as, with U+FFFD for escaped halves of characters, which are no Unicode."""
    if not _SURROGATE.search(text):
        return value
    units = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    whole: dict[str, Any] = json.loads(units.decode("utf-16-le", "replace"))
    return whole


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits:.40} is out of range")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def check_stops(stops: Sequence[str]) -> None:
    """Whether a request's stop strings can be looked for at every token. Raises RequestError."""
    if len(stops) > MAX_STOPS:
        cause = f"there are {len(stops):,} stop strings; at most {MAX_STOPS} may be"
    elif (longest := max(map(len, stops), default=0)) > MAX_STOP:
        cause = f"a stop string has {longest:,} characters; at most {MAX_STOP:,} may be"
    else:
        return
    raise RequestError(cause, place="stop")
