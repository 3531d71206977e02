"""The engine: sequences of tokens in, integer logits and tokens out.

Owns the runner, the KV cache and the pages. Knows token ids, never text; tokens and logits are a function
of (artifact, token ids, sampling parameters, seed), whatever the chunking, the threads or the company.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ROPE_LOW
from headrace.artifact.container import Artifact
from headrace.artifact.forecast import read_forecast
from headrace.artifact.tensorfile import expect_pages, mappings
from headrace.engine.mixture import Mixture, check_cancelled
from headrace.engine.pages import PagePool, pages_for
from headrace.engine.sampler import Sampler
from headrace.engine.sequence import Sequence
from headrace.errors import CancelledError, ContextError, InputError
from headrace.experts.stream import ExpertStream, StreamOptions
from headrace.experts.trace import RouteHeader, RouteRecorder
from headrace.kernels.program import LOGIT_ROWS, Batch, ModelShape, Program, Route, Router
from headrace.kernels.select import native_module, select
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program
from headrace.models.families import family
from headrace.values import ExpertStats, FinishReason, GenerationStats, SamplingParams, Token

DEFAULT_CHUNK = 512  # rows of one pass; any other value gives the same logits


@dataclass(frozen=True)
class Work:
    """Tokens to read at the end of a sequence, and whether the logits of all or the last are wanted.

    more: further tokens of the same prompt follow in the next pass.
    """

    sequence: Sequence
    tokens: Tokens[int]
    all_logits: bool = False
    more: bool = False


class Engine:
    """One loaded model. Used by one thread at a time; `close` frees its threads and memory."""

    def __init__(
        self,
        artifact: Artifact,
        *,
        threads: int | None = None,
        kernels: str | None = None,
        max_context: int | None = None,
        num_sequences: int = 1,
        chunk: int = DEFAULT_CHUNK,
        logit_rows: int = LOGIT_ROWS,
        experts: StreamOptions | None = None,
        trace_routes: Path | None = None,
    ) -> None:
        """max_context: positions of one sequence, at most the model's own. experts: how those of a mixture are held
        in memory (None: all of them). trace_routes: a file for the recorder of routes. Raises InputError."""
        self.config = DecoderConfig.from_json(artifact.manifest.config)
        family(artifact.manifest.family).check(self.config)
        self.fraction_bits = artifact.manifest.fraction_bits
        self.context = self._context(max_context)
        self.end_tokens = frozenset(artifact.manifest.end_tokens)
        self._program = build_program(
            self.config,
            artifact.manifest.tensors,
            artifact.tensors,
            self.fraction_bits,
            {r.layer: r.layout for r in artifact.records},
            {i: Router(*stored) for i, stored in read_forecast(artifact).items()},
        )
        self._program = _within(self._program, self.context)
        self.backend = select(kernels, threads=threads)
        self._chunk = max(1, min(chunk, self.context))
        self._logit_rows = min(logit_rows, self._chunk)
        self._runner = self.backend.compile(
            self._program, capacity=self._chunk, logit_capacity=self._logit_rows
        )
        self._marks = _marks(self._program, self.backend.name)
        self._mapped = mappings(artifact.tensors.values())
        self._mixture = self._open_experts(artifact, experts, trace_routes)
        num_pages = pages_for(self.context) * num_sequences
        self._cache = _aligned_zeros(num_pages, self._program.shape.page_bytes)
        self._pool = PagePool(num_pages)
        self.stats: GenerationStats | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._runner.close()
        if self._mixture is not None:
            self._mixture.stream.close()

    def warm(self) -> None:
        """Begin to read what the first pass will need: dense weights, and experts into free slots. Returns at once."""
        expect_pages(self._mapped)
        if self._mixture is not None:
            self._mixture.stream.warm()

    @property
    def mixture(self) -> Mixture | None:
        """What runs the passes of a model with experts; None for a dense one."""
        return self._mixture

    @property
    def experts(self) -> ExpertStream | None:
        """The stream of experts; None for a dense model."""
        return None if self._mixture is None else self._mixture.stream

    def _open_experts(
        self, artifact: Artifact, options: StreamOptions | None, trace_routes: Path | None
    ) -> Mixture | None:
        records = artifact.records
        if not records:
            if trace_routes is not None:
                raise InputError("there are no routes to trace: the model has no experts")
            return None
        if options is None:
            total = sum(r.num_experts for r in records)
            options = StreamOptions(slots=total, max_slots=total)
        shape, recorder = self._program.shape, None
        if trace_routes is not None:
            header = RouteHeader(shape.num_layers, shape.num_experts, shape.top_k)
            recorder = RouteRecorder(trace_routes, header)
        stream = ExpertStream(
            records,
            shape.num_layers,
            shape.num_experts,
            options,
            native=None if self.backend.name == "reference" else native_module(),
            recorder=recorder,
        )
        return Mixture(self._program, self._runner, stream)

    @property
    def shape(self) -> ModelShape:
        return self._program.shape

    def new_sequence(self) -> Sequence:
        return Sequence(self._pool, self.context)

    def forward(
        self, work: Tokens[Work], cancel: Callable[[], bool] | None = None
    ) -> NDArray[np.int32]:
        """One pass over at most `chunk` tokens of any sequences: the wanted logits, [wanted, vocab].

        The result is a view that the next pass overwrites. cancel: asked between operations where a pass is slow;
        raises CancelledError then, and the sequences are as before.
        """
        for item in work:
            item.sequence.reserve(len(item.tokens))
        batch = _batch(work)
        self._check(batch)
        if self._mixture is None:
            for begin, end in pairwise((0, *self._marks)):
                check_cancelled(cancel if begin else None)
                self._runner.run(begin, end, batch, self._cache)
        else:
            last = not any(item.more for item in work)
            self._mixture.run(batch, self._cache, self._marks, admit=last, cancel=cancel)
        for item in work:
            item.sequence.commit(item.tokens)
        return self._runner.logits(len(batch.logit_rows))

    def read(self, sequence: Sequence, tokens: Tokens[int]) -> NDArray[np.int32]:
        """Read tokens in chunks; the logits after the last, [vocab] (a view)."""
        if not tokens:
            raise InputError("there are no tokens to read")
        for part, more in self._chunks(tokens):
            logits = self.forward([Work(sequence, part, more=more)])
        last: NDArray[np.int32] = logits[0]
        return last

    def logits(self, tokens: Tokens[int]) -> NDArray[np.int32]:
        """Logits after each token, i32[len, vocab], fixed point with `fraction_bits`."""
        self._fits(len(tokens))
        sequence = self.new_sequence()
        try:
            step = self._logit_rows
            parts = [
                self.forward([Work(sequence, tokens[at : at + step], True)]).copy()
                for at in range(0, len(tokens), step)
            ]
        finally:
            sequence.release()
        return np.concatenate(parts)

    def _chunks(self, tokens: Tokens[int]) -> Iterator[tuple[Tokens[int], bool]]:
        """Tokens in passes, each with whether more follow."""
        for at in range(0, len(tokens), self._chunk):
            yield tokens[at : at + self._chunk], at + self._chunk < len(tokens)

    def kv_bytes(self, sequence: Sequence) -> bytes:
        """Every byte that the cache holds of a sequence's whole tiles' positions, for comparison."""
        return self._cache[sequence.page_table()].tobytes()

    def saturations(self) -> dict[str, int]:
        """Clipped values since the engine was made, by site."""
        return dict(self._runner.saturations())

    def expert_stats(self) -> ExpertStats | None:
        """Since the engine was made; None for a dense model."""
        return None if self._mixture is None else self._mixture.stats()

    def generate(
        self,
        prompt: Tokens[int],
        sampling: SamplingParams,
        *,
        cancel: Callable[[], bool] | None = None,
        sequence: Sequence | None = None,
    ) -> Generator[Token, None, None]:
        """Generate after `prompt`. `stats` describes the generation once it has ended.

        The end token is yielded last. sequence: one of this engine's, which stays the caller's; the
        prefix that it shares with `prompt` is not read again, and the tokens and logits are those of a
        new sequence. Raises ContextError when the prompt does not fit, InputError
        when it is empty or holds an unknown token.
        """
        if not prompt:
            raise InputError("there are no tokens to read")
        self._fits(len(prompt) + 1)
        self._known(min(prompt), max(prompt))
        return _Generation(self, list(prompt), sampling, cancel or (lambda: False), sequence).run()

    def _fits(self, num_tokens: int) -> None:
        if num_tokens > self.context:
            raise ContextError(num_tokens, self.context)

    def _context(self, wanted: int | None) -> int:
        if wanted is None:
            return self.config.context
        if not 1 <= wanted <= self.config.context:
            raise InputError(
                f"a context of {wanted} is not possible; the model's is {self.config.context}"
            )
        return wanted

    def _check(self, batch: Batch) -> None:
        if len(batch.tokens) > self._chunk:
            raise InputError(f"a pass of {len(batch.tokens)} tokens is longer than {self._chunk}")
        if len(batch.logit_rows) > self._logit_rows:
            raise InputError(f"{len(batch.logit_rows)} rows of logits, room for {self._logit_rows}")
        self._known(int(batch.tokens.min()), int(batch.tokens.max()))

    def _known(self, low: int, high: int) -> None:
        """The smallest and the largest of some tokens are in the vocabulary."""
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"token {bad} is not in the vocabulary of {self.config.vocab_size}")


def _marks(program: Program, backend: str) -> tuple[int, ...]:
    """Where a run of a program may pause for a cancellation: its end, for the reference every operation.

    Never after a Route, where a pause means that experts are lacking.
    """
    size = len(program.ops)
    if backend != "reference":
        return (size,)
    return tuple(i for i in range(1, size + 1) if not isinstance(program.ops[i - 1], Route))


def _batch(work: Tokens[Work]) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    wanted: list[int] = []
    for index, item in enumerate(work):
        start, count = len(item.sequence), len(item.tokens)
        first = len(tokens)
        tokens += item.tokens
        positions += range(start, start + count)
        sequences += [index] * count
        wanted += range(first if item.all_logits else len(tokens) - 1, len(tokens))
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        sequences=np.array(sequences, np.int32),
        page_tables=tuple(item.sequence.page_table() for item in work),
        logit_rows=np.array(wanted, np.int32),
    )


class _Generation:
    """The state of one generation: its sequence, its picker, its clock and its fingerprint."""

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        params: SamplingParams,
        cancel: Callable[[], bool],
        kept: Sequence | None,
    ) -> None:
        self._engine = engine
        self._kept = kept
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
        self._hash = hashlib.sha256()
        self._before = engine.saturations()
        self._experts_before = engine.expert_stats()
        self._times = [time.perf_counter()] * 2
        self._count = 0

    def run(self) -> Generator[Token, None, None]:
        sequence = self._engine.new_sequence() if self._kept is None else self._kept
        reason: FinishReason = "cancelled"
        try:
            unread = self._sync(sequence)
            while not self._cancel():
                token = self._next(sequence, unread)
                if token is None:
                    break
                yield token
                if token.id in self._engine.end_tokens or self._count >= self._limit:
                    reason = "stop" if token.id in self._engine.end_tokens else "length"
                    break
                unread = [token.id]
        finally:
            held = len(sequence)
            if self._kept is None:
                sequence.release()
            self._engine.stats = self._stats(reason, held)

    def _sync(self, sequence: Sequence) -> list[int]:
        """What is left to read: at least the last token, because its logits are wanted."""
        last = self._prompt[-1:]
        unread = sequence.sync(self._prompt[:-1]) + last
        self._reused = len(sequence)
        return unread

    def _next(self, sequence: Sequence, unread: list[int]) -> Token | None:
        """Read what is unread, in chunks that a cancellation can stop, and pick."""
        for number, (part, more) in enumerate(self._engine._chunks(unread)):
            if number and self._cancel():
                return None
            try:
                logits = self._engine.forward([Work(sequence, part, more=more)], self._cancel)[0]
            except CancelledError:
                return None
        self._hash.update(logits.data)
        token = Token(self._sampler.pick(logits, len(sequence)), len(sequence))
        self._count += 1
        if self._count == 1:
            self._times[1] = time.perf_counter()
        return token

    def _stats(self, reason: FinishReason, held: int) -> GenerationStats:
        """held: tokens that the sequence held at the end."""
        start, first = self._times
        now = time.perf_counter()
        if not self._count:  # cancelled before the first token: all of it was prefill
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
        )


def _difference(after: ExpertStats | None, before: ExpertStats | None) -> ExpertStats | None:
    if after is None or before is None:
        return None
    then = asdict(before)
    return ExpertStats(**{name: value - then[name] for name, value in asdict(after).items()})


def _within(program: Program, context: int) -> Program:
    """The same program with rotary tables, and so with scratch memory, for a shorter context."""
    return replace(program, rope_high=program.rope_high[: -(-context // ROPE_LOW)])


def _aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """u8[rows, row_bytes] at a 64-byte boundary; untouched rows take no memory."""
    raw = np.zeros(rows * row_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * row_bytes].reshape(rows, row_bytes)
