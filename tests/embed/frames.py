"""Small models mapped for one test, with a pool and workspaces over memory of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from headrace import embed
from headrace.artifact.container import Artifact
from headrace.embed.saving import capture
from headrace.engine.engine import Engine
from headrace.kernels.select import unavailable

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(70)]
CONTEXT = 256


@dataclass
class Frame:
    model: embed.Model
    pool: embed.KVPool
    space: embed.Workspace

    def new(self, tokens: Many[int] = ()) -> embed.Sequence:
        """A sequence that has read some tokens."""
        sequence = embed.Sequence(self.pool)
        if tokens:
            embed.prefill(sequence, tokens, self.space)
        return sequence


@contextmanager
def opened(
    artifact: Artifact,
    kernels: str | None = None,
    *,
    threads: int = 1,
    context: int = CONTEXT,
    expert_slots: int | None = None,
    num_blocks: int = 16,
    max_sequences: int = 6,
    max_batch: int = 4,
    max_chunk: int = 32,
) -> Iterator[Frame]:
    """Skips the test where the processor has not this tier. Everything that lives is released at the end."""
    if reason := unavailable().get(kernels or "", ""):
        pytest.skip(f"tier {kernels}: {reason}")
    with ExitStack() as stack:
        model = embed.Model(
            artifact,
            kernels=kernels,
            threads=threads,
            max_context=context,
            expert_slots=expert_slots,
        )
        stack.callback(force_unmap, model)
        pool = make_pool(model, num_blocks, max_sequences)
        space = make_workspace(model, max_batch, max_chunk)
        yield Frame(model, pool, space)


def force_unmap(model: embed.Model) -> None:
    """Whatever a test has left alive, files and threads go."""
    model._live.clear()
    model.unmap()


def make_pool(model: embed.Model, num_blocks: int = 16, max_sequences: int = 6) -> embed.KVPool:
    size = num_blocks * embed.kv_block_size(model) + embed.kv_pool_overhead(model, max_sequences)
    return embed.KVPool(
        model, embed.aligned(size), num_blocks=num_blocks, max_sequences=max_sequences
    )


def make_workspace(model: embed.Model, max_batch: int = 4, max_chunk: int = 32) -> embed.Workspace:
    size = embed.workspace_size(model, max_batch=max_batch, max_chunk=max_chunk)
    return embed.Workspace(model, embed.aligned(size), max_batch=max_batch, max_chunk=max_chunk)


def step(
    frame: Frame,
    sequence: embed.Sequence,
    budget: int = 99,
    params: embed.DecodeParams | None = None,
) -> embed.Outcome:
    """One step of one sequence."""
    params = params or embed.DecodeParams(budget)
    return embed.decode_step_v2([sequence], params, frame.space)[0]


def generated(frame: Frame, sequence: embed.Sequence, count: int, budget: int = 99) -> list[int]:
    """The next tokens, in steps of a layer budget."""
    out: list[int] = []
    while len(out) < count:
        outcome = step(frame, sequence, budget)
        if isinstance(outcome, embed.Token):
            out.append(outcome.id)
        else:
            assert isinstance(outcome, embed.MidToken)
    return out


def kv_bytes(sequence: embed.Sequence) -> bytes:
    return capture(sequence).pages.tobytes()


def plain(artifact: Artifact, prompt: Many[int], count: int) -> tuple[list[int], bytes]:
    """What the engine answers greedily, end tokens included, and its keys and values of all but the last token."""
    with Engine(artifact, threads=1, max_context=CONTEXT) as engine:
        sequence, due, out = engine.new_sequence(), list(prompt), list[int]()
        while len(out) < count:
            token = int(engine.read(sequence, due).argmax())
            out.append(token)
            due = [token]
        kv = engine.kv_bytes(sequence)
        sequence.release()
        return out, kv
