"""Vocabularies, tools and models of text that the tests of tools share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

import tiny
from headrace.text.grammar import Grammar
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import formats
from headrace.text.tools.formats import Format
from headrace.text.tools.pieces import Piece
from headrace.text.tools.stream import StreamParser
from headrace.values import Tool

END = 258
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"], "additionalProperties": False}  # fmt: skip
WEATHER = Tool("weather", "Tells the weather.", CITY)
NOW = Tool("now", "Tells the time.", {"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)

TAGS = {row.name: (*row.tags, *formats.THINK, *formats.MISTRAL_THINK) for row in formats.FORMATS}


def reasoning(row: Format) -> Format:
    """The row of a model of the family that reasons."""
    pair = formats.MISTRAL_THINK if row.shape in ("list", "named") else formats.THINK
    return row if row.shape == "channels" else replace(row, think=pair)


def controlled(row: Format) -> Format:
    """The row where every tag is a control token."""
    return replace(row, controls=frozenset(row.tags))


ROWS = [r for row in formats.FORMATS for r in (reasoning(row), controlled(reasoning(row)))]


def row_name(row: Format) -> str:
    return f"{row.name}{'-control' * bool(row.controls)}"


def letters(controls: Iterable[str] = ()) -> Tokenizer:
    """Every byte is a token, and so is every control token."""
    source = json.loads(tiny.tokenizer_json())
    first = max(a["id"] for a in source["added_tokens"]) + 1
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    for index, name in enumerate(sorted(controls)):
        source["added_tokens"].append({"id": first + index, "content": name, **plain})
    return Tokenizer.from_json(json.dumps(source), eos=(END,))


def cut(row: Format, text: str) -> list[tuple[bool, str]]:
    """A text as control tokens (True) and what is between them."""
    out: list[tuple[bool, str]] = []
    while text:
        found = [(text.index(t), -len(t), t) for t in row.controls if t in text]
        at, _, tag = min(found, default=(len(text), 0, ""))
        out += [(False, text[:at])] * bool(at) + [(True, tag)] * bool(tag)
        text = text[at + len(tag) :]
    return out


def parsed(
    row: Format,
    text: str,
    tools: Sequence[Tool] = TOOLS,
    *,
    size: int = 10**9,
    was_cut: bool = False,
    reasoning_open: bool = False,
    json_answer: bool = False,
) -> list[Piece]:
    """The pieces of a text that comes in portions of a size."""
    parser = StreamParser(row, tools, reasoning_open=reasoning_open, json_answer=json_answer)
    out: list[Piece] = []
    for control, part in cut(row, text):
        if control:
            out += parser.control(part)
        else:
            for at in range(0, len(part), size):
                out += parser.push(part[at : at + size])
    return out + parser.finish(was_cut)


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the whole text satisfies the grammar, by masks alone."""
    walk = grammar.start()
    for token in tokenizer.encode(text, allow_special=True):
        if walk.ended or token not in allowed(walk.mask()):
            return False
        walk.advance(token)
    return walk.can_end


def written(
    grammar: Grammar, tokenizer: Tokenizer, seed: int, phrases: Sequence[str] = (), most: int = 600
) -> str | None:
    """What a model without sense writes within a grammar; None where it did not end. It likes to close what is open,
    and to write `phrases`, such as tags, wherever it may."""
    rng = random.Random(seed)
    walk = grammar.start()
    out: list[int] = []
    wanted: list[int] = []
    while not walk.ended and len(out) < most:
        choices = allowed(walk.mask())
        if END in choices and rng.random() < 0.2:
            break
        choices = [t for t in choices if t != END]
        if not choices:
            break
        if not wanted and phrases and rng.random() < 0.1:
            wanted = tokenizer.encode(rng.choice(phrases), allow_special=True)
        closing = [t for t in choices if tokenizer.token_bytes(t) in (b'"', b"}", b"]")]
        token = rng.choice(closing if closing and rng.random() < 0.5 else choices)
        if wanted and wanted[0] in choices:
            token, wanted = wanted[0], wanted[1:]
        else:
            wanted = []
        walk.advance(token)
        out.append(token)
    return tokenizer.decode(out, skip_special=False) if walk.can_end else None
