"""What clients of a soak ask: requests whose text is always the same, in the words of no dialect."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

WORDS = ["river", "stone", "bread", "window", "garden", "winter", "letter", "music", "silver", "mountain", "paper",
         "market", "bridge", "candle", "forest", "engine", "harbour", "island", "kitchen", "ladder", "meadow"]  # fmt: skip
LONG_WORDS = 1200  # a token each, or more

Schema = dict[str, Any]
SHAPE: Schema = {
    "type": "object",
    "properties": {
        "size": {"enum": ["small", "large"]},
        "warm": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["size", "warm", "count"],
    "additionalProperties": False,
}
TOOL_NAME = "weather"
TOOL_ABOUT = "The weather of a city."
TOOL: Schema = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo", "Lima"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Question:
    """turns: role and text, the last one the user's. tool: one that has to be called. seed: of a sampled answer; None:
    greedy. raw: no chat template."""

    name: str
    turns: tuple[tuple[str, str], ...]
    limit: int
    system: str | None = None
    tool: bool = False
    schema: Schema | None = None
    stop: str | None = None
    seed: int | None = None
    raw: bool = False

    @property
    def text(self) -> str:
        return self.turns[-1][1]


def _user(text: str) -> tuple[tuple[str, str], ...]:
    return (("user", text),)


def long(number: int) -> Question:
    """A prompt that shares no token with another's beginning, where the chat template allows it."""
    dice = random.Random(f"long {number}")
    said = " ".join(dice.choice(WORDS) for _ in range(LONG_WORDS))
    return Question(f"long {number}", _user(f"{number}: {said}. Which words are these?"), 6)


SKY = Question("sky", _user("Why is the sky blue?"), 24)
TOLD = Question("told", _user("Tell a long story about a fox and a crow."), 160)
ENDLESS = Question(
    "endless",
    _user("Draw a long line of letters as JSON."),
    800,
    schema={
        "type": "object",
        "properties": {
            "line": {
                "type": "array",
                "items": {"enum": ["a", "b"]},
                "minItems": 250,
                "maxItems": 250,
            }
        },
        "required": ["line"],
        "additionalProperties": False,
    },
)
FIXED = (
    SKY,
    TOLD,
    Question("count", _user("Count from one to twenty in words."), 40, system="Answer briefly."),
    Question(
        "again",
        (("user", "Name a fruit."), ("assistant", "An apple."), ("user", "And another one?")),
        16,
        system="You are a gardener.",
    ),
    Question("stopped", _user("List three animals, one a line."), 48, stop="\n"),
    Question("shaped", _user("Describe a stone as JSON."), 60, schema=SHAPE),
    Question("called", _user("How is the weather in Oslo for two days?"), 80, tool=True),
    Question("drawn", _user("Write a line about rain."), 24, seed=7),
    Question("drawn anew", _user("Write a line about rain."), 24, seed=2**40 + 1),
    Question("raw", _user("Once upon a time"), 20, raw=True),
    Question("wide", _user("Übersetze: 水は青い 🌊 ваша река"), 20),
)
