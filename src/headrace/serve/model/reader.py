"""Tokens of one generation to events: text, stop strings, reasoning, calls. Knows no thread and no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headrace.serve.events import (
    CallDelta,
    CallEnded,
    CallStarted,
    Event,
    ReasoningDelta,
    TextDelta,
)
from headrace.serve.failure import RequestError
from headrace.serve.request import Request
from headrace.text.stop import StopStrings
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.formats import Format
from headrace.text.tools.pieces import (
    CallBegun,
    CallDone,
    CallPiece,
    Malformed,
    Piece,
    Reasoning,
    Said,
)
from headrace.text.tools.stream import StreamParser

INFERENCE = "inference_error"
MAX_SHOWN = 300  # characters of what cannot be read, in a message


class Reader:
    """What clients hear of the tokens of one generation.

    `over`: nothing more is wanted: a stop string was met (`stop`), or the only call that may be is complete.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: Format,
        request: Request,
        *,
        reasoning_open: bool,
        continues: bool,
        new_id: Callable[[int], str],
    ) -> None:
        """reasoning_open: the prompt ends within reasoning. continues: see `Tokenizer.stream`. new_id: of a call."""
        tools = () if request.choice.mode == "none" else request.tools
        self._tokenizer = tokenizer
        self._text = tokenizer.stream(continues=continues)
        self._parser = StreamParser(
            format,
            tools,
            reasoning_open=reasoning_open,
            json_answer=request.answer.kind != "text",
        )
        self._stops = StopStrings(request.stop)
        self._parallel = request.parallel_calls
        self._required = bool(tools) and request.choice.mode == "required"
        self._new_id = new_id
        self.reasoning_tokens = 0
        self.calls = 0  # that are complete
        self.over = False

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._stops.stopped

    def push(self, token: int) -> Iterator[Event]:
        """What a token tells. Raises RequestError for a call that cannot be one."""
        self.reasoning_tokens += self._parser.reasons
        if not self._tokenizer.is_special(token):
            yield from self._events(self._parser.push(self._text.push(token)))
        elif token not in self._tokenizer.eos:
            yield from self._events(self._parser.push(self._text.flush()))
            name = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
            yield from self._events(self._parser.control(name))
        if not self.over and self._stops.would_stop(self._parser.held):
            yield from self._said(self._stops.push(self._parser.held))
            self.over = True

    def finish(self, *, cut: bool) -> Iterator[Event]:
        """What is still held. cut: the model did not end here, so what it began is left out."""
        if not self.over:
            if not cut:
                yield from self._events(self._parser.push(self._text.flush()))
            pieces = self._parser.finish(cut=cut)
            if cut:  # a call that is none may have become one
                pieces = [piece for piece in pieces if not isinstance(piece, Malformed)]
            yield from self._events(pieces)
            yield from self._said(self._stops.flush())
        if self._required and not self.calls and not cut and not self.over:
            raise RequestError(
                "the model called no tool, though it had to", status=500, code=INFERENCE
            )

    def _events(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if self.over:
                return
            match piece:
                case Said(text):
                    yield from self._said(self._stops.push(text))
                    self.over = self.stop is not None
                case Reasoning(text):
                    yield ReasoningDelta(text)
                case CallBegun(index, name):
                    yield from self._said(self._stops.flush())
                    yield CallStarted(index, self._new_id(index), name)
                case CallPiece(index, fragment):
                    yield CallDelta(index, fragment)
                case CallDone(index, arguments):
                    self.calls += 1
                    self.over = not self._parallel
                    yield CallEnded(index, arguments)
                case Malformed(cause, text):
                    raise RequestError(
                        f"the model's tool call cannot be used: {cause}: {text[:MAX_SHOWN]!r}",
                        status=500,
                        code=INFERENCE,
                    )

    def _said(self, text: str) -> Iterator[Event]:
        if text:
            yield TextDelta(text)
