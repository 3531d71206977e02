"""JSON of a request's body as the typed values of a dialect, or a refusal that names the field.

Every wire type derives from `Wire`: unknown fields are refused, nothing is converted, and null is an unset field, of a
field that nobody knows, and of one that is needed, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from headrace.serve.failure import INVALID, RequestError

MAX_DEPTH = 200  # brackets of a body that may be open at a time
MAX_VALUES = 1 << 17  # of a body's objects and arrays; each wrong one costs a kilobyte to say so
MAX_DIGITS = 4300  # of a whole number; reading more takes time that grows with their square
MAX_PLACE = 200  # characters of a place that is told
MAX_STOPS = 64  # stop strings of one request
MAX_STOP = 1000  # characters of each

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

W = TypeVar("W", bound="Wire")


class Wire(BaseModel):
    """Base of all wire types. Declare optional fields as `X | None = None`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        # Those of optional fields stay: the field is set, to nothing.
        if not isinstance(value, dict) or None not in value.values():
            return value
        fields = cls.model_fields.items()
        optional = {field.alias or name for name, field in fields if not field.is_required()}
        return {key: each for key, each in value.items() if each is not None or key in optional}


class OpenWire(Wire):
    """A wire type whose unknown fields are kept, for the dialect to say which they were (`model_extra`)."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


# The code of what is known and not offered, and of what is not known.
UNSUPPORTED = "unsupported_field"


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


@dataclass(frozen=True)
class Only:
    """Of a type: its one value that may be sent. A `Literal` won't do for numbers and booleans, as True == 1."""

    value: bool | float | str | tuple[()]
    why: str = ""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        told = handler(schema)
        if self.why:
            told["description"] = f"{self.why[0].upper()}{self.why[1:]}."
        if self.value == "":
            return told | {"maxLength": 0}
        if self.value == ():
            return told | {"maxProperties" if told.get("type") == "object" else "maxItems": 0}
        return told | {"const": self.value}

    def _check(self, value: Any) -> Any:
        if value == self.value or (self.value == () and not value):
            return value
        empty = self.value in ((), "")
        said = "has to be empty" if empty else f"only {json.dumps(self.value)} is supported"
        raise not_offered(f"{said}: {self.why}" if self.why else said)


def decoded(body: bytes) -> dict[str, Any]:
    """A body's JSON object. Raises RequestError for what is none, nested too deeply, or has a key twice."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_once,
            parse_constant=_constant,
            parse_float=_finite,
            parse_int=_whole,
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
    return mended(value, text, _once)


def read(kind: type[W], value: dict[str, Any]) -> W:
    """A value as a wire type. Raises RequestError, which names the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, value) from None


# Of kinds of errors whose own words are Python's.
_SAID = {
    "none_required": "has to be null",
    "dict_type": "input should be an object",
    "model_type": "input should be an object",
    "model_attributes_type": "input should be an object",
}


def _refusal(error: ValidationError, value: object) -> RequestError:
    # Of a union's branches, the one that went furthest says what is wrong.
    found = max(error.errors(include_url=False), key=lambda e: len(e["loc"]))
    place = _place(found, value)
    if found["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return _kind_refusal(found["ctx"], place)
    if found["type"] == "extra_forbidden":
        return RequestError(f"unknown field {place}", code=UNSUPPORTED, place=place)
    if found["type"] == "missing":
        return RequestError(f"{place} is missing", place=place)
    said = _SAID.get(found["type"]) or found["msg"].removeprefix("Value error, ")
    code = UNSUPPORTED if found["type"] == UNSUPPORTED else INVALID
    return RequestError(f"{place}: {said[:1].lower()}{said[1:]}"[:600], code=code, place=place)


def _kind_refusal(union: dict[str, Any], place: str) -> RequestError:
    """Of an object, one of several kinds, whose field that tells them apart is missing or has none of their names."""
    field = union["discriminator"].strip("'")
    place = f"{place}.{field}"
    kind = union.get("tag", "None")
    if kind == "None":  # as null is told; no kind is called so
        return RequestError(f"{place} is missing", place=place)
    said = f"{place}: {kind!r:.100} is none of {union['expected_tags']}"
    return RequestError(said[:600], place=place)


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
    return place[:MAX_PLACE] or "the body"


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
        raise RequestError("the body is not JSON: a key occurs twice in one object")
    return out


def mended(
    value: dict[str, Any],
    text: str,
    pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """What `text` was read as, with U+FFFD for escaped halves of characters, which are no Unicode.

    pairs: makes the objects, as of `json.loads`: keys that differed in such halves are one then.
    """
    if not _SURROGATE.search(text):
        return value
    units = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    whole: dict[str, Any] = json.loads(
        units.decode("utf-16-le", "replace"), object_pairs_hook=pairs
    )
    return whole


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS and (count := len(digits.removeprefix("-"))) > MAX_DIGITS:
        raise RequestError(
            f"a number of the body has {count:,} digits; at most {MAX_DIGITS:,} may be"
        )
    return int(digits)


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
