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
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence, Work
from headrace.errors import CancelledError
from headrace.values import ExpertStats, FinishReason, GenerationStats, SamplingParams, Token

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


class Generation:
    """The state of one generation: its sequence, its picker, its clock and its fingerprint."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        params: SamplingParams,
        cancel: Callable[[], bool],
        kept: Sequence | None,
        constraint: Constraint | None = None,
        *,
        reuse: bool,
        jump_forward: bool = True,
    ) -> None:
        """jump_forward: whether a span that a constraint forces is read in one pass, or a token a pass."""
        self._engine = engine
        self._kept = kept
        self._reuse = reuse and kept is None
        self._reused = 0
        self._prompt = prompt
        self._cancel = cancel
        room = engine.context - len(prompt)
        self._limit = min(params.max_tokens or room, room)
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._reported_seed = params.seed if params.greedy else self._seed
        vocab = engine.config.vocab_size
        self._sampler = Sampler(params, self._seed, vocab, engine.fraction_bits, engine.backend)
        self._sampler.observe(prompt)
        self._guide = Guide(constraint, vocab, engine.end_tokens)
        self._jump = jump_forward
        self._hash = hashlib.sha256()
        self._before = engine.saturations()
        self._experts_before = engine.expert_stats()
        self._times = [time.perf_counter()] * 2
        self._count = 0
        self._passes = 0

    def run(self) -> Generator[Token, None, None]:
        sequence = self._engine.new_sequence() if self._kept is None else self._kept
        reason: FinishReason = "cancelled"
        try:
            for token in self._tokens(sequence):
                self._count += 1
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
            held = len(sequence)
            if self._reuse:
                self._engine.keep(sequence, len(self._prompt))
            if self._kept is None:
                sequence.release()
            self._engine.stats = self._stats(reason, held)

    def _tokens(self, sequence: Sequence) -> Iterator[Token]:
        """Forced spans and picks in turns, until a cancellation or, without end tokens, the end of a grammar."""
        unread = self._sync(sequence)
        while not self._cancel():
            for token in self._guide.span(self._limit - self._count):
                self._sampler.note(token)
                yield Token(token, len(sequence) + len(unread))
                if not self._jump:
                    if self._read(sequence, unread) is None:
                        return
                    unread = []
                unread.append(token)
            if self._whole:
                return
            allowed = self._guide.allowed  # raises in a dead end, before anything more is read
            logits = self._read(sequence, unread)
            if logits is None:
                return
            token = self._pick(logits, len(sequence), allowed)
            yield Token(token, len(sequence))
            unread = [token]

    @property
    def _whole(self) -> bool:
        """Whether a grammar says that nothing can follow."""
        return self._guide.finished

    def _sync(self, sequence: Sequence) -> list[int]:
        """What is left to read: at least the last token, because its logits are wanted."""
        if self._reuse:
            self._engine.resume(sequence, self._prompt[:-1])
        unread = sequence.sync(self._prompt[:-1]) + self._prompt[-1:]
        self._reused = len(sequence)
        return unread

    def _read(self, sequence: Sequence, unread: list[int]) -> NDArray[np.int32] | None:
        """Read tokens, in chunks that a cancellation can stop: the logits after the last, None when cancelled."""
        for number, (part, more) in enumerate(self._engine.chunks(unread)):
            if number and self._cancel():
                return None
            try:
                rows = self._engine.forward([Work(sequence, part, more=more)], self._cancel)
            except CancelledError:
                return None
        if not self._passes:
            self._times[1] = time.perf_counter()
        self._passes += 1
        last: NDArray[np.int32] = rows[0]
        return last

    def _pick(
        self, logits: NDArray[np.int32], position: int, allowed: NDArray[np.bool_] | None
    ) -> int:
        self._hash.update(logits.data)
        token = self._sampler.pick(logits, position, allowed)
        self._guide.take(token)
        return token

    def _stats(self, reason: FinishReason, held: int) -> GenerationStats:
        """held: tokens that the sequence held at the end."""
        start, first = self._times
        now = time.perf_counter()
        if not self._passes:  # cancelled before the first token: all of it was prefill
            first = now
        after = self._engine.saturations()
        return GenerationStats(
            prompt_tokens=len(self._prompt),
            reused_tokens=self._reused,
            new_tokens=self._count,
            prefill_seconds=first - start,
            decode_seconds=now - first,
            unread_tokens=max(len(self._prompt) - held, 0),
            seed=self._reported_seed,
            fingerprint=self._hash.hexdigest()[:32],
            finish_reason=reason,
            saturations={k: v - self._before.get(k, 0) for k, v in after.items()},
            experts=_difference(self._engine.expert_stats(), self._experts_before),
            forced_tokens=self._guide.forced_tokens,
            forced_spans=self._guide.forced_spans,
            constraint_seconds=self._guide.seconds,
        )


def _difference(after: ExpertStats | None, before: ExpertStats | None) -> ExpertStats | None:
    if after is None or before is None:
        return None
    then = asdict(before)
    return ExpertStats(**{name: value - then[name] for name, value in asdict(after).items()})
