"""Strict JSON for untrusted files: bounded size, depth and count, no duplicate keys, no NaN."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from headrace.errors import FileError

MAX_BYTES = 32 << 20
MAX_DEPTH = 32
MAX_CONTAINERS = 1 << 20  # objects and arrays; each costs far more memory than its two bytes

# A string, closed or not: possessive, so that no text makes it go back.
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def parse_object(path: Path, place: str, raw: bytes, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in `raw`. Raises FileError that names the file, the place and the cause."""
    if len(raw) > max_bytes:
        raise FileError(path, place, f"{len(raw):,} bytes of JSON; at most {max_bytes:,} are read")
    depth, containers = _nesting(raw)
    if depth > MAX_DEPTH:
        raise FileError(path, place, f"JSON nested deeper than {MAX_DEPTH}")
    if containers > MAX_CONTAINERS:
        raise FileError(path, place, f"more than {MAX_CONTAINERS:,} objects and arrays")
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise FileError(path, place, f"not valid JSON: {error!s:.200}") from None
    if not isinstance(value, dict):
        raise FileError(path, place, "not a JSON object")
    return value


def read_object(path: Path, place: str = "file") -> dict[str, Any]:
    """parse_object of a whole file."""
    return parse_object(path, place, read_bytes(path, MAX_BYTES))


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """A whole small file. Raises FileError when it is no plain file or too large."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise FileError(path, "open", "is not a plain file")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise FileError(path, "open", error.strerror or str(error)) from None
    if len(raw) > max_bytes:
        raise FileError(path, "size", f"is more than {max_bytes:,} bytes")
    return raw


def _nesting(raw: bytes) -> tuple[int, int]:
    """The deepest nesting of brackets outside strings, and how many open; stops at a limit."""
    depth = deepest = containers = 0
    for bracket in _STRING.sub(b"", raw).translate(None, _NO_BRACKETS):
        if bracket in b"[{":
            depth += 1
            containers += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH or containers > MAX_CONTAINERS:
                break
        else:
            depth -= 1
    return deepest, containers


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {key!r:.120} occurs twice")
        out[key] = value
    return out


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
