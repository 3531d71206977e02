"""Frozen values that floors hand to each other. Imports only errors; knows nothing of how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import SettingError

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "cancelled"]

UNIT = 65536  # sampling parameters are Q16 integers from here on
MIN_TEMPERATURE = 2.0**-20  # below it the likeliest token is picked


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: a JSON Schema of an object.

    strict: arguments follow the schema, which the grammar enforces; otherwise they are a JSON object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens from logits.

    `temperature` 0 is greedy, and so is one below 2^-20. `seed` None draws a real random one; 0 is a
    seed like any other. `top_k` 0, `top_p` 1, `min_p` 0, `presence_penalty` 0 and `repetition_penalty` 1 switch off.
    Raises SettingError when a value is out of range.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "max_tokens"):
            self._whole(name, optional=name != "top_k")
        self._within("temperature", 0.0, 100.0)
        self._within("top_p", 0.0, 1.0)
        self._within("min_p", 0.0, 1.0)
        self._within("presence_penalty", -100.0, 100.0)
        self._within("repetition_penalty", 0.01, 100.0)
        self._within("top_k", 0, 2**31 - 1)
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise SettingError(f"seed is {self.seed}; it must be between 0 and 2^64 - 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SettingError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if isinstance(self.stop, str) or not all(isinstance(s, str) for s in self.stop):
            raise SettingError(f"stop is {self.stop!r:.60}; it must be a sequence of texts")
        if any(not s for s in self.stop):
            raise SettingError("stop holds an empty string")

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingError(f"{name} is {value!r:.60}; it must be a number")
        if not low <= value <= high:  # also refuses NaN
            raise SettingError(f"{name} is {value}; it must be between {low} and {high}")

    def _whole(self, name: str, *, optional: bool) -> None:
        value = getattr(self, name)
        if type(value) is not int and not (optional and value is None):
            raise SettingError(f"{name} is {value!r:.60}; it must be a whole number")

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE


@dataclass(frozen=True)
class Token:
    """One generated token: its id and its absolute position in the sequence."""

    id: int
    position: int


@dataclass(frozen=True)
class ExpertStats:
    """What a generation did with a mixture's experts. Uses are counted once a layer and pass.

    reads: of experts, in time or not. guessed: experts that layers chose after a guess; guessed_right: of those,
    guessed. seconds_waited: that threads of the kernels spent on experts that were still being read, added up over the
    threads, so it reaches threads x time where all of them wait; of a sweep, the time of the one thread that waits
    for all. A thread that has nothing left to do in a layer while another waits is not counted.
    """

    uses: int
    reads: int
    bytes_read: int
    bytes_wasted: int  # read for a guess and never used
    seconds_waited: float
    guessed: int
    guessed_right: int

    @property
    def hit_rate(self) -> float:
        """Share of uses that nothing had to be read for."""
        return max(0.0, 1 - self.reads / self.uses) if self.uses else 1.0


@dataclass(frozen=True)
class GenerationStats:
    """What one generation did. Times in seconds; `fingerprint` hashes the logits of every pick.

    Of `prompt_tokens`, `reused_tokens` were in the KV cache already, or (`disk_tokens`) on disk, and were not read
    again, and `unread_tokens` were not reached before the generation was cancelled, or had no choice left.
    `prefill_seconds` end with the first token; `decode_seconds` are those of the other `decode_tokens`. `seed` is
    None where nothing was drawn and none was given. Of `new_tokens`, `forced_tokens` were the only ones that a
    grammar allowed: they were not picked, and each of the `forced_spans` was read in one pass. `constraint_seconds`
    went into following the grammar. `saturations` are clipped values of the rows of its own tokens, those of drafts
    that were wrong left out. `experts` counts what all passes did from its beginning to its end, and so also for
    generations that shared them. Of `drafted_tokens` that were read on suspicion, `accepted_tokens` were what
    followed; they differ where "auto" decides by the clock, and nothing else does.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    seed: int | None
    fingerprint: str
    finish_reason: FinishReason
    saturations: Mapping[str, int] = field(default_factory=dict)
    reused_tokens: int = 0
    disk_tokens: int = 0
    unread_tokens: int = 0
    experts: ExpertStats | None = None
    forced_tokens: int = 0
    forced_spans: int = 0
    constraint_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that were read rather than reused."""
        return self.prompt_tokens - self.reused_tokens - self.unread_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first, which prefill pays for."""
        return max(self.new_tokens - 1, 0)

    @property
    def prefill_rate(self) -> float:
        """Read tokens a second."""
        return self.read_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
