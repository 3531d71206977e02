"""Strict JSON for untrusted files: bounded size and depth, no duplicate keys, no NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from headrace.errors import FileError

MAX_BYTES = 256 << 20
MAX_DEPTH = 32


def parse_object(path: Path, place: str, raw: bytes, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in `raw`. Raises FileError that names the file, the place and the cause."""
    if len(raw) > max_bytes:
        raise FileError(path, place, f"{len(raw):,} bytes of JSON; at most {max_bytes:,} are read")
    if _depth(raw) > MAX_DEPTH:
        raise FileError(path, place, f"JSON nested deeper than {MAX_DEPTH}")
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise FileError(path, place, f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FileError(path, place, "not a JSON object")
    return value


def read_object(path: Path, place: str = "file") -> dict[str, Any]:
    """parse_object of a whole file."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise FileError(path, place, f"{size:,} bytes; at most {MAX_BYTES:,} are read")
        return parse_object(path, place, path.read_bytes())
    except OSError as error:
        raise FileError(path, place, error.strerror or str(error)) from None


def _depth(raw: bytes) -> int:
    """The deepest nesting of brackets outside strings."""
    depth = deepest = 0
    in_string = escaped = False
    for byte in raw:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        elif byte in b"]}":
            depth -= 1
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return out


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
