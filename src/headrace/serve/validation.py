"""JSON of a request's body as the typed values of a dialect, or a refusal that names the field.

Every wire type derives from `Wire`: unknown fields are refused, nothing is converted, and null is an unset field.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from headrace.serve.failure import RequestError

MAX_DEPTH = 200  # brackets of a body that may be open at a time

W = TypeVar("W", bound="Wire")


class Wire(BaseModel):
    """Base of all wire types. Declare optional fields as `X | None = None`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenWire(Wire):
    """A wire type whose unknown fields are kept, for the dialect to say which they were (`model_extra`)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


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
    if "\\u" in text and not _is_unicode(value):
        raise RequestError("the body has half of a surrogate pair, which is no character")
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    return value


def read(kind: type[W], value: dict[str, Any]) -> W:
    """A value as a wire type. Raises RequestError, which names the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    # Of a union's branches, the one that went furthest says what is wrong.
    found = max(error.errors(include_url=False, include_context=False), key=lambda e: len(e["loc"]))
    place = _place(found)
    if found["type"] == "extra_forbidden":
        return RequestError(f"unknown field {place}", code="unsupported_field", place=place)
    if found["type"] == "missing":
        return RequestError(f"{place} is missing", place=place)
    said = found["msg"].removeprefix("Value error, ")
    return RequestError(f"{place}: {said[:1].lower()}{said[1:]}"[:600], place=place)


def _place(found: ErrorDetails) -> str:
    """Where in the body: messages[0].content."""
    parts: list[str] = []
    for key in found["loc"]:
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif key.isidentifier() and key[0].islower() and "_wire" not in key:
            parts.append(f".{key}" if parts else key)
    return "".join(parts) or "the body"


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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return out


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.40} is out of the range of numbers")
    return number


def _is_unicode(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
