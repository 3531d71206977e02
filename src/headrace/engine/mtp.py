"""Drafts of a head of the model's own (multi-token prediction), from the states that the model's passes leave behind.

At position t the head reads the model's state there and the token at t + 1, and says the token at t + 2. Its keys and
values are its own; what it holds of a token that was not picked is written over. It is never trusted: what it says
changes no token.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from headrace.arith.ops import saturate
from headrace.artifact.head import Head
from headrace.engine.batch import aligned_zeros, within_context
from headrace.engine.pages import pages_for
from headrace.kernels.program import Backend, Batch
from headrace.memory.facts import HEAD_ROWS
from headrace.models.decoder import build_head

I32 = NDArray[np.int32]

HEAD_VOCAB = (
    16384  # tokens that it draws from, the first ones: byte pair merges put the frequent ones there
)
SETTLED_ROWS = 16  # states that wait until something is drafted; more are read in one pass


class MtpHead:
    """The compiled head of a loaded model: it computes, and holds nothing of a sequence. `close` it.

    Used by one thread at a time.
    """

    def __init__(
        self,
        head: Head,
        backend: Backend,
        fraction_bits: int,
        context: int,
        vocab_size: int = HEAD_VOCAB,
    ) -> None:
        """context: positions of a sequence. vocab_size: tokens that are drafted, rounded down to whole tiles."""
        every = head.config.vocab_size
        self.vocab_size = every if vocab_size >= every else max(vocab_size // 16, 1) * 16
        program = build_head(
            head.config, head.formats, head.tensors, fraction_bits, self.vocab_size
        )
        self._program = within_context(program, context)
        self._runner = backend.compile(self._program, capacity=HEAD_ROWS, logit_capacity=1)
        self._pages = pages_for(context)

    def new_cache(self) -> NDArray[np.uint8]:
        """Keys and values of one sequence, u8[pages, page_bytes]; memory where they are written."""
        return aligned_zeros(self._pages, self._program.shape.page_bytes)

    def read(
        self, cache: NDArray[np.uint8], start: int, tokens: Tokens[int], states: I32, *, draft: bool
    ) -> tuple[I32, int]:
        """Read pairs of a state and the token after it, at most HEAD_ROWS, at positions from `start` on.

        states i32[len(tokens), hidden]. Returns the head's own state behind the last, i32[1, hidden], and with
        `draft` the token that it says, otherwise 0.
        """
        logits = self.logits if draft else None
        out = self._layer(cache, start, tokens, states)
        return out, 0 if logits is None else int(logits().argmax())

    def logits(self) -> I32:
        """After the last pair that was read, i32[vocab_size]; a view that the next pass overwrites."""
        self._runner.run(self._program.marks[-1], len(self._program.ops), self._batch, self._cache)
        last: I32 = self._runner.logits(1)[0, : self.vocab_size]
        return last

    def _layer(self, cache: NDArray[np.uint8], start: int, tokens: Tokens[int], states: I32) -> I32:
        """Both parts of what the layer reads, their sum (R1), and the layer."""
        joined, layer, end = self._program.marks
        rows, run, runner = len(tokens), self._runner.run, self._runner
        batch = self._batch = Batch(
            tokens=np.array(tokens, np.int32),
            positions=np.arange(start, start + rows, dtype=np.int32),
            sequences=np.zeros(rows, np.int32),
            page_tables=(np.arange(self._pages, dtype=np.int32),),
            logit_rows=np.array([rows - 1], np.int32),
        )
        self._cache = cache
        run(0, joined, batch, cache)
        total = runner.residual(rows).astype(np.int64)
        runner.put(states)
        run(joined, layer, batch, cache)
        total += runner.residual(rows)
        runner.put(saturate(total).values.astype(np.int32))
        run(layer, end, batch, cache)
        return runner.residual(rows)[-1:].copy()

    def close(self) -> None:
        self._runner.close()


class MtpDrafter:
    """Drafts for one generation. See `speculate.Drafter`, `speculate.Follower`.

    It begins where the model's first pass does: behind a prefix that was in the cache, whose states nobody has, its
    positions are counted from there on, since rotary positions are relative. Drafts beyond the first are read with the
    head's own state in place of the model's.
    """

    def __init__(self, head: MtpHead) -> None:
        self._head = head
        self._cache = head.new_cache()
        self._base = 0  # position of the first state
        self._tokens: list[int] = []  # that the model has read, from there on
        self._agreed = 0  # of them, the history has these
        self._states: list[
            I32
        ] = []  # of the last ones; of those before, the head has read the pairs
        self._read = 0  # pairs that the head has read

    def follow(self, start: int, tokens: Tokens[int], hidden: I32) -> None:
        at = start - self._base
        if not self._tokens or not 0 <= at <= len(self._tokens):
            self._begin(start)
            at = 0
        first = len(self._tokens) - len(self._states)
        del self._tokens[at:]
        del self._states[max(at - first, 0) :]
        self._agreed, self._read = min(self._agreed, at), min(self._read, at)
        if len(self._states) > SETTLED_ROWS:
            self._settle([*self._tokens, tokens[0]])
        self._tokens += tokens
        self._states += list(hidden[:, None])

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        known = self._known(history)
        if known < 1:
            return []
        every = list(history[self._base :])
        state, token = self._catch_up(every, known)
        drafts = []
        for at in range(known, len(every) + limit):  # `token` may follow what is at `at`
            if at + 1 > len(every) - 1:
                drafts.append(token)
                every.append(token)
            if len(drafts) == limit:
                break
            state, token = self._head.read(self._cache, at, [every[at + 1]], state, draft=True)
        return drafts

    def _begin(self, start: int) -> None:
        self._base, self._agreed, self._read = start, 0, 0
        self._tokens, self._states = [], []

    def _known(self, history: Tokens[int]) -> int:
        """How many states from the first on are of this history, whose token after is known."""
        ours, theirs = self._tokens, history
        most = min(len(ours), len(theirs) - self._base)
        while self._agreed < most and ours[self._agreed] == theirs[self._base + self._agreed]:
            self._agreed += 1
        return min(self._agreed, len(theirs) - self._base - 1)

    def _settle(self, every: list[int]) -> None:
        """Read all pairs of states that are held and the tokens after them; keep the last state."""
        self._catch_up(every, len(self._tokens), draft=False)

    def _catch_up(self, every: list[int], known: int, *, draft: bool = True) -> tuple[I32, int]:
        """Read what is left of the first `known` pairs, the last one in any case."""
        first = len(self._tokens) - len(self._states)
        begin, found = min(self._read, known - 1), (self._states[0], 0)
        while begin < known:
            end = min(begin + HEAD_ROWS, known)
            states = np.concatenate(self._states[begin - first : end - first])
            found = self._head.read(
                self._cache, begin, every[begin + 1 : end + 1], states, draft=draft and end == known
            )
            begin = end
        self._read = known
        del self._states[: known - 1 - first]
        return found
