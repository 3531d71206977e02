"""The engine: sequences of tokens in, integer logits and tokens out.

Owns the runner, the KV cache and the pages. Knows token ids, never text; tokens and logits are a function
of (artifact, token ids, sampling parameters, seed), whatever the chunking, the threads or the company.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Tokens
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.adapter import Adapter
from headrace.artifact.container import Artifact, watch
from headrace.artifact.forecast import read_forecast
from headrace.artifact.tensorfile import load_pages, mappings
from headrace.engine.adapters import Adapters, History, LoadedAdapter
from headrace.engine.batch import (
    LAYER_ROWS,
    Cancel,
    Company,
    Leaving,
    aligned_zeros,
    check_rows,
    copy_page,
    hand_out,
    pauses,
    within_context,
)
from headrace.engine.blob import Binding, pack, unpack
from headrace.engine.constraint import Constraint
from headrace.engine.damped import DampedParams
from headrace.engine.generation import Asked, Generation
from headrace.engine.mixture import Mixture
from headrace.engine.pages import PAGE_TOKENS, PagePool, pages_for
from headrace.engine.prefix_cache import PrefixCache, Private
from headrace.engine.prefix_disk import PrefixDisk
from headrace.engine.prefix_tier import DiskTier
from headrace.engine.sequence import Sequence, Work
from headrace.engine.speculate import Drafter, Lookup, Speculate, Speculation, depth_of
from headrace.errors import CancelledError, ContextError, FileError, InputError
from headrace.experts.stream import ExpertStream, StreamOptions
from headrace.experts.trace import RouteHeader, RouteRecorder
from headrace.kernels.layout import page_positions
from headrace.kernels.program import LOGIT_ROWS, SITES, Batch, ModelShape, Router
from headrace.kernels.select import native_module, select
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program
from headrace.models.families import family
from headrace.values import ExpertStats, GenerationStats, SamplingParams, Token

DEFAULT_CHUNK = 512  # rows of one pass; any other value gives the same logits


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
        retained_contexts: int = 0,
        chunk: int = DEFAULT_CHUNK,
        logit_rows: int = LOGIT_ROWS,
        experts: StreamOptions | None = None,
        trace_routes: Path | None = None,
    ) -> None:
        """max_context: positions of one sequence, at most the model's own. num_sequences: how many of them may be full
        at a time; retained_contexts: further ones that hold prefixes alone. experts: how those of a mixture are held
        in memory (None: all of them). trace_routes: a file for the recorder of routes. Raises InputError."""
        self.identity = artifact.identity
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
        self._program = within_context(self._program, self.context)
        self.backend = select(kernels, threads=threads)
        self._chunk = max(1, min(chunk, self.context))
        self._rows = self._chunk  # of the next pass of a prompt
        self._logit_rows = min(logit_rows, self._chunk)
        self._runner = self.backend.compile(
            self._program, capacity=self._chunk, logit_capacity=self._logit_rows
        )
        self.adapters = Adapters(self._runner, artifact.identity)
        self._path = artifact.path
        self._watch = watch(artifact)
        self._mixture: Mixture | None = None
        self._disk: DiskTier | None = None
        self.passes = 0  # that were begun: each may overwrite the logits of the one before
        self.clips = np.zeros((0, len(SITES)), np.int64)  # of every row of the last pass, by site
        self.stats: GenerationStats | None = None
        try:
            self._marks = pauses(self._program, self.backend.name)
            self._mapped = mappings(artifact.tensors.values())
            self._mixture = self._open_experts(artifact, experts, trace_routes)
            num_pages = pages_for(self.context) * (num_sequences + retained_contexts)
            self._cache = aligned_zeros(num_pages, self._program.shape.page_bytes)
            self._pool = PagePool(num_pages, partial(copy_page, self._cache))
            self.prefixes = PrefixCache(self._pool)
        except BaseException:
            self.close()  # whoever keeps the error keeps this object
            raise

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
        self._watch.close()
        if hasattr(self, "_pool"):  # not where making this failed
            self._pool.keeper = None  # they hold each other, and the cache's memory
        if self._disk is not None:
            self._disk.close()
        if self._mixture is not None:
            self._mixture.stream.close()

    def warm(self) -> None:
        """Read the dense weights, and begin to read experts into the free slots."""
        if self._mixture is not None:
            self._mixture.stream.warm()
        load_pages(self._mapped)

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
        try:
            stream = ExpertStream(
                records,
                shape.num_layers,
                shape.num_experts,
                options,
                native=None if self.backend.name == "reference" else native_module(),
                recorder=recorder,
            )
        except BaseException:
            if recorder is not None:
                recorder.close()
            raise
        try:
            return Mixture(self._program, self._runner, stream)
        except BaseException:
            stream.close()
            raise

    @property
    def shape(self) -> ModelShape:
        return self._program.shape

    @property
    def chunk(self) -> int:
        """Rows of a pass at most."""
        return self._chunk

    @property
    def logit_rows(self) -> int:
        """Rows of a pass that may want logits at most."""
        return self._logit_rows

    @property
    def pages(self) -> PagePool:
        """Who owns the pages of the KV cache."""
        return self._pool

    def load_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Make an adapter of this model usable: its `salt` is that of sequences under it. Raises InputError."""
        return self.adapters.load(adapter)

    def unload_adapter(self, adapter: LoadedAdapter) -> None:
        """Free an adapter; what `prefixes` holds under it stays right for when it is loaded again."""
        self.adapters.unload(adapter)

    def new_sequence(self, salt: bytes | History = b"") -> Sequence:
        """An empty sequence. salt: see `Sequence`."""
        return Sequence(self._pool, self.context, salt)

    def forward(
        self, work: Tokens[Work], cancel: Cancel | None = None, leaving: Leaving | None = None
    ) -> NDArray[np.int32]:
        """One pass over at most `chunk` tokens of any sequences: the wanted logits, [wanted, vocab].

        The result is a view that the next pass overwrites. cancel: asked between layers where a pass is long;
        raises CancelledError then, and the sequences are as before. leaving: asked there which of `work`, by index,
        leave the pass: their sequences are as before and have no logits; CancelledError where they are all. So the
        sequences are when FileError is raised: a file of the model was changed, and what was computed from it is no
        answer.
        """
        self.passes += 1
        company = Company(work, self._runner, self._program.marks, self.adapters, cancel, leaving)
        try:
            self._reserve(work)
            batch = company.begin()
            check_rows(batch, self._chunk, self._logit_rows)
            self._known(int(batch.tokens.min()), int(batch.tokens.max()))
            hidden = self._run_watched(batch, company)
        except BaseException as error:
            for item in work:
                item.sequence.trim()
            # Drafts do not count.
            rows = sum(len(item.tokens) - max(0, item.wanted - 1) for item in work)
            if isinstance(error, CancelledError) and rows > 1:
                self._rows = rows // 2  # which may end before the next cancellation
            raise
        self._rows = self._chunk
        self.clips = company.clips()
        hand_out(company.work, hidden)
        wanted = 0
        for item in company.work:
            item.sequence.commit(item.tokens)
            wanted += len(item.tokens) if item.all_logits else item.wanted
        return self._runner.logits(wanted)

    def _run_watched(self, batch: Batch, company: Company) -> NDArray[np.int32] | None:
        """A pass over weights that are what they were when the model was opened. Raises FileError."""
        if self._watch.changed() and self._watch.verify() and self._mixture is not None:
            self._mixture.stream.forget()
        hidden = self._run(batch, company)
        if self._watch.changed() and self._watch.verify():
            raise FileError(self._path, "weights", "were written to during a pass")
        return hidden

    def _reserve(self, work: Tokens[Work]) -> None:
        for item in work:
            item.sequence.reserve(len(item.tokens))

    def _run(self, batch: Batch, company: Company) -> NDArray[np.int32] | None:
        """A pass; where work wants them, what its rows are behind the last layer, i32[rows, hidden]."""
        short = len(batch.tokens) <= LAYER_ROWS and self.backend.name != "reference"
        marks = self._marks[-1:] if short or not company.asks else self._marks
        size, last = len(self._program.ops), self._program.marks[-1]
        states = any(item.hidden is not None for item in company.work)
        if states or not len(batch.logit_rows):  # what is behind the layers is for logits alone
            marks = (*(mark for mark in marks if mark < last), last)
        if self._mixture is not None:
            more = any(item.more for item in company.work)
            self._mixture.run(batch, self._cache, marks, admit=not more, company=company)
        else:
            for begin, end in pairwise((0, *marks)):
                batch = company.pause(begin) if begin else batch
                self._runner.run(begin, end, batch, self._cache)
        if not states:
            return None
        batch = company.batch
        hidden = self._runner.residual(len(batch.tokens)).copy()
        if len(batch.logit_rows):
            self._runner.run(last, size, batch, self._cache)
        return hidden

    def read(self, sequence: Sequence, tokens: Tokens[int]) -> NDArray[np.int32]:
        """Read tokens in chunks; the logits after the last, [vocab] (a view)."""
        if not tokens:
            raise InputError("there are no tokens to read")
        for part, more in self.chunks(tokens):
            logits = self.forward([Work(sequence, part, more=more, wanted=int(not more))])
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

    def chunks(
        self, tokens: Tokens[int], rows: int | None = None
    ) -> Iterator[tuple[Tokens[int], bool]]:
        """Tokens in passes, of `rows` where given, each with whether more follow."""
        at = 0
        while at < len(tokens):
            end = at + (rows or self._rows)
            yield tokens[at:end], end < len(tokens)
            at = end

    def draft_rows(self, due: int) -> int:
        """How many drafts a pass has room for behind `due` tokens."""
        return min(self._chunk - due, self._logit_rows - 1)

    def kv_bytes(self, sequence: Sequence) -> bytes:
        """The pages of a sequence with zeros in place of what is none of its positions, for comparison."""
        return self._held(sequence).tobytes()

    def _held(self, sequence: Sequence) -> NDArray[np.uint8]:
        """A copy of a sequence's pages, u8[pages, page_bytes], zero at positions beyond its end."""
        pages = self._cache[sequence.page_table()[: pages_for(len(sequence))]]
        if rest := len(sequence) % PAGE_TOKENS:
            pages[-1][page_positions(self.shape) >= rest] = 0
        return pages

    def attach_disk(self, disk: PrefixDisk) -> None:
        """Prefixes are also kept on `disk` from now on; the engine closes it."""
        self._disk = DiskTier(disk, self._cache, self.shape)

    def resume(
        self, sequence: Sequence, tokens: Tokens[int], private: Private | None = None
    ) -> int:
        """Begin an empty sequence with the longest kept prefix of `tokens`; how many of it came from disk."""
        public = private is None or private.reuse
        keys = [sequence.salt] * public + ([] if private is None else [private.key])
        self.prefixes.adopt(
            sequence, tokens, max(keys, key=lambda key: self.prefixes.longest(tokens, key))
        )
        if self._disk is None or not public:
            return 0
        return self._disk.extend(sequence, tokens, self._binding(sequence.salt), self._reserve)

    def keep(
        self,
        sequence: Sequence,
        prompt_tokens: int,
        head: int = 0,
        private: Private | None = None,
    ) -> None:
        """Keep what a sequence holds for later prompts; tokens after the first `prompt_tokens` were generated.

        head: so many of the prompt, if they are held, are what others begin with, and outlive this sequence's.
        private: under which the rest is kept; the sequence is rewound. Nothing is kept of one whose adapter was changed
        on the way: no prompt begins like that.
        """
        if len(sequence.history.spans) > 1:
            return
        if private is not None:
            self.prefixes.keep(sequence, prompt_tokens, private.key)
            if not private.reuse:
                return
            prompt_tokens = private.public_tokens
            sequence.rewind(min(len(sequence), prompt_tokens))
        self.prefixes.keep(sequence, prompt_tokens)
        if 0 < head <= min(prompt_tokens, len(sequence)):
            self.prefixes.mark(sequence.tokens[:head], sequence.salt)
        if self._disk is not None:
            self._disk.store(sequence, prompt_tokens, self._binding(sequence.salt), head)

    def save(self, sequence: Sequence) -> bytes:
        """A sequence as bytes that `restore` takes in any process, on any tier and with any number of threads."""
        return pack(self._binding(sequence.salt), sequence.tokens, self._held(sequence))

    def restore(self, blob: bytes, salt: bytes | History = b"") -> Sequence:
        """A sequence as it was saved. Bytes after its end are ignored; `salt` is the saved sequence's, or its history.

        Raises BlobError by its cause, ContextError, PagesExhaustedError; the engine is as before then.
        """
        sequence = self.new_sequence(salt)
        tokens, pages = unpack(blob, self._binding(sequence.salt))
        if tokens:
            self._known(min(tokens), max(tokens))
        sequence.reserve(len(tokens))
        self._cache[sequence.page_table()] = pages
        sequence.commit(tokens)
        return sequence

    def _binding(self, salt: bytes) -> Binding:
        return Binding(self.identity, salt, self.shape)

    def saturations(self) -> dict[str, int]:
        """Clipped values since the engine was made, by site."""
        return dict(self._runner.saturations())

    def expert_stats(self) -> ExpertStats | None:
        """Since the engine was made; None for a dense model."""
        return None if self._mixture is None else self._mixture.stats()

    def generate(
        self, prompt: Tokens[int], sampling: SamplingParams, **asked: Unpack[Asked]
    ) -> Generator[Token, None, None]:
        """Generate after `prompt`. `stats` describes the generation once it has ended.

        The end token is yielded last. Tokens and logits are always those of a new sequence with the same adapter.
        Raises ContextError when the prompt does not fit, InputError when it is empty or holds an unknown token,
        SettingError.
        """
        return self.generation(prompt, sampling, **asked).run()

    def generation(
        self,
        prompt: Tokens[int],
        sampling: SamplingParams,
        *,
        cancel: Callable[[], bool] | None = None,
        sequence: Sequence | None = None,
        adapter: LoadedAdapter | None = None,
        reuse: bool = True,
        constraint: Constraint | None = None,
        jump_forward: bool = True,
        speculate: Speculate = "off",
        drafter: Drafter | Tokens[Drafter] | None = None,
        damped: DampedParams | None = None,
        head: int = 0,
        private: Private | None = None,
    ) -> Generation:
        """What `generate` runs, for a `Scheduler` to run beside others. See `Asked`."""
        if not prompt:
            raise InputError("there are no tokens to read")
        self._fits(len(prompt), 1)
        self._known(min(prompt), max(prompt))
        if sequence is not None and adapter is not None:
            raise InputError(
                "a sequence has its own adapter", hint="begin it with the adapter's salt"
            )
        salt = self.adapters.check(adapter)
        self.stats = None  # of the generation before
        return Generation(
            self,
            list(prompt),
            sampling,
            cancel or (lambda: False),
            sequence,
            constraint,
            self._speculation(speculate, drafter),
            damped=damped,
            head=head,
            private=private,
            reuse=reuse,
            jump_forward=jump_forward,
            salt=salt,
        )

    def _speculation(
        self, speculate: Speculate, drafter: Drafter | Tokens[Drafter] | None
    ) -> Speculation | None:
        """None without drafts. A recorder of routes wants those of the tokens alone."""
        depth = depth_of(speculate)
        if depth == 0 or (self.experts is not None and self.experts.recorder is not None):
            return None
        return Speculation(drafter or Lookup(self.context), self.config.vocab_size, depth)

    def _fits(self, num_tokens: int, more: int = 0) -> None:
        if num_tokens + more > self.context:
            raise ContextError(num_tokens, self.context, more)

    def _context(self, wanted: int | None) -> int:
        if wanted is None:
            return self.config.context
        if not 1 <= wanted <= self.config.context:
            raise InputError(
                f"a context of {wanted} is not possible; the model's is {self.config.context}"
            )
        return wanted

    def _known(self, low: int, high: int) -> None:
        """The smallest and the largest of some tokens are in the vocabulary."""
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"token {bad} is not in the vocabulary of {self.config.vocab_size}")
