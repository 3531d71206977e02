"""The one thread that moves every generation on: it steps the scheduler, reads tokens, and hands events to the loop.

What a client does not take stays where it is: a generation whose events pile up is not read, so it stands still after
a few tokens, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from headrace.engine.scheduler import Ticket
from headrace.engine.turns import Turns
from headrace.errors import HeadraceError
from headrace.serve.backend import Progress
from headrace.serve.events import Event, Failed, Finished, Reason, Started, Usage
from headrace.serve.failure import failure
from headrace.serve.model.admission import check_wait, closing, too_late
from headrace.serve.model.pace import Pace
from headrace.serve.model.reader import Reader

log = logging.getLogger(__name__)

MOST_EVENTS = 64  # that wait for a client


class Job:
    """A generation in hand: `Running` to the loop, a ticket to the worker.

    It is made in the loop; a thread that prepares gives it `ticket` and `reader`, then the worker has it.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, arrived: float, longest: float | None
    ) -> None:
        """arrived: of `time.monotonic`. longest: seconds from then to the first token; None: any."""
        self.arrived = arrived
        self.longest = longest
        self.ticket: Ticket | None = None
        self.reader: Reader | None = None
        self.by_window = False
        self.gone = False  # nobody waits for more
        left = None if longest is None else longest - (time.monotonic() - arrived)
        self.late = left is not None and left <= 0  # the first token did not come in time
        self.submitted = False
        self.began = False
        self.spoke = False  # a first token came
        self.new_tokens = 0
        self.ended = False  # for the worker
        self._loop = loop
        self._events: deque[Event] = deque()
        self._ready = asyncio.Event()
        self._over = False  # for the loop: nothing follows what is in the deque
        self._worker: Worker | None = None
        self._timer: asyncio.TimerHandle | None = None
        if left is not None and left > 0:
            self._timer = loop.call_later(left, self._expire)

    # ---- the loop's side --------------------------------------------------------------------------

    async def next(self) -> Event | None:
        """See `Running`."""
        while not (self._events or self._over or self.gone):
            self._ready.clear()
            await self._ready.wait()  # set from the loop, behind every event: none is missed
        if self.gone or not self._events:
            return None
        event = self._events.popleft()
        if len(self._events) == MOST_EVENTS // 2 and self._worker is not None:
            self._worker.wake()
        return event

    @property
    def progress(self) -> Progress:
        """See `Running`."""
        read = 0 if self.ticket is None else self.ticket.generation.read_tokens
        return Progress(read, self.new_tokens)

    def cancel(self) -> None:
        """See `Running`."""
        if self.gone:
            return
        self.gone = True
        self._stop_timer()
        self._ready.set()
        self.abandon()

    def _expire(self) -> None:
        if not self.spoke:
            self.late = True
            self.abandon()

    def _settle(self) -> None:
        self._stop_timer()
        self._ready.set()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ---- the worker's side ------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the client has enough to take."""
        return len(self._events) >= MOST_EVENTS

    def given_to(self, worker: Worker) -> None:
        """Who is told when there is room again."""
        self._worker = worker

    def abandon(self) -> None:
        """End the ticket within a layer. From any thread."""
        if self.ticket is not None:
            self.ticket.cancelled = True
        if self._worker is not None:
            self._worker.wake()

    def tell(self, *events: Event) -> None:
        """Hand events to the loop. From any thread."""
        self._events.extend(events)
        self._call(self._ready.set)

    def end(self, *events: Event) -> None:
        """The last events. From any thread."""
        self.ended = True
        self._events.extend(events)
        self._over = True
        self._call(self._settle)

    def fail(self, error: BaseException) -> None:
        """The last event is an error."""
        self.end(Failed(failure(error)))

    def _call(self, act: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop has ended: nobody is there
            self.gone = True
            self.abandon()


class Worker:
    """Runs jobs until it is closed."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._new: deque[Job] = deque()
        self._jobs: list[Job] = []
        self._wanted = threading.Event()
        self._stopping = False  # every job ends
        self._closed = False  # and no other comes
        self._stepped = 0.0  # when the newest pass began
        self.pace = Pace()
        self._thread = threading.Thread(target=self._run, name="headrace-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, job: Job) -> None:
        """A job with a ticket. From any thread."""
        job.given_to(self)
        self._new.append(job)
        self.wake()

    def wake(self) -> None:
        """Something changed. From any thread."""
        self._wanted.set()

    @property
    def counts(self) -> tuple[int, int]:
        """Jobs that run, and that wait in line."""
        jobs = [job for job in {*self._new, *self._jobs} if not job.ended]
        running = sum(job.began for job in jobs)
        return running, len(jobs) - running

    def stop(self) -> None:
        """End every job that is here or comes. From any thread."""
        self._stopping = True
        for job in [*self._new, *self._jobs]:
            job.abandon()
        self.wake()

    def close(self) -> None:
        """End every job, and the thread; nothing may be added any more. From any other thread."""
        self.stop()
        self._closed = True
        self.wake()
        self._thread.join()

    def _run(self) -> None:
        while not (self._closed and not self._jobs and not self._new):
            self._wanted.clear()
            try:
                idle = not self._pass()
            except BaseException as error:  # nobody may wait for a thread that is gone
                self._end_all(error)
                continue
            if idle and not (self._closed and not self._jobs):
                self._wanted.wait()

    def _pass(self) -> bool:
        """Take in who came, hand on what there is, and make a pass if somebody wants one; whether somebody did.

        Keeps hold of no job that has ended.
        """
        while self._new:
            self._take(self._new[0])  # it is in one of both all the time
            self._new.popleft()
        for job in self._jobs:
            if not job.ended:  # given up in the newest pass
                self._advance(job)
        self._jobs = [job for job in self._jobs if not job.ended]
        hungry = any(_hungry(job) for job in self._jobs)
        if hungry:
            self._step()
        return hungry

    def _end_all(self, error: BaseException) -> None:
        _report(error)
        while self._new:
            self._jobs.append(self._new.popleft())
        for job in self._jobs:
            self._give_up(job, error)
        self._jobs = []

    def _step(self) -> None:
        """A pass. An error that is nobody's own ends all that shared it: none of them may be trusted."""
        self._stepped = time.monotonic()
        try:
            self._turns.step(self._has_work)
        except Exception as error:
            _report(error)
            for job in self._blamed(error):
                self._give_up(job, error)

    def _blamed(self, error: Exception) -> list[Job]:
        """Who ends with an error of a pass: whose it is, else those that ran, else all."""
        tickets = [(job, job.ticket) for job in self._jobs if job.ticket is not None]
        own = [job for job, ticket in tickets if ticket.error is error]
        ran = [job for job, ticket in tickets if ticket.generation.began and not ticket.ended]
        return own or ran or list(self._jobs)

    def _has_work(self) -> bool:
        """Whether a pass that others make is no longer to be waited for."""
        return any(
            job.ticket is not None and not job.full and (job.ticket.tokens or job.ticket.over)
            for job in self._jobs
        )

    def _take(self, job: Job) -> None:
        assert job.ticket is not None
        self._jobs.append(job)
        self._turns.submit(job.ticket)
        job.submitted = True

    def _advance(self, job: Job) -> None:
        """Hand on what there is of one job. Its failure is its own."""
        try:
            self._read(job)
        except Exception as error:
            _report(error)
            self._give_up(job, error)

    def _give_up(self, job: Job, error: BaseException) -> None:
        """It ends with an error, whatever else goes wrong."""
        try:
            if job.ticket is not None and job.submitted:
                self._turns.close(job.ticket)
        except Exception as another:
            _report(another)
        finally:
            if not job.ended:
                job.fail(error)

    def _read(self, job: Job) -> None:
        ticket, reader = job.ticket, job.reader
        assert ticket is not None
        assert reader is not None
        if job.gone or job.late or self._stopping:
            ticket.cancelled = True
        if ticket.generation.began and not job.began:
            self._begin(job, ticket)
        while not job.full and not reader.over and (token := ticket.pop()) is not None:
            job.spoke = True
            job.new_tokens += 1
            for event in reader.push(token.id):
                job.tell(event)
        if reader.over or ticket.cancelled:
            self._turns.close(ticket)
        if ticket.over or reader.over:
            self._end(job, ticket, reader)

    def _begin(self, job: Job, ticket: Ticket) -> None:
        """Its turn came, with the newest pass; whether it can be in time shows now, by what no cache holds of it."""
        job.began = True
        prompt, reused = ticket.generation.prompt_tokens, ticket.generation.reused
        if not (ticket.tokens or ticket.ended):
            reading = self.pace.seconds(reused, prompt)
            check_wait(prompt - reused, reading, self._stepped - job.arrived, job.longest)
        job.tell(Started(prompt, reused, ticket.generation.from_disk))

    def _end(self, job: Job, ticket: Ticket, reader: Reader) -> None:
        ticket.close()
        if ticket.error is not None:
            raise ticket.error
        stats = ticket.stats
        assert stats is not None
        read = stats.reused_tokens + stats.read_tokens
        self.pace.learn(stats.reused_tokens, read, stats.prefill_seconds)
        if ticket.cancelled and not reader.over:
            self._unfinished(job)
            return
        cut = stats.finish_reason != "stop"
        events = list(reader.finish(cut=cut))
        usage = Usage(
            stats.prompt_tokens,
            stats.reused_tokens,
            stats.new_tokens,
            min(reader.reasoning_tokens, stats.new_tokens),
            stats.prefill_seconds,
            stats.decode_seconds,
        )
        job.end(*events, Finished(_reason(reader, cut, job.by_window), usage, reader.stop))

    def _unfinished(self, job: Job) -> None:
        """It was cancelled. Who is still there is told why."""
        if job.gone:
            job.end()
        elif job.late and job.longest is not None:
            raise too_late(job.longest)
        else:
            raise closing()


def _report(error: BaseException) -> None:
    """What is no error of the house has its cause in the log; clients are told its name alone."""
    if not isinstance(error, HeadraceError):
        log.error("a generation failed", exc_info=error)


def _hungry(job: Job) -> bool:
    """Whether a step of the scheduler could bring it something."""
    return job.ticket is not None and not job.ticket.over and not job.full


def _reason(reader: Reader, cut: bool, by_window: bool) -> Reason:
    if reader.stop is not None:
        return "stop_sequence"
    if cut and not reader.over:
        return "context" if by_window else "length"
    return "tool_calls" if reader.calls else "stop"
