"""A thought and the answer after it: what the first has read, the second does not read again.

Each is a generation like any other, and waits, runs and gives way like one; the answer goes on from what the thought
left under a key of their own. So its tokens are those of a new engine that is given prompt, what of the thought stays,
and what closes it. Knows tokens, never text, and not why a thought ends.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from headrace.engine.adapters import LoadedAdapter
from headrace.engine.generation import Asked
from headrace.engine.prefix_cache import Private
from headrace.engine.scheduler import Errand, Ticket
from headrace.engine.turns import Turns
from headrace.errors import ContextError
from headrace.values import GenerationStats, SamplingParams, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


class Phased:
    """Thinks and then answers, beside other generations. Call `think`, `answer` and `close`.

    The thought is private: memory and disk keep the prompt alone for later prompts.
    """

    def __init__(
        self,
        engine: Engine,
        turns: Turns,
        adapter: LoadedAdapter | None = None,
        *,
        reuse: bool = True,
        head: int = 0,
    ) -> None:
        """reuse, head: see `Asked`."""
        self.engine = engine
        self._turns = turns
        self._adapter = adapter
        self._reuse = reuse
        self._head = head
        self._prompt: list[int] = []
        self._key: bytes | None = b"private " + secrets.token_bytes(16)
        self._ticket: Ticket | None = None  # of the phase that runs, or ran last
        self._thinks = True
        self.cut = False  # an answer was asked for
        self._cancels = turns.cancels
        self._stopped = False

    def answer_now(self) -> None:
        """End the thought, within one step. Callable from any thread; nothing once the answer has begun."""
        self.cut = True
        if self._thinks and self._ticket is not None:
            self._ticket.cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether everything was cancelled since the thought began, or this. It ends both phases."""
        return self._stopped or self._turns.cancels != self._cancels

    def cancel(self) -> None:
        """End both phases, each within one step. Callable from any thread."""
        self._stopped = True
        if (ticket := self._ticket) is not None:
            ticket.cancelled = True

    def budget(
        self, prompt: Tokens[int], thinking: SamplingParams, answer: SamplingParams, closing: int
    ) -> int:
        """Most tokens of the thought: its own limit, and half of the room where the answer needs that much.

        closing: tokens between the two. Raises ContextError where there is no room for both.
        """
        room = self.engine.context - len(prompt) - closing
        if room < 2:
            raise ContextError(len(prompt), self.engine.context, closing + 2)
        answered = min(answer.max_tokens or room, room // 2)
        return min(thinking.max_tokens or room, room - answered)

    def think(
        self,
        prompt: Tokens[int],
        params: SamplingParams,
        max_tokens: int,
        **asked: Unpack[Asked],
    ) -> Iterator[Token]:
        """The thought; ends at `max_tokens`, an end token, `answer_now` or a cancellation, or is closed before."""
        self._prompt = list(prompt)
        self._cancels = self._turns.cancels
        self._begin(self._prompt, replace(params, max_tokens=max_tokens), asked)
        if self.cut:
            self.answer_now()
        if self._stopped:
            self.cancel()
        return self._tokens()

    def answer(
        self,
        thought: Tokens[int],
        closing: Tokens[int],
        params: SamplingParams,
        **asked: Unpack[Asked],
    ) -> Iterator[Token]:
        """The answer after the prompt, what stays of the thought, and what closes it."""
        stopped = self._ticket is not None and self._ticket.cancelled and not self.cut
        self._thinks = False
        self._begin([*self._prompt, *thought, *closing], params, asked)
        if (stopped or self.cancelled) and self._ticket is not None:  # a cancellation reaches both
            self._ticket.cancelled = True
        return self._tokens()

    def end(self) -> GenerationStats:
        """End the phase where it is: what it did."""
        assert self._ticket is not None
        wanted = self._ticket.cancelled
        self._turns.close(self._ticket)
        self._ticket.cancelled = wanted  # not by whoever has read enough
        assert self._ticket.stats is not None
        return self._ticket.stats

    @property
    def closed(self) -> bool:
        """Whether nothing can run any more."""
        return self._turns.closed

    def close(self) -> None:
        """End, and keep nothing but the prompt."""
        if self._ticket is not None:
            self._turns.close(self._ticket)
        key, self._key = self._key, None
        if key is not None and not self.closed:
            self._turns.run(partial(self.engine.prefixes.drop, key), 0)

    def __del__(self) -> None:
        """Waits for nothing: it may be collected anywhere."""
        key: bytes | None = getattr(self, "_key", None)  # not there where making this failed
        if key is None or self.closed:
            return
        if self._ticket is not None and not self._ticket.ended:
            self._turns.drop(self._ticket)
        self._turns.submit(Errand(partial(self.engine.prefixes.drop, key), 0))

    def _begin(self, prompt: list[int], params: SamplingParams, asked: Asked) -> None:
        assert self._key is not None, "it was closed"
        both: Asked = {
            **asked,
            "adapter": self._adapter,
            "head": self._head,
            "private": Private(self._key, len(self._prompt), self._reuse),
        }
        self._ticket = Ticket(self.engine.generation(prompt, params, **both))
        self._turns.submit(self._ticket)

    def _tokens(self) -> Iterator[Token]:
        assert self._ticket is not None
        while (token := self._turns.next(self._ticket)) is not None:
            yield token
