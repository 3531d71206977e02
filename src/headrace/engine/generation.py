"""One generation: what of a prompt has to be read, the tokens that follow, and what they cost."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.engine.constraint import Constraint, Guide
from headrace.engine.damped import DampedParams
from headrace.engine.pages import PagesExhaustedError
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence, Work
from headrace.engine.speculate import Speculation
from headrace.errors import CancelledError
from headrace.values import ExpertStats, FinishReason, GenerationStats, SamplingParams, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


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
        reuse: bool,
        jump_forward: bool = True,
        salt: bytes = b"",
    ) -> None:
        """jump_forward: whether a span that a constraint forces is read in one pass, or a token a pass. salt: of the
        adapter, where no sequence is given."""
        self._engine = engine
        self._sequence = engine.new_sequence(salt) if kept is None else kept
        self._kept = kept is not None
        self._reuse = reuse and kept is None
        self._reused = 0
        self._history = list(prompt)  # and what was generated
        self._prompt_tokens = len(prompt)
        self._unread: list[int] = []  # the end of it, due to be read
        self._drafts: list[int] = []  # read behind it in the last pass
        self._held: int | None = None  # positions of the sequence that are no drafts
        self._cancel = cancel
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
        self._before = engine.saturations()
        self._experts_before = engine.expert_stats()
        self._times = [time.perf_counter()] * 2
        self._passes = 0

    def run(self) -> Generator[Token, None, None]:
        reason: FinishReason = "cancelled"
        try:
            for token in self._tokens():
                yield token
                if token.id in self._engine.end_tokens:
                    reason = "stop"
                    break
                if self._count >= self._limit:
                    reason = "stop" if self._whole else "length"
                    break
            else:
                reason = "stop" if self._whole else "cancelled"
        finally:
            self._engine.stats = self._stats(reason, self._end())

    def _tokens(self) -> Iterator[Token]:
        """Until a cancellation or, without end tokens, the end of a grammar."""
        self._begin()
        if not self._stops():
            yield from self._forced()
        while not (self._whole or self._stops()):
            logits = self._pass()
            if logits is None:
                return
            yield from self.take(logits)

    def _stops(self) -> bool:
        """Whether the caller wants the end, now or once before."""
        self._stopped = self._stopped or self._cancel()
        return self._stopped

    def _begin(self) -> None:
        """Reuse what there is; at least the last token is left to read, because its logits are wanted."""
        prompt, sequence = self._history, self._sequence
        if self._reuse:
            self._engine.resume(sequence, prompt[:-1])
        self._unread = sequence.sync(prompt[:-1]) + prompt[-1:]
        self._reused = self._held = len(sequence)

    def work(self, *, draft: bool = True) -> Work:
        """What the next pass has to read: a part of what is due, or all of it with drafts behind.

        Raises ConstraintError in a dead end, before anything more is read.
        """
        _ = self._guide.allowed
        unread = self._unread
        if not self._jump:
            unread = unread[: max(1, self._prompt_tokens - len(self._sequence))]
        part, more = next(self._engine.chunks(unread))
        self._drafts = self._proposed() if draft and len(part) == len(self._unread) else []
        return Work(self._sequence, [*part, *self._drafts], more=more, wanted=1 + len(self._drafts))

    def _proposed(self) -> list[int]:
        """Drafts that may be read behind what is due: not with a prompt, and none that could not become a token."""
        if self._speculation is None or not self._passes:
            return []
        room = min(self._limit - self._count - 1, self._engine.draft_rows(len(self._unread)))
        return self._speculation.propose(self._history, room)

    def _pass(self) -> NDArray[np.int32] | None:
        """The wanted logits of the next pass; None when it was cancelled."""
        work = self.work()
        if self._speculation is not None:
            self._speculation.begin_pass()
        try:
            try:
                logits = self._engine.forward([work], self._cancel)
            except PagesExhaustedError:
                if not self._drafts:
                    raise
                work = self.work(draft=False)  # there is room for what is due
                logits = self._engine.forward([work], self._cancel)
        except CancelledError:
            return None
        if self._speculation is not None and self._passes:
            self._speculation.end_pass(len(self._unread), len(self._drafts))
        return logits

    def take(self, logits: NDArray[np.int32]) -> Iterator[Token]:
        """The tokens that follow from the logits of `work`, [wanted, vocab]; none while more is due.

        Each is picked when it is asked for. Another pass of the engine meanwhile overwrites the logits: drafts that
        were not compared by then are read again.
        """
        drafts, passes = self._drafts, self._engine.passes
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
            right += common
            del self._unread[:common]
            if self._speculation is not None:
                self._speculation.accepted += common
        self._sequence.rewind(start + right)
        self._drafts = []
        if self._speculation is not None and drafts:
            self._speculation.settle(len(drafts), right)

    def _end(self) -> int:
        """Take drafts back, keep and release what is there; tokens that the sequence held."""
        sequence = self._sequence
        if self._held is not None:
            sequence.rewind(self._held)
        held = len(sequence)
        if self._reuse:
            self._engine.keep(sequence, self._prompt_tokens)
        if not self._kept:
            sequence.release()
        return held

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

    def _pick(self, logits: NDArray[np.int32]) -> Token:
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

    def _stats(self, reason: FinishReason, held: int) -> GenerationStats:
        """held: tokens that the sequence held at the end."""
        start, first = self._times
        now = time.perf_counter()
        if not self._passes:  # cancelled before the first token: all of it was prefill
            first = now
        after = self._engine.saturations()
        drafts = self._speculation
        return GenerationStats(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused,
            new_tokens=self._count,
            prefill_seconds=first - start,
            decode_seconds=now - first,
            unread_tokens=max(self._prompt_tokens - held, 0),
            seed=self._reported_seed,
            fingerprint=self._hash.hexdigest()[:32],
            finish_reason=reason,
            saturations={k: v - self._before.get(k, 0) for k, v in after.items()},
            experts=_difference(self._engine.expert_stats(), self._experts_before),
            forced_tokens=self._guide.forced_tokens,
            forced_spans=self._guide.forced_spans,
            constraint_seconds=self._guide.seconds,
            drafted_tokens=0 if drafts is None else drafts.drafted,
            accepted_tokens=0 if drafts is None else drafts.accepted,
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
