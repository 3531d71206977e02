"""Arguments of a call as a value, for the dialects that send objects where others send text."""

from __future__ import annotations

import json
import math
import sys

from headrace.serve.request import Json
from headrace.serve.validation import mended

_MAX_DIGITS = 300  # of a whole number; Python refuses thousands, and other parsers read doubles


def parsed(text: str) -> Json:
    """A JSON object as a value that every JSON parser reads back: finite numbers, no halves of characters."""
    value: Json = json.loads(text, parse_int=_whole, parse_float=_finite)
    return mended(value, text)


def readable(text: str) -> str:
    """The text of a JSON object for clients that parse it: itself, unless not every parser reads `parsed` from it."""
    value = parsed(text)
    try:
        same = json.loads(text) == value
    except ValueError:  # thousands of digits
        same = False
    return text if same else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MAX_DIGITS else _finite(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)
