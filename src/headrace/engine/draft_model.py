"""Drafts of a smaller model with the same vocabulary. It is never trusted: what it says changes no token.

Its sequence follows the history of a generation by rewinding, which is exact, so it reads every token once and its
own drafts not twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING

from headrace.engine.pages import PagesExhaustedError
from headrace.errors import HeadraceError, InputError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


class DraftModelError(InputError):
    """A draft model does not speak the model's tokens; says what differs."""

    code = "draft_model_mismatch"


class ModelDrafter:
    """Drafts greedily with an engine of its own, for one generation. See `speculate.Drafter`, `speculate.Closing`.

    Where the engine has no pages left, or the history is longer than its context, there are no drafts; where it fails,
    because a file of its model was changed, there are none any more, and a warning says so.
    """

    def __init__(self, engine: Engine) -> None:
        """engine: of the draft model; used by the generation's thread alone while the generation runs."""
        self._engine = engine
        self._sequence = engine.new_sequence()
        self._prompt_tokens = 0
        self._agreed = 0  # tokens of the history of the last call, which the sequence holds
        self._ahead: list[int] = []  # drafts that it holds behind them
        self._failed = False

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        """The last draft is not read, so it may be one beyond the context."""
        count = min(limit, self._engine.context - len(history) + 1)
        if count < 1 or self._failed:
            return []
        try:
            self._sync(history)
            return self._drafts(history, count)
        except PagesExhaustedError:
            self._forget()
        except HeadraceError as error:
            self._failed = True
            warnings.warn(f"the draft model is left out: {error}", RuntimeWarning, stacklevel=2)
        return []

    def close(self) -> None:
        """Leave what was read of the history to later generations."""
        if not self._failed:
            self._sequence.rewind(min(self._agreed, len(self._sequence)))
            self._engine.keep(self._sequence, self._prompt_tokens)
        self._forget()

    def _sync(self, history: Tokens[int]) -> None:
        """Rewind to what the sequence has in common with the history, all of it but a token at least."""
        if not len(self._sequence):
            self._prompt_tokens = len(history)
            self._engine.resume(self._sequence, history[:-1])
            self._agreed = len(self._sequence)
        pairs = zip(self._ahead, history[self._agreed :], strict=False)
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._ahead))
        self._sequence.rewind(min(self._agreed + right, len(history) - 1))

    def _drafts(self, history: Tokens[int], count: int) -> list[int]:
        drafts: list[int] = []
        unread = history[len(self._sequence) :]
        self._ahead = []
        for _ in range(count):
            logits = self._engine.read(self._sequence, unread)
            drafts.append(int(logits.argmax()))
            unread = drafts[-1:]
        self._agreed, self._ahead = len(history), drafts[:-1]
        return drafts

    def _forget(self) -> None:
        self._sequence.release()
        self._agreed, self._ahead = 0, []
