"""What bytes a token stands for. Owns the two byte alphabets of vocabularies; knows no encoding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UnsupportedError

SPACE = "\u2581"  # SentencePiece's visible space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse, Strip"

Lead = Literal["keep", "one", "all"]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's byte-level alphabet: printable bytes stand for themselves, the rest from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@dataclass(frozen=True)
class PieceRule:
    """How a vocabulary spells bytes.

    `lead` says which leading spaces of a whole text are not part of it: a dummy prefix of one space
    ("one"), all of the first token's ("all"), or none ("keep").
    """

    byte_level: bool
    byte_fallback: bool
    lead: Lead

    def decode(self, piece: str, alphabet: Mapping[str, int]) -> bytes:
        """Bytes of a piece of the vocabulary (not of an added token, whose text is literal)."""
        if self.byte_level:
            return _byte_level(piece, alphabet)
        byte = _BYTE.fullmatch(piece) if self.byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return piece.replace(SPACE, " ").encode()


def _byte_level(piece: str, alphabet: Mapping[str, int]) -> bytes:
    try:
        return bytes([alphabet[c] for c in piece])
    except KeyError:  # not spelled in the alphabet: literal text
        return piece.encode()


def piece_rule(decoder: bytes | None) -> PieceRule:
    """The rule that a tokenizer's decoder (its JSON) describes. UnsupportedError for any other."""
    steps = list(_steps(json.loads(decoder))) if decoder else []
    kinds = {str(s["type"]) for s in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "ByteFallback", "Fuse"}:
        return PieceRule(byte_level=True, byte_fallback=False, lead="keep")
    spaced = "Metaspace" in kinds or any(_is_space_replace(s) for s in steps)
    if not spaced or not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        found = ", ".join(sorted(kinds)) or "none"
        raise UnsupportedError(f"tokenizer decoder {found}; supported: {_SUPPORTED}")
    return PieceRule(byte_level=False, byte_fallback="ByteFallback" in kinds, lead=_lead(steps))


def _steps(decoder: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    if decoder.get("type") == "Sequence":
        nested = decoder.get("decoders")
        for step in nested if isinstance(nested, list) else []:
            yield from _steps(step)
    else:
        yield decoder


def _is_space_replace(step: Mapping[str, object]) -> bool:
    return (
        step["type"] == "Replace"
        and step.get("pattern") == {"String": SPACE}
        and step.get("content") == " "
    )


def _lead(steps: list[Mapping[str, object]]) -> Lead:
    for step in steps:
        if step["type"] == "Strip" and step.get("start"):
            return "one"
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return "all"
    return "keep"
