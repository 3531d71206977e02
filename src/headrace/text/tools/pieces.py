"""What a model's text turns out to be, a piece at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """Some reasoning, never empty."""

    text: str


@dataclass(frozen=True)
class Said:
    """Some of the answer, never empty."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The model calls a declared tool; index: 0, 1, … in its answer."""

    index: int
    name: str


@dataclass(frozen=True)
class CallPiece:
    """The next piece of a call's arguments as JSON text, never empty."""

    index: int
    fragment: str


@dataclass(frozen=True)
class CallDone:
    """A call is complete; arguments: all its pieces together, a JSON object."""

    index: int
    arguments: str


@dataclass(frozen=True)
class Malformed:
    """A call that is none: why, and its text with its tags. It may have begun; then it is never done."""

    cause: str
    text: str


Piece = Reasoning | Said | CallBegun | CallPiece | CallDone | Malformed
