"""One answer as pieces of text, while it is being generated beside others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from types import TracebackType

from headrace.completion import Answer, Completion
from headrace.engine.scheduler import Ticket
from headrace.engine.turns import Turns


class Stream(Generator[str, None, None]):
    """Pieces of text as they come. It begins with the first that is asked for, and holds nothing before.

    Several may be read at the same time, by as many threads or by one; they share passes. One whose pieces nobody
    takes stands still after some, and gives up its room to others that wait. Ends when it is exhausted or closed.
    Threads that share one get a piece each, in turn.
    """

    def __init__(
        self,
        turns: Turns,
        answer: Answer,
        begin: Callable[[], Ticket],
        ended: Callable[[Completion | None], None],
    ) -> None:
        """begin: hands the generation to `turns`; raises what is wrong with it. ended: is told what the answer is."""
        self._turns = turns
        self._answer = answer
        self._begin = begin
        self._tell = ended
        self._ticket: Ticket | None = None
        self._over = False
        self._one = (
            threading.RLock()
        )  # asks for a piece, or ends it; a signal handler may close it within
        self._cancelled = False
        self.completion: Completion | None = None  # once it has ended

    def send(self, value: None) -> str:
        with self._one:
            if self._over:
                raise StopIteration
            try:
                piece = self._piece()
            except BaseException:
                self.close()
                raise
            if not piece:
                raise StopIteration
            return piece

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> str:
        self.close()
        raise kind if isinstance(kind, BaseException) else kind(*([] if value is None else [value]))

    def close(self) -> None:
        """Stop generating; returns once it has ended. From any thread, while another may wait for a piece."""
        self.cancel()  # first: who waits for a piece has the lock
        with self._one:
            if self._over:
                return
            self._over = True
            if self._ticket is not None:
                self._turns.close(self._ticket)
            self._complete()

    def cancel(self) -> None:
        """Let it end, with what was taken so far; from any thread, while another may wait for a piece."""
        self._cancelled = True
        ticket: Ticket | None = getattr(self, "_ticket", None)
        if ticket is not None:
            ticket.cancelled = True

    def __del__(self) -> None:
        ticket: Ticket | None = getattr(self, "_ticket", None)
        if ticket is not None and not ticket.ended:
            self._turns.drop(ticket)

    def _piece(self) -> str:
        """The next piece; empty after the last."""
        ticket = self._started()
        while not self._answer.stopped and (token := self._turns.next(ticket)) is not None:
            if piece := self._answer.push(token.id):
                return piece
        if self._answer.stopped:
            self.close()
            return ""
        self._over = True
        cut = ticket.stats is not None and ticket.stats.finish_reason != "stop"
        piece = self._answer.flush(cut=cut)
        self._complete()
        return piece

    def _started(self) -> Ticket:
        if self._ticket is None:
            self._tell(None)
            self._ticket = self._begin()
            if self._cancelled:  # never back to false: another thread may set it here
                self._ticket.cancelled = True
            self._turns.submit(self._ticket)
        return self._ticket

    def _complete(self) -> None:
        """Tell what the answer is, and hold nothing of the model any longer."""
        if self._ticket is not None and self._ticket.stats is not None:
            self.completion = self._answer.completion(self._ticket.stats)
            self._tell(self.completion)
        del self._ticket, self._turns, self._begin, self._tell


def finished(stream: Stream) -> Completion:
    """What a stream says when it is read to its end."""
    try:
        for _ in stream:
            pass
    finally:
        stream.close()
    assert stream.completion is not None
    return stream.completion
