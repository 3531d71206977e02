"""One generation: what of a prompt has to be read, the tokens that follow, and what they cost."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Tokens
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from headrace.engine.constraint import Constraint, Guide
from headrace.engine.damped import DampedParams
from headrace.engine.pages import PagesExhaustedError, pages_for
from headrace.engine.prefix_cache import Private
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence, Work
from headrace.engine.speculate import Drafter, Speculate, Speculation
from headrace.errors import CancelledError
from headrace.kernels.program import SITES
from headrace.values import ExpertStats, FinishReason, GenerationStats, SamplingParams, Token

if TYPE_CHECKING:
    from headrace.engine.adapters import LoadedAdapter
    from headrace.engine.engine import Engine

Logits = NDArray[np.int32]
Clips = NDArray[np.int64]  # how many values were clipped, by site; or [rows, sites]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a generation was when it had handed out some of its tokens: what its statistics then say."""

    new_tokens: int
    digest: bytes  # of the logits of every pick so far
    held: int | None  # positions that a generation which ends here leaves behind; None before any
    forced: tuple[int, int, float]  # tokens, spans, seconds
    drafted: tuple[int, int]  # tokens, and those that were right
    clips: Clips


NO_CLIPS: Clips = np.zeros(len(SITES), np.int64)
NOTHING = Progress(  # taken of an answer
    0, hashlib.sha256().digest(), None, (0, 0, 0.0), (0, 0), NO_CLIPS
)


class Asked(TypedDict, total=False):
    """What a generation may be asked for. Nothing of it but adapter, constraint and damping changes a token.

    cancel: asked between passes, and between layers where these are long. sequence: one of the engine's, which stays
    the caller's, with an adapter of its own. adapter: one that is loaded. reuse: what the prefix cache holds of the
    prompt is not read again, and what was read is left there, also by a generation that was cancelled; False: neither.
    constraint: the tokens are those of its grammar, and where it cannot go on a ConstraintError ends the generation;
    jump_forward: what it forces is read in one pass. speculate: drafts that are read along, a number, or "auto" for as
    many as pay; drafter: in place of `Lookup`, or several in their order. damped: greedy decoding is damped by what it
    repeats. head: others begin with so many tokens of the prompt; they are kept as such. private:
    where others must not see all of it.
    """

    cancel: Callable[[], bool] | None
    sequence: Sequence | None
    adapter: LoadedAdapter | None
    reuse: bool
    constraint: Constraint | None
    jump_forward: bool
    speculate: Speculate
    drafter: Drafter | Tokens[Drafter] | None
    damped: DampedParams | None
    head: int
    private: Private | None


class Generation:
    """One generation as steps: `work` says what to read next, `take` what follows from the logits.

    Drafts are read behind the tokens that are due. They are no part of the state here: whatever is picked or forced is
    so by the tokens before it, and where it is the draft that was read, the next logits are there already. What no
    plain generation would have read is taken back.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        params: SamplingParams,
        cancel: Callable[[], bool],
        kept: Sequence | None,
        constraint: Constraint | None = None,
        speculation: Speculation | None = None,
        *,
        damped: DampedParams | None = None,
        head: int = 0,
        private: Private | None = None,
        reuse: bool,
        jump_forward: bool = True,
        salt: bytes = b"",
    ) -> None:
        """head: see `Engine.keep`. jump_forward: whether a span that a constraint forces is read in one pass, or a
        token a pass. salt: of the adapter, where no sequence is given."""
        self._engine = engine
        self._sequence = engine.new_sequence(salt) if kept is None else kept
        self._kept = kept is not None
        self._reuse = (reuse or private is not None) and kept is None
        self._private = private
        self._head = head
        self._reused = self._from_disk = 0
        self._history = list(prompt)  # and what was generated
        self._prompt_tokens = len(prompt)
        self._key = hash(tuple(prompt))
        self._unread: list[int] = []  # the end of it, due to be read
        self._drafts: list[int] = []  # read behind it in the last pass
        self._held: int | None = None  # positions of the sequence that are no drafts
        self.stops = cancel  # asked whether the caller wants the end
        self._stopped = False
        room = engine.context - len(prompt)
        self._limit = min(params.max_tokens or room, room)
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._reported_seed = params.seed if params.greedy else self._seed
        vocab = engine.config.vocab_size
        self._sampler = Sampler(
            params, self._seed, vocab, engine.fraction_bits, engine.backend, damped
        )
        self._sampler.observe(prompt)
        self._guide = Guide(constraint, vocab, engine.end_tokens)
        self._speculation = speculation
        self._jump = jump_forward
        self._hash = hashlib.sha256()
        self.began = False
        self._clips, self._row_clips = NO_CLIPS, NO_CLIPS[None]  # so far, and of the last pass
        self._experts_before: ExpertStats | None = None
        self._times = [time.perf_counter()] * 2
        self._passes = 0

    def run(self) -> Generator[Token, None, None]:
        """The generation alone; the engine's `stats` describe it once it has ended."""
        reason: FinishReason = "cancelled"
        steps = self.steps()
        try:
            with closing(steps):
                found = next(steps)
                while True:
                    if found is None:
                        found = steps.send(self.read())
                    else:
                        yield found
                        found = next(steps)
        except StopIteration as end:
            reason = end.value
        finally:
            self._engine.stats = self.finish(reason)

    def steps(self) -> Generator[Token | None, Logits | None, FinishReason]:
        """Tokens as they are picked, and None wherever a pass over `work` is needed: its wanted logits are sent in,
        [wanted, vocab], or None for a pass that was cancelled."""
        self.begin()
        if not self._stops() and (end := (yield from self._until_end(self._forced()))):
            return end
        while not (self._whole or self._stops()):
            logits = yield None
            if logits is None:
                return "cancelled"
            if end := (yield from self._until_end(self.take(logits))):
                return end
        return "stop" if self._whole else "cancelled"

    def _until_end(self, tokens: Iterator[Token]) -> Generator[Token, None, FinishReason | None]:
        """Hands tokens on; why the last was the last of the generation, if it was."""
        for token in tokens:
            yield token
            if token.id in self._engine.end_tokens:
                return "stop"
            if self._count >= self._limit:
                return "stop" if self._whole else "length"
        return None

    def _stops(self) -> bool:
        """Whether the caller wants the end, now or once before."""
        self._stopped = self._stopped or self.stops()
        return self._stopped

    def begin(self) -> None:
        """Reuse what there is; at least the last token is left to read, because its logits are wanted."""
        if not self.began:
            self._times = [time.perf_counter()] * 2
            self._experts_before = self._engine.expert_stats()
        known, sequence = self._history, self._sequence
        from_disk = 0
        if self._reuse:
            from_disk = self._engine.resume(sequence, known[:-1], self._private)
        self._unread = sequence.sync(known[:-1]) + known[-1:]
        self._held = len(sequence)
        if not self.began:
            self._reused, self._from_disk, self.began = self._held, from_disk, True

    def leave(self) -> None:
        """Give up the pages between passes; what was read stays for others, and `begin` goes on from there."""
        self.end()
        self._held = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._prompt_tokens

    @property
    def reused(self) -> int:
        """Tokens of the prompt that were not read again; once it began."""
        return self._reused

    @property
    def from_disk(self) -> int:
        """Of the tokens that were reused, those that the disk tier held and memory did not."""
        return self._from_disk

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompt that are behind it now, reused ones included."""
        return min(self._held or 0, self._prompt_tokens)

    @property
    def salt(self) -> bytes:
        """Of the adapter."""
        return self._sequence.salt

    @property
    def lasting(self) -> bool:
        """Whether its sequence is the caller's, and keeps its pages."""
        return self._kept

    @property
    def key(self) -> int:
        """Tells its prompt from others."""
        return self._key

    def page_list(self) -> list[int]:
        """Pages that it holds."""
        pages: list[int] = self._sequence.page_table().tolist()
        return pages

    @property
    def due(self) -> int:
        """Tokens to read before the next can be picked."""
        return len(self._unread)

    @property
    def reading(self) -> bool:
        """Whether nothing was picked yet."""
        return not self._passes

    @property
    def most_drafts(self) -> int:
        """Drafts that a pass in company may have behind what is due. What "auto" knows of times it knows of passes
        alone, so in company it drafts nothing."""
        if self._speculation is None or self.reading:
            return 0
        return self._speculation.fixed or 0

    @property
    def most_pages(self) -> int:
        """Pages that it may come to hold. Its last token is never read."""
        return pages_for(self._prompt_tokens + self._limit - 1)

    def work(self, rows: int | None = None, drafts: int | None = None) -> Work:
        """What the next pass has to read: a part of what is due, or all of it with drafts behind.

        rows: how much of what is due at most, by default what the engine's passes hold; drafts: how many at most.
        Raises ConstraintError in a dead end, before anything more is read.
        """
        _ = self._guide.allowed
        unread = self._unread
        self._sequence.rewind(len(self._history) - len(unread))  # of a pass that was interrupted
        if not self._jump:
            unread = unread[: max(1, self._prompt_tokens - len(self._sequence))]
        part, more = next(self._engine.chunks(unread, rows))
        self._drafts = self._proposed(drafts) if len(part) == len(self._unread) else []
        return Work(
            self._sequence,
            [*part, *self._drafts],
            more=more,
            wanted=0 if more else 1 + len(self._drafts),
            hidden=None if self._speculation is None else self._speculation.hidden,
        )

    def _proposed(self, most: int | None) -> list[int]:
        """Drafts that may be read behind what is due: not with a prompt, and none that could not become a token."""
        if self._speculation is None or self.reading or most == 0:
            return []
        room = min(self._limit - self._count - 1, self._engine.draft_rows(len(self._unread)))
        room = room if most is None else min(room, most)
        drafts = self._speculation.propose(self._history, room)
        permitted = self._guide.permitted(drafts)
        if len(permitted) < len(drafts):
            self._speculation.refuse()
        return permitted

    def read(self, rows: int | None = None) -> Logits | None:
        """The wanted logits of the next pass, alone in it; None when it was cancelled. rows: see `work`."""
        work = self.work(rows)
        if self._speculation is not None:
            self._speculation.begin_pass()
        try:
            try:
                logits = self._engine.forward([work], self.stops)
            except PagesExhaustedError:
                if not self._drafts:
                    raise
                work = self.work(rows, 0)  # there is room for what is due
                logits = self._engine.forward([work], self.stops)
        except CancelledError:
            return None
        if self._speculation is not None and self._passes:
            self._speculation.end_pass(len(self._unread), len(self._drafts))
        self._row_clips = self._engine.clips
        return logits

    def read_along(self, clips: Clips) -> None:
        """A pass over `work` had company: its time says nothing about drafts. clips: of the rows of `work`."""
        if self._speculation is not None:
            self._speculation.drafted += len(self._drafts)
        self._row_clips = clips

    def take(self, logits: Logits) -> Iterator[Token]:
        """The tokens that follow from the logits of `work`, [wanted, vocab]; none while more is due.

        Each is picked when it is asked for. Another pass of the engine meanwhile overwrites the logits: drafts that
        were not compared by then are read again.
        """
        drafts, passes, clips = self._drafts, self._engine.passes, self._row_clips
        due = len(clips) - len(drafts)
        self._clips = self._clips + clips[:due].sum(axis=0)
        self._held = start = len(self._sequence) - len(drafts)
        del self._unread[: start - (len(self._history) - len(self._unread))]
        if self._unread:
            return
        self._passes += 1
        if self._passes == 1:
            self._times[1] = time.perf_counter()
        right = 0  # drafts that are in the history
        while not self._unread:
            self._held = start + right
            yield self._pick(logits[right])
            if self._stops():
                break
            yield from self._forced()
            common = _common(self._unread, drafts[right:])
            if self._engine.passes != passes or self._whole:
                common = min(common, len(self._unread) - 1)
            self._clips = self._clips + clips[due + right : due + right + common].sum(axis=0)
            right += common
            del self._unread[:common]
            if self._speculation is not None:
                self._speculation.accepted += common
        self._sequence.rewind(start + right)
        self._drafts = []
        if self._speculation is not None and drafts:
            self._speculation.settle(len(drafts), right)

    def finish(self, reason: FinishReason) -> GenerationStats:
        """End here: the pages go to whom they belong."""
        self.end()
        return self.stats(reason, self.progress())

    def end(self) -> None:
        """Take drafts back, keep and release what is there."""
        sequence = self._sequence
        if self._speculation is not None:
            self._speculation.close()
        if self._held is not None:
            sequence.rewind(self._held)
        if self._reuse:
            self._engine.keep(sequence, self._prompt_tokens, self._head, self._private)
        if not self._kept:
            sequence.release()

    def progress(self) -> Progress:
        """Where it is now."""
        guide, drafts = self._guide, self._speculation
        return Progress(
            self._count,
            self._hash.digest(),
            self._held,
            (guide.forced_tokens, guide.forced_spans, guide.seconds),
            (0, 0) if drafts is None else (drafts.drafted, drafts.accepted),
            self._clips,
        )

    @property
    def _count(self) -> int:
        """Tokens that were generated."""
        return len(self._history) - self._prompt_tokens

    @property
    def _whole(self) -> bool:
        """Whether a grammar says that nothing can follow."""
        return self._guide.finished

    def _forced(self) -> Iterator[Token]:
        """The tokens that must come next."""
        for token in self._guide.span(self._limit - self._count):
            self._sampler.note(token)
            yield self._due(token)

    def _pick(self, logits: Logits) -> Token:
        """The next token by the logits after all of the history, [vocab]."""
        allowed = self._guide.allowed
        self._hash.update(logits.data)
        token = self._sampler.pick(logits, len(self._history), allowed)
        self._guide.take(token)
        return self._due(token)

    def _due(self, token: int) -> Token:
        found = Token(token, len(self._history))
        self._history.append(token)
        self._unread.append(token)
        return found

    def stats(self, reason: FinishReason, at: Progress) -> GenerationStats:
        """What it did, as one that ends `at` there."""
        start, first = self._times
        now = time.perf_counter()
        if not self._passes:  # cancelled before the first token: all of it was prefill
            first = now
        experts = self._engine.expert_stats() if self.began else None
        stats = GenerationStats(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused,
            disk_tokens=self._from_disk,
            new_tokens=0,
            prefill_seconds=first - start,
            decode_seconds=now - first,
            seed=self._reported_seed,
            fingerprint="",
            finish_reason=reason,
            experts=_difference(experts, self._experts_before),
        )
        return cut(stats, reason, at)


def cut(stats: GenerationStats, reason: FinishReason, at: Progress) -> GenerationStats:
    """The statistics of a generation as one that ended where it was `at`."""
    read = stats.prompt_tokens if at is NOTHING else at.held or 0
    return replace(
        stats,
        finish_reason=reason,
        new_tokens=at.new_tokens,
        unread_tokens=max(stats.prompt_tokens - read, 0),
        fingerprint=at.digest.hex()[:32],
        forced_tokens=at.forced[0],
        forced_spans=at.forced[1],
        constraint_seconds=at.forced[2],
        drafted_tokens=at.drafted[0],
        accepted_tokens=at.drafted[1],
        saturations=dict(zip(SITES, at.clips.tolist(), strict=True)),
    )


def _common(tokens: list[int], others: list[int]) -> int:
    """How many of them are equal from the beginning."""
    pairs = zip(tokens, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))


def _difference(after: ExpertStats | None, before: ExpertStats | None) -> ExpertStats | None:
    if after is None or before is None:
        return None
    then = asdict(before)
    return ExpertStats(**{name: value - then[name] for name, value in asdict(after).items()})
