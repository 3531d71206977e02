"""A thought and the answer after it, over one sequence: what the first has read, the second does not read again.

The answer is a generation like any other, after the prompt, what of the thought stays, and what closes it, so its
tokens are those of a new engine that is given all that. Knows tokens, never text, and not why a thought ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.engine.constraint import Constraint
from headrace.engine.damped import DampedParams
from headrace.engine.sequence import Sequence
from headrace.engine.speculate import Speculate
from headrace.errors import ContextError
from headrace.values import SamplingParams, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


class Phased:
    """One sequence that thinks and then answers. Call `think`, `answer` and `close`, in this order.

    The thought is private: memory and disk keep the prompt alone for later prompts.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Tokens[int],
        cancel: Callable[[], bool],
        *,
        reuse: bool = True,
        head: int = 0,
    ) -> None:
        """cancel: ends both phases. reuse, head: see `Engine.generate`."""
        self._engine = engine
        self._prompt = list(prompt)
        self._cancel = cancel
        self._reuse = reuse
        self._head = head
        self._now = threading.Event()
        self._sequence: Sequence = engine.new_sequence()

    @property
    def cut(self) -> bool:
        """Whether an answer was asked for."""
        return self._now.is_set()

    def answer_now(self) -> None:
        """End the thought, within one step. Callable from any thread; nothing once the answer has begun."""
        self._now.set()

    def budget(self, thinking: SamplingParams, answer: SamplingParams, closing: int) -> int:
        """Most tokens of the thought: its own limit, and half of the room where the answer needs that much.

        closing: tokens between the two. Raises ContextError where there is no room for both.
        """
        room = self._engine.context - len(self._prompt) - closing
        if room < 2:
            raise ContextError(len(self._prompt) + closing + 2, self._engine.context)
        answered = min(answer.max_tokens or room, room // 2)
        return min(thinking.max_tokens or room, room - answered)

    def think(
        self,
        params: SamplingParams,
        max_tokens: int,
        *,
        speculate: Speculate = "off",
        damped: DampedParams | None = None,
    ) -> Generator[Token, None, None]:
        """The thought; ends at `max_tokens`, an end token, `answer_now` or a cancellation, or is closed before."""
        if self._reuse:
            self._engine.resume(self._sequence, self._prompt[:-1])
        return self._engine.generate(
            self._prompt,
            replace(params, max_tokens=max_tokens),
            cancel=lambda: self.cut or self._cancel(),
            sequence=self._sequence,
            speculate=speculate,
            damped=damped,
        )

    def answer(
        self,
        thought: Tokens[int],
        closing: Tokens[int],
        params: SamplingParams,
        *,
        constraint: Constraint | None = None,
        speculate: Speculate = "off",
        damped: DampedParams | None = None,
    ) -> Generator[Token, None, None]:
        """The answer after the prompt, what stays of the thought, and what closes it."""
        return self._engine.generate(
            [*self._prompt, *thought, *closing],
            params,
            cancel=self._cancel,
            sequence=self._sequence,
            constraint=constraint,
            speculate=speculate,
            damped=damped,
        )

    def close(self) -> None:
        """Keep what was read of the prompt, and free the sequence."""
        sequence = self._sequence
        sequence.rewind(min(len(sequence), len(self._prompt)))
        if self._reuse:
            self._engine.keep(sequence, len(self._prompt), self._head)
        sequence.release()
