"""Whole numbers of the command line: what is not whole is refused, where the parser would round it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from cyclopts import Parameter, Token


def _whole(kind: Any, tokens: Sequence[Token]) -> int:
    """Decimal digits with a sign. Raises ValueError, which the parser makes an error of the flag."""
    text = tokens[0].value
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _auto(kind: Any, tokens: Sequence[Token]) -> Literal["auto"] | int:
    return "auto" if tokens[0].value == "auto" else _whole(kind, tokens)


def _auto_or_off(kind: Any, tokens: Sequence[Token]) -> Literal["auto", "off"] | int:
    return "off" if tokens[0].value == "off" else _auto(kind, tokens)


WHOLE = Parameter(converter=_whole)
WHOLE_OR_AUTO = Parameter(converter=_auto)
WHOLE_AUTO_OR_OFF = Parameter(converter=_auto_or_off)
