"""English text that every machine has: Python's own documentation topics, and the licence of this repository."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

WINDOW = 512
LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
TOPICS = ("exceptions", "assignment", "class", "import", "execmodel", "numeric-types")


def windows(tokenizer: object, count: int = 7) -> list[list[int]]:
    """`count` windows of 512 tokens of technical text and, as the last, legal text."""
    known = pydoc_data.topics.topics
    technical = "\n\n".join(known[t] for t in TOPICS if t in known)
    legal = LICENSE.read_text()
    out = []
    ids = tokenizer.encode(technical)  # type: ignore[attr-defined]
    for start in range(0, (count - 1) * WINDOW, WINDOW):
        out.append(ids[start : start + WINDOW])
    out.append(tokenizer.encode(legal)[:WINDOW])  # type: ignore[attr-defined]
    if any(len(w) != WINDOW for w in out):
        raise ValueError("there is too little text for the windows")
    return out
