"""Decode steps: the pending token of each sequence by at most so many layers, and what follows from the last one."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headrace.arith import damping
from headrace.embed.calls import Call
from headrace.embed.errors import (
    AllocationError,
    ChoiceError,
    EmbedError,
    InvalidArgumentError,
    LayerBudgetError,
    NothingToDecodeError,
    ReleasedError,
)
from headrace.embed.memory import typed
from headrace.embed.model import Model
from headrace.embed.outcome import DeadEnd, Gone, MidToken, Outcome, Refused, Token
from headrace.embed.sequence import Sequence
from headrace.embed.workspace import Workspace
from headrace.engine.damped import DampedParams
from headrace.errors import SettingError

Mode = Literal["greedy", "damped"]


@dataclass(frozen=True)
class DecodeParams:
    """How a decode step goes. layer_budget: layers of one token that it may run, at least 1.

    mode: "greedy" takes the likeliest token, the lowest of equals; "damped" does so after the likeliest were lowered
    by what they repeat of the generated history, as `damped` says (R17); greedy steps do not read it. Raises
    InvalidArgumentError, LayerBudgetError.
    """

    layer_budget: int
    mode: Mode = "greedy"
    damped: DampedParams | None = None

    def __post_init__(self) -> None:
        budget = self.layer_budget
        if isinstance(budget, bool) or not isinstance(budget, int | np.integer):
            raise InvalidArgumentError(f"the layer budget is {budget!r:.60}, not a whole number")
        if budget < 1:
            raise LayerBudgetError(f"a layer budget of {budget} makes no progress")
        object.__setattr__(self, "layer_budget", int(budget))
        if not isinstance(self.mode, str) or self.mode not in ("greedy", "damped"):
            raise InvalidArgumentError(f"mode is {self.mode!r:.60}, not 'greedy' or 'damped'")
        if self.mode == "damped" and not isinstance(self.damped, DampedParams):
            raise InvalidArgumentError("damped decoding needs parameters: decode_params gives them")


def decode_params(model: Model, mode: Mode, layer_budget: int, **damped: int) -> DecodeParams:
    """Parameters with a model's defaults. damped: alpha_q15, max_order or top_k in place of theirs.

    Values of damped decoding are checked in any mode. Raises InvalidArgumentError, LayerBudgetError.
    """
    vocab = typed(model, Model, "the model").vocab_size
    defaults = DampedParams.for_vocab(vocab)
    try:
        how = DampedParams(**{**vars(defaults), **damped})
    except (SettingError, TypeError) as error:
        raise InvalidArgumentError(str(error)) from None
    if how.top_k > vocab:
        raise InvalidArgumentError(f"top_k is {how.top_k}; the vocabulary has {vocab} tokens")
    return DecodeParams(layer_budget, mode, how if mode == "damped" else None)


def decode_step(
    sequences: Many[Sequence], layer_budget: int, workspace: Workspace
) -> list[Outcome]:
    """A greedy step: see `decode_step_v2`."""
    return decode_step_v2(sequences, DecodeParams(layer_budget), workspace)


def decode_step_v2(
    sequences: Many[Sequence], params: DecodeParams, workspace: Workspace
) -> list[Outcome]:
    """One step of every sequence; an outcome each, in order.

    A sequence that is ready, as a prefill leaves it, gives its next token at once. Otherwise its pending token, the one
    that the last step gave, goes through at most layer_budget layers, and if the last layer was reached gives the next
    token in the same call: the budget counts layers, and the finish (final norm, logits, selection) is no layer.
    Sequences may be at different depths. What one of them is refused for is its outcome; the others go on.

    Raises InvalidArgumentError, LayerBudgetError, BusyError (of the workspace, or of a mixture's experts),
    ReleasedError (of the workspace), changing nothing.
    Raises ParallelForIncompleteError, ExpertReadError and FileError without a token: every sequence is then at the end
    of a layer, and the next step goes on there.
    """
    _check(sequences, params, workspace)
    with workspace.in_use(workspace.model) as call, workspace.turn():
        step = _Step(sequences, params, workspace, call)
        try:
            step.begin()
            step.advance()
            step.finish()
        finally:
            step.end()
    return step.outcomes


def _check(sequences: Many[Sequence], params: DecodeParams, workspace: Workspace) -> None:
    """Raises InvalidArgumentError."""
    typed(params, DecodeParams, "the parameters")
    typed(workspace, Workspace, "the workspace")
    if not isinstance(sequences, Many):
        raise InvalidArgumentError("the sequences are no list")
    if len(sequences) > workspace.max_batch:
        raise InvalidArgumentError(
            f"{len(sequences)} sequences; the workspace was made for {workspace.max_batch}"
        )
    for sequence in sequences:
        typed(sequence, Sequence, "one of the sequences")
        if sequence.pool is not sequences[0].pool or sequence.model is not workspace.model:
            raise InvalidArgumentError("the sequences are not all of one pool and model")
    how = params.damped if params.mode == "damped" else None
    if how is not None and how.top_k > workspace.model.vocab_size:
        raise InvalidArgumentError(f"top_k is {how.top_k}, more than the vocabulary")


class _Step:
    """One call: which sequences go on, and what becomes of each."""

    def __init__(
        self,
        sequences: Many[Sequence],
        params: DecodeParams,
        workspace: Workspace,
        call: Call,
    ) -> None:
        self.outcomes: list[Outcome] = [Gone()] * len(sequences)
        self._sequences = sequences
        self._params = params
        self._workspace = workspace
        self._call = call
        self._claimed: list[int] = []
        self._going: list[int] = []

    def begin(self) -> None:
        """Claim the sequences, and make room for the tokens that are to be read."""
        budget = min(self._params.layer_budget, self._workspace.model.num_layers)
        for index, sequence in enumerate(self._sequences):
            try:
                sequence.claim(self._call)
                self._claimed.append(index)
                if not (sequence.length or sequence.pending):
                    raise NothingToDecodeError("the sequence has no token; prefill it first")
                if sequence.pending and not sequence.depth:
                    sequence.reserve(1)
            except ReleasedError:
                continue
            except EmbedError as error:
                self.outcomes[index] = Refused(error)
                continue
            sequence.commit(layers_run=0, ceiling=budget if sequence.pending else 0, fresh=False)
            self._going.append(index)

    def end(self) -> None:
        """Let go of the sequences; of those that were released meanwhile nothing is left."""
        for index in self._claimed:
            if not self._sequences[index].unclaim(self._call):
                self.outcomes[index] = Gone()

    def advance(self) -> None:
        """Pending tokens through their next layers; those at the same depth in one pass."""
        layers = self._workspace.model.num_layers
        groups: dict[int, list[Sequence]] = {}
        for index in self._going:
            sequence = self._sequences[index]
            if sequence.pending:
                groups.setdefault(sequence.depth, []).append(sequence)
        for depth, group in sorted(groups.items()):
            end = min(depth + self._params.layer_budget, layers)
            step = 1 if self._workspace.splits_layers else layers
            while depth < end:  # a hook that fails within a layer leaves what was done before it
                stop = min(depth + step, end)
                self._run(group, depth, stop)
                depth = stop
        for index in self._going:
            self.outcomes[index] = MidToken(self._sequences[index].depth)

    def _run(self, group: list[Sequence], begin: int, end: int) -> None:
        space = self._workspace
        with space.over(group[0].pool):
            batch = space.batch([(s, [int(s.memory.tokens[s.length])]) for s in group])
            rows, clips = space.layers(begin, end, batch, _residuals(group))
        for sequence, row, clipped in zip(group, rows, clips, strict=True):
            sequence.advanced(end, row, clipped)

    def finish(self) -> None:
        """The next tokens of the sequences that are ready for them; all or, where the pass fails, none.

        What fails for one of them alone is its own outcome.
        """
        masks: dict[int, NDArray[np.bool_] | None] = {}
        for index in self._going:
            sequence = self._sequences[index]
            if not sequence.ready:
                continue
            with self._alone(index):
                allowed = None if sequence.walk is None else sequence.walk.allowed()
                if isinstance(allowed, DeadEnd):
                    self.outcomes[index] = allowed
                else:
                    masks[index] = allowed
        if not masks:
            return
        space, ready = self._workspace, [self._sequences[index] for index in masks]
        with space.over(ready[0].pool):
            logits, clips = space.finish(space.last_rows(ready), _residuals(ready))
        for row, (index, allowed) in enumerate(masks.items()):
            with self._alone(index):
                self.outcomes[index] = self._choose(ready[row], logits[row], clips[row], allowed)

    @contextmanager
    def _alone(self, index: int) -> Iterator[None]:
        """What is raised inside is an outcome of this sequence; interrupts are not."""
        try:
            yield
        except EmbedError as error:
            self.outcomes[index] = Refused(error)
        except MemoryError:
            self.outcomes[index] = Refused(AllocationError("there is no memory to choose a token"))
        except BaseException as error:
            # The grammar library's panics are no Exception, and only their name tells them from interrupts.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            cause = f"no token could be chosen: {type(error).__name__}: {error!s:.200}"
            self.outcomes[index] = Refused(ChoiceError(cause))

    def _choose(
        self,
        sequence: Sequence,
        logits: NDArray[np.int32],
        clips: NDArray[np.int64],
        allowed: NDArray[np.bool_] | None,
    ) -> Outcome:
        """The next token from logits [vocab]; clips i64[sites]: of them. allowed: bool[vocab], at least one token."""
        damped = self._params.damped if self._params.mode == "damped" else None
        if damped is not None:
            bits = self._workspace.model.fraction_bits
            how = damping.Damping(damped.alpha_q15, damped.max_order, damped.top_k, bits)
            token = damping.choose(logits, sequence.answer, how, allowed)
        elif allowed is None:
            token = int(logits.argmax())
        else:
            token = int(np.flatnonzero(allowed)[logits[allowed].argmax()])
        walk = sequence.walk
        if walk is not None and not walk.take(token):
            found = walk.allowed()
            return found if isinstance(found, DeadEnd) else DeadEnd(False, "the schema ends here")
        sequence.choose(token, clips)
        return Token(token)


def _residuals(lines: Many[Sequence]) -> NDArray[np.int32]:
    """X of each, i32[rows, hidden]."""
    return np.stack([line.residual for line in lines])
