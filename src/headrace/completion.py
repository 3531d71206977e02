"""A finished generation as text, and one that grows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headrace.text.stop import StopStrings
from headrace.text.tokenizer import Tokenizer
from headrace.values import FinishReason, GenerationStats, SamplingParams


@dataclass(frozen=True)
class Completion:
    """A finished generation. `tokens` are the ids that were picked, an end token included.

    The text of one that was cut, by a limit or a cancellation, is its longest prefix of whole characters: bytes of a
    character that was begun are left out, though their tokens are in `tokens`. As text it is its text. Two are equal
    when they say the same; `stats`, which hold times, are not compared.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats = field(compare=False)

    def __str__(self) -> str:
        return self.text


class Answer:
    """The text of one generation as it grows."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, continues: bool) -> None:
        self._stream = tokenizer.stream(continues=continues)
        self._stops = StopStrings(sampling.stop)
        self._text: list[str] = []
        self._tokens: list[int] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stops.stopped is not None

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._keep(self._stops.push(self._stream.push(token)))

    def flush(self, *, cut: bool) -> str:
        """What is still held. `cut`: the model did not end here, so a character that it began is left out."""
        text = self._stops.push("" if cut else self._stream.flush())
        return self._keep(text + ("" if self.stopped else self._stops.flush()))

    def _keep(self, piece: str) -> str:
        self._text.append(piece)
        return piece

    def completion(self, stats: GenerationStats) -> Completion:
        if self.stopped:
            stats = replace(stats, finish_reason="stop")
        return Completion("".join(self._text), tuple(self._tokens), stats.finish_reason, stats)
