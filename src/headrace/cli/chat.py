"""The interactive chat of `headrace run`: turns on a terminal. Knows no flags."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.cli import stats
from headrace.cli.answer import answer
from headrace.engine.speculate import DEFAULT_SPECULATE, Speculate
from headrace.errors import (
    CancelledError,
    ConstraintError,
    ContextError,
    InputError,
    PromptSizeError,
)
from headrace.llm import LLM
from headrace.values import Message, SamplingParams

if TYPE_CHECKING:
    from headrace.text.grammar import Grammar

PROMPT = ">>> "
CLEAR = "/clear"
WELCOME = "Control-C ends an answer, Control-D the chat; /clear starts over."


def chat(
    llm: LLM,
    facts: stats.RunFacts,
    system: str | None,
    sampling: SamplingParams,
    grammar: Grammar | None = None,
    speculate: Speculate = DEFAULT_SPECULATE,
    adapter: str | None = None,
) -> int:
    """Read and answer turns until the end of input; the exit code. grammar: what every answer has to be."""
    return _Chat(llm, facts, system, sampling, grammar, speculate, adapter).run()


class _Chat:
    def __init__(
        self,
        llm: LLM,
        facts: stats.RunFacts,
        system: str | None,
        sampling: SamplingParams,
        grammar: Grammar | None,
        speculate: Speculate,
        adapter: str | None,
    ) -> None:
        self._llm = llm
        self._facts = facts
        self._sampling = sampling
        self._grammar = grammar
        self._speculate = speculate
        self._adapter = adapter
        self._opening = [] if system is None else [Message("system", system)]
        self._messages = list(self._opening)
        self._editor = _editor()
        self._exit_code = 0

    def run(self) -> int:
        print(WELCOME, file=sys.stderr)
        while (line := self._ask()) is not None:
            if line.strip() == CLEAR:
                self._messages = list(self._opening)
            elif line.strip():
                self._turn(line)
        self._report()
        return self._exit_code

    def _ask(self) -> str | None:
        """A line; "" for one that Control-C threw away, None at the end of the chat."""
        try:
            return input(PROMPT)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            if self._editor is not None and self._editor.get_line_buffer():
                return ""
            self._exit_code = CancelledError.exit_code
            return None

    def _turn(self, line: str) -> None:
        asked = [*self._messages, Message("user", line)]
        try:
            ids = self._llm.chat_ids(asked)
            pieces = self._llm.stream_ids(
                ids,
                self._sampling,
                grammar=self._grammar,
                speculate=self._speculate,
                adapter=self._adapter,
            )
            answer(self._llm, pieces)
        except (ContextError, PromptSizeError) as error:
            print(f"error: {error.message}\nhint: {CLEAR} starts over", file=sys.stderr)
            return
        except (InputError, ConstraintError) as error:
            print(f"error: {error.message}", file=sys.stderr)
            return
        if self._llm.last is not None:
            self._messages = [*asked, Message("assistant", self._llm.last.text)]

    def _report(self) -> None:
        if self._llm.last is not None:
            print("\n".join(stats.lines(self._llm.last.stats, self._facts)), file=sys.stderr)


def _editor() -> Any | None:
    """Line editing and history for `input`, where Python was built with it."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        return import_module("readline")
    except ImportError:
        return None
