"""A thought and an answer as text. Joins text and the engine's two phases; owns when a thought is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import Literal, TypedDict, cast

from headrace.completion import Answer, Completion
from headrace.engine.phased import Phased
from headrace.errors import CancelledError, InputError
from headrace.options import GenerateOptions, How, check_names, split
from headrace.text.tokenizer import Tokenizer
from headrace.values import GenerationStats, SamplingParams

Phase = Literal["thinking", "answer"]
Ended = Literal["closed", "stop", "length", "answer_now", "cancelled"]

DEFAULT_END = "</think>"
_NOT_OF_A_THOUGHT = (
    "adapter",
    "schema",
    "regex",
    "grammar",
    "stop",
    "reuse",
    "shared_prefix_tokens",
)


@dataclass(frozen=True)
class Piece:
    """Some text of one phase."""

    phase: Phase
    text: str


@dataclass(frozen=True)
class Thought:
    """What came before an answer. `tokens` are what stays of it in front of the answer.

    ended: "closed" by its end marker, "stop" by an end token, "length" at its budget, by "answer_now", or "cancelled".
    """

    text: str
    tokens: tuple[int, ...]
    ended: Ended
    stats: GenerationStats = field(compare=False)


@dataclass(frozen=True)
class ThinkingPlan:
    """How to think and how to answer. opening, end and transition may spell control tokens.

    opening: begins the thought, behind the prompt. end: the text or control token that closes it. transition: what is
    read in front of the answer; it begins with `end`; None: `end` and an empty line. Raises InputError.
    """

    thinking: SamplingParams
    thinking_how: How
    answer: SamplingParams
    answer_how: How
    opening: str
    end: str
    transition: str

    def __post_init__(self) -> None:
        if not self.end:
            raise InputError("the end of a thought is empty")
        if not self.transition.startswith(self.end):
            raise InputError(f"the transition does not begin with the end, {self.end!r:.60}")


class PhaseOptions(TypedDict, total=False):
    """Keyword arguments of a thought. thinking: how to pick its tokens; the rest: see `ThinkingPlan`."""

    thinking: GenerateOptions
    opening: str
    end: str
    transition: str | None


class ThinkOptions(PhaseOptions, GenerateOptions, total=False):
    """And those of the answer."""


def answer_options(options: ThinkOptions) -> GenerateOptions:
    """Those of the answer alone. Raises SettingError for names that nothing has."""
    check_names(options, ThinkOptions)
    chosen = {k: v for k, v in options.items() if k not in PhaseOptions.__annotations__}
    return cast(GenerateOptions, chosen)


def thinking_plan(
    options: ThinkOptions, answer: SamplingParams, how: How, vocab_size: int
) -> ThinkingPlan:
    """Raises InputError for what only an answer can have, SettingError."""
    thinking = options.get("thinking", {})
    for name in _NOT_OF_A_THOUGHT:
        if thinking.get(name) is not None:
            raise InputError(f"a thought has no {name}")
    check_names(thinking, GenerateOptions, "of a thought")
    end, transition = options.get("end", DEFAULT_END), options.get("transition")
    after = f"{end}\n\n" if transition is None else transition
    return ThinkingPlan(
        *split(thinking, vocab_size), answer, how, options.get("opening", ""), end, after
    )


class Thinking(Iterator[Piece]):
    """A thought and an answer: iterate over the pieces of both, once. `thought` and `answer` are set as they end.

    Threads that share one get a piece each, in turn.
    """

    def __init__(self, run: ThinkingRun) -> None:
        self._run = run
        self._pieces = run.pieces()
        self._one = (
            threading.RLock()
        )  # asks for a piece, or ends it; a signal handler may do so within

    @property
    def prompt(self) -> tuple[int, ...]:
        """What is read in front of the thought."""
        return self._run.prompt

    @property
    def closing(self) -> tuple[int, ...]:
        """Tokens that were read between thought and answer."""
        return self._run.closing

    @property
    def thought(self) -> Thought | None:
        return self._run.thought

    @property
    def answer(self) -> Completion | None:
        return self._run.answer

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        with self._one:
            return next(self._pieces)

    def answer_now(self) -> None:
        """End the thought within one step, and answer from what there is. Callable from any thread."""
        self._run.phases.answer_now()

    def finish(self) -> Completion:
        """The answer, once both phases have ended. Raises CancelledError where it was closed before the answer."""
        for _ in self:
            pass
        if self.answer is None:
            raise CancelledError("it was closed before its answer began")
        return self.answer

    def close(self) -> None:
        """End where it is; returns once it has ended. From any thread, while another may wait for a piece."""
        if getgeneratorstate(self._pieces) == GEN_CLOSED:
            return
        self.cancel()  # first: who waits for a piece has the lock
        with self._one:
            # A signal handler may be here within the reader, which then ends it.
            if getgeneratorstate(self._pieces) != GEN_RUNNING:
                self._pieces.close()
                self._run.close()

    def cancel(self) -> None:
        """End both phases, each within one step; the pieces end by themselves. Callable from any thread."""
        self._run.phases.cancel()


class ThinkingRun:
    """What the pieces of a `Thinking` come from, and leave behind; holds neither."""

    def __init__(
        self,
        phases: Phased,
        tokenizer: Tokenizer,
        ids: list[int],
        plan: ThinkingPlan,
        ended: Callable[[Completion | None], None],
    ) -> None:
        """ids: the prompt. ended: is told what the answer is.

        Raises ContextError where there is no room for a thought and an answer, InputError for an end that is text and
        control token.
        """
        self.phases = phases
        self._tokenizer = tokenizer
        self._plan = plan
        self._tell = ended
        self.prompt = (*ids, *tokenizer.encode(plan.opening, allow_special=True))
        marker = tokenizer.encode(plan.end, allow_special=True)
        special = [token for token in marker if tokenizer.is_special(token)]
        if special and len(marker) > 1:
            raise InputError(f"the end {plan.end!r:.60} is neither text nor one control token")
        self._marker = special[0] if special else None
        transition = self._encoded(plan.transition)
        self._budget = phases.budget(self.prompt, plan.thinking, plan.answer, len(transition))
        self.closing: tuple[int, ...] = ()
        self.thought: Thought | None = None
        self.answer: Completion | None = None
        self._written: Answer | None = None  # of the answer

    def pieces(self) -> Generator[Piece, None, None]:
        self._tell(None)
        try:
            yield from self._think()
            if not self.phases.closed:
                yield from self._answer()
        except GeneratorExit:  # whoever closes this waits, or nobody does
            raise
        except BaseException:
            self.phases.close()
            raise
        self.phases.close()

    def close(self) -> None:
        self._complete()
        self.phases.close()

    def _think(self) -> Generator[Piece, None, None]:
        plan, how = self._plan, self._plan.thinking_how
        ends = () if self._marker is not None else (plan.end,)
        written = Answer(self._tokenizer, replace(plan.thinking, stop=ends), bool(plan.opening))
        tokens: list[int] = []
        ended: Ended = "length"
        steps = self.phases.think(
            self.prompt,
            plan.thinking,
            self._budget,
            speculate=how.get("speculate", "off"),
            damped=how.get("damped"),
        )
        for token in steps:
            if token.id == self._marker:
                ended = "closed"
                break
            if token.id in self.phases.engine.end_tokens:
                ended = "stop"
                continue  # it is the last
            tokens.append(token.id)
            if text := written.push(token.id):
                yield Piece("thinking", text)
            if written.stopped:
                ended = "closed"
                break
        stats = self.phases.end()
        if ended == "closed":
            stats = replace(stats, finish_reason="stop")
        elif stats.finish_reason == "cancelled" and ended == "length":
            asked = self.phases.cut and not self.phases.cancelled
            ended = "answer_now" if asked else "cancelled"
        if not self.phases.closed and (text := written.flush(cut=ended != "stop")):
            yield Piece("thinking", text)
        self.thought = Thought(written.completion(stats).text, tuple(tokens), ended, stats)
        self.closing = tuple(self._closing(tokens, written.stopped))

    def _closing(self, tokens: list[int], marked: bool) -> list[int]:
        """What is read behind a thought. marked: it holds its end marker already, as text."""
        if not marked:
            return self._encoded(self._plan.transition)
        said = self._tokenizer.decode(tokens, skip_special=False).partition(self._plan.end)[2]
        left = self._plan.transition.removeprefix(self._plan.end)
        return self._encoded(left.removeprefix(said))

    def _answer(self) -> Generator[Piece, None, None]:
        plan, how, grammar = self._plan, self._plan.answer_how, self._plan.answer_how.get("grammar")
        assert self.thought is not None
        written = Answer(self._tokenizer, plan.answer, True)
        steps = self.phases.answer(
            self.thought.tokens,
            self.closing,
            plan.answer,
            constraint=None if grammar is None else grammar.start(),
            speculate=how.get("speculate", "off"),
            damped=how.get("damped"),
        )
        self._written = written
        for token in steps:
            if text := written.push(token.id):
                yield Piece("answer", text)
            if written.stopped:
                break
        stats = self.phases.end()
        if not written.stopped and (text := written.flush(cut=stats.finish_reason != "stop")):
            yield Piece("answer", text)
        self._complete()

    def _complete(self) -> None:
        """Tell what the answer is, as far as it was written."""
        if self._written is not None and self.answer is None:
            self.answer = self._written.completion(self.phases.end())
            self._tell(self.answer)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, allow_special=True)
