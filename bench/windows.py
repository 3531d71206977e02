"""The text of the quality benchmark: English that every machine has, technical and legal.

Python's own documentation topics and this repository's licence. Other Python versions word a topic
differently, so rows carry a hash of the tokens.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from collections.abc import Callable

from bench.machine import ROOT

SIZE = 512
NUM_TECHNICAL = 5
NUM_LEGAL = 2
TOPICS = ("exceptions", "execmodel", "import", "class", "assignment", "numeric-types", "with")

Windows = list[list[int]]


def windows(encode: Callable[[str], list[int]]) -> Windows:
    """Seven windows of 512 tokens."""
    technical = "\n\n".join(pydoc_data.topics.topics[name] for name in TOPICS)
    legal = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return [*_cut(encode(technical), NUM_TECHNICAL), *_cut(encode(legal), NUM_LEGAL)]


def fingerprint(of: Windows) -> str:
    """Equal where the windows hold the same tokens."""
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]


def _cut(tokens: list[int], count: int) -> Windows:
    if len(tokens) < count * SIZE:
        raise ValueError(f"the text has {len(tokens)} tokens; {count * SIZE} are needed")
    return [tokens[i * SIZE : (i + 1) * SIZE] for i in range(count)]
