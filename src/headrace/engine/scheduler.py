"""Runs generations beside each other: acts on what `schedule` decides, and hands on what follows.

Weights, and experts from disk, are read once for all rows of a pass; each generation ends in the tokens, logits and
keys and values that it has alone. Used by one thread at a time (`turns` lends it to many); only `submit`, `cancel` and
a ticket's flags may be touched meanwhile.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.engine.engine import Engine
from headrace.engine.generation import NOTHING, Generation, Logits, Progress, cut
from headrace.engine.pages import PagesExhaustedError
from headrace.engine.schedule import Claim, Holder, admit, share
from headrace.engine.sequence import Work
from headrace.errors import CancelledError, HeadraceError
from headrace.memory.governor import Governor
from headrace.values import FinishReason, GenerationStats, Token

AHEAD = 16  # tokens that a generation may be ahead of who takes them; then it stands still
SHELTERED = 8  # so few rows of a prompt stay in a pass to its end, whoever gives up: a retry finds them read
REMEMBERED = 64  # prompts whose readers gave up


@dataclass(eq=False)
class Ticket:
    """A generation in the hands of a scheduler. Its owner may set `cancelled` at any time, from any thread."""

    generation: Generation
    cancelled: bool = False
    arrival: int = 0
    pages: int = 0
    served: int = 0
    sheltered: bool = False  # its rows are few, so it stays to the end of the pass
    tokens: deque[tuple[Token, Progress]] = field(default_factory=deque)
    taken: Progress | None = None  # at the last token that was taken
    ended: bool = False
    stats: GenerationStats | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.generation.stops = lambda: self.cancelled and not self.sheltered
        self.pages = self.generation.most_pages
        self.steps = self.generation.steps()

    @property
    def paused(self) -> bool:
        """Whether it waits for somebody to take its tokens."""
        return len(self.tokens) >= AHEAD

    @property
    def over(self) -> bool:
        """Whether there is nothing more to take."""
        return self.ended and (self.cancelled or not self.tokens)

    def pop(self) -> Token | None:
        """The next token, if there is one."""
        if self.cancelled or not self.tokens:
            return None
        token, self.taken = self.tokens.popleft()
        return token

    def close(self) -> None:
        """Nothing more is taken: what it did is what was taken of it. After its end."""
        if self.tokens and self.stats is not None:
            self.tokens.clear()
            self.stats = cut(self.stats, "cancelled", self.taken or NOTHING)


@dataclass(eq=False)
class Errand:
    """Something else that needs the engine and some of its pages for itself."""

    act: Callable[[], Any]
    pages: int
    arrival: int = 0
    ended: bool = False
    result: Any = None
    error: BaseException | None = None
    cancelled: bool = False
    paused: bool = False


class Scheduler:
    """Generations in order of arrival, and the passes that they share."""

    def __init__(self, engine: Engine, governor: Governor | None = None) -> None:
        """governor: may resize the pool of experts whenever somebody comes while nothing runs."""
        self._engine = engine
        self._governor = governor
        self.woken: Callable[[], object] = lambda: None  # called when something ended within a step
        self._arrivals: deque[Ticket | Errand] = deque()
        self._waiting: list[Ticket | Errand] = []
        self._running: list[Ticket] = []
        self._live: dict[Ticket | Errand, None] = {}
        self._count = 0  # of arrivals
        self._passes = 0
        self._patience: OrderedDict[int, int] = (
            OrderedDict()
        )  # of a prompt, rows that were not too many

    def submit(self, what: Ticket | Errand) -> None:
        """Wait in line with it."""
        self._live[what] = None
        self._arrivals.append(what)

    def cancel(self) -> None:
        """End the generations that are here now, as soon as that is possible."""
        for what in tuple(self._live):
            what.cancelled |= isinstance(what, Ticket)

    def close(self) -> None:
        """End everything between passes."""
        for what in tuple(self._live):
            what.cancelled = True
        self.reap()

    def uses(self, salt: bytes) -> bool:
        """Whether a generation that runs or waits is of this salt."""
        return any(isinstance(w, Ticket) and w.generation.salt == salt for w in tuple(self._live))

    def step(self) -> None:
        """One pass at most, of those who may run and whose tokens are taken. Raises what is no HeadraceError; those go
        to whom they belong."""
        self.reap()
        self._admit()
        ready = [ticket for ticket in self._running if not ticket.paused]
        if ready:
            self._passes += 1
        if len(ready) == 1:
            self._alone(ready[0])
        elif ready:
            self._together(ready)

    def reap(self) -> None:
        """Take in who came, and let those go who were cancelled."""
        while self._arrivals:
            what = self._arrivals.popleft()
            self._count += 1
            what.arrival = self._count
            self._waiting.append(what)
        for what in [w for w in (*self._waiting, *self._running) if w.cancelled]:
            own = isinstance(what, Ticket)
            self._finish(what, "cancelled", None if own else CancelledError("it was cancelled"))

    # ---- who runs ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        asking = [what for what in self._waiting if not what.paused]
        if not asking:
            return
        if not self._running and self._governor is not None:
            self._governor.between_requests()
        holders = [Holder(t.pages, t.paused and not t.generation.lasting) for t in self._running]
        num_pages = self._num_pages()
        decision = admit([what.pages for what in asking], holders, num_pages)
        for ticket in [self._running[i] for i in decision.evicted]:
            ticket.generation.leave()
            self._running.remove(ticket)
            insort(self._waiting, ticket, key=lambda what: what.arrival)
        for what in asking[: decision.count]:
            self._begin(what)
        if not decision.count and all(t.paused for t in self._running):  # nobody would ever move
            cause = f"{asking[0].pages} KV pages are needed, {num_pages} can be had"
            self._finish(asking[0], "cancelled", PagesExhaustedError(cause))

    def _num_pages(self) -> int:
        """Pages that can be had if nobody ran: all but those that sequences of somebody else hold."""
        mine: Counter[int] = Counter()
        for ticket in self._running:
            mine.update(ticket.generation.page_list())
        pool = self._engine.pages
        return pool.num_pages - self._engine.prefixes.held_elsewhere(mine)

    def _begin(self, what: Ticket | Errand) -> None:
        self._waiting.remove(what)
        if isinstance(what, Ticket):
            self._running.append(what)
            what.served = self._passes
            if not what.generation.began:
                self._advance(what, None)
                return
            try:
                what.generation.begin()
            except HeadraceError as error:
                self._finish(what, "cancelled", error)
            return
        try:
            what.result = what.act()
        except BaseException as error:
            self._finish(what, "cancelled", error)
            _raise_foreign(error)
        else:
            self._finish(what, "stop")

    # ---- passes -----------------------------------------------------------------------------------

    def _alone(self, ticket: Ticket) -> None:
        """A pass that nobody shares costs what it costs without a scheduler."""
        generation = ticket.generation
        most = self._most(ticket)
        rows = min(generation.due, self._engine.chunk if most is None else most)
        ticket.served, ticket.sheltered = self._passes, rows <= SHELTERED
        try:
            logits = generation.read(rows)
        except HeadraceError as error:
            self._finish(ticket, "cancelled", error)
            return
        finally:
            ticket.sheltered = False
        if logits is None:
            self._remember(ticket, rows)
        self._advance(ticket, logits)

    def _together(self, ready: list[Ticket]) -> None:
        part: list[tuple[Ticket, Work]] = []
        for grant in share(
            [self._claim(t) for t in ready], self._engine.chunk, self._engine.logit_rows
        ):
            ticket = ready[grant.index]
            ticket.served = self._passes
            try:
                part.append((ticket, ticket.generation.work(grant.rows, grant.drafts)))
            except HeadraceError as error:
                self._finish(ticket, "cancelled", error)
        gone: set[int] = set()
        try:
            logits = self._engine.forward(
                [work for _, work in part], leaving=lambda: self._leaving(part, gone)
            )
        except CancelledError:
            logits = None
        except HeadraceError:  # whose it is shows when each runs alone
            for ticket, _ in part:
                if ticket in self._running:
                    self._alone(ticket)
            return
        self._hand_out(part, gone, logits)

    def _hand_out(
        self, part: list[tuple[Ticket, Work]], gone: set[int], logits: Logits | None
    ) -> None:
        at = row = 0
        for index, (ticket, work) in enumerate(part):
            if index in gone or logits is None:
                self._remember(ticket, _rows(work))
                self._finish(ticket, "cancelled")
                continue
            ticket.generation.read_along(self._engine.clips[row : row + len(work.tokens)])
            wanted = logits[at : at + work.wanted]
            at, row = at + work.wanted, row + len(work.tokens)
            self._advance(ticket, wanted)

    def _leaving(self, part: list[tuple[Ticket, Work]], gone: set[int]) -> set[int]:
        """Who of a pass was cancelled and leaves it; its owner need not wait for the end of the pass."""
        for index, (ticket, work) in enumerate(part):
            if ticket.cancelled and index not in gone and _rows(work) > SHELTERED:
                gone.add(index)
                self._settle(ticket, "cancelled", None)
        return gone

    def _claim(self, ticket: Ticket) -> Claim:
        g = ticket.generation
        return Claim(g.due, g.most_drafts, g.reading, ticket.served, self._most(ticket))

    def _advance(self, ticket: Ticket, logits: Logits | None) -> None:
        """Pick all tokens that follow; the generation ends, or needs another pass."""
        generation, steps = ticket.generation, ticket.steps
        try:
            found = steps.send(logits)
            while found is not None:
                ticket.tokens.append((found, generation.progress()))
                found = next(steps)
        except StopIteration as end:
            self._finish(ticket, end.value)
        except BaseException as error:
            self._finish(ticket, "cancelled", error)
            _raise_foreign(error)
        else:
            if not generation.reading:
                self._patience.pop(generation.key, None)

    # ---- ends -------------------------------------------------------------------------------------

    def _finish(
        self, what: Ticket | Errand, reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """It ends; its pages are others' again."""
        self._live.pop(what, None)
        runs = what in self._running
        if runs:
            self._running.remove(what)  # type: ignore[arg-type]
        elif what in self._waiting:
            self._waiting.remove(what)
        try:
            if isinstance(what, Ticket):
                what.steps.close()
                if runs:
                    what.generation.end()
                if not what.ended:
                    self._settle(what, reason, error)
        finally:
            what.error = what.error or error
            if isinstance(what, Ticket):
                what.generation.stops = _never  # they held each other
            what.ended = True
            self.woken()

    def _settle(self, ticket: Ticket, reason: FinishReason, error: BaseException | None) -> None:
        """What it did is told."""
        generation = ticket.generation
        stats = generation.stats(reason, generation.progress())
        if ticket.cancelled and not generation.reading:
            ticket.tokens.clear()
            stats = cut(stats, "cancelled", ticket.taken or NOTHING)
        ticket.stats, ticket.error = stats, error
        self._engine.stats = stats
        ticket.ended = True
        self.woken()

    # ---- prompts whose readers give up ------------------------------------------------------------

    def _remember(self, ticket: Ticket, rows: int) -> None:
        """A pass of so many rows of it was cancelled: the next one for this prompt is much shorter, until it ends."""
        self._patience[ticket.generation.key] = max(SHELTERED, rows // 8)
        self._patience.move_to_end(ticket.generation.key)
        while len(self._patience) > REMEMBERED:
            self._patience.popitem(last=False)

    def _most(self, ticket: Ticket) -> int | None:
        return self._patience.get(ticket.generation.key) if ticket.generation.reading else None


def _never() -> bool:
    return False


def _rows(work: Work) -> int:
    """Of a pass, without drafts."""
    return len(work.tokens) - max(0, work.wanted - 1)


def _raise_foreign(error: BaseException) -> None:
    """Raises what is no error of the house, once it was told to whom it belongs."""
    if not isinstance(error, HeadraceError):
        raise error
