"""A runner in memory of the caller's: exactly as much as is said, and nothing depends on what was in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.errors import InputError
from headrace.kernels import program as p
from headrace.kernels.select import select
from kernels.models import DENSE, VARIANTS, Model
from kernels.passes import HERE, aligned, batch, new_cache

CONFIGS = {"dense": DENSE, "mixture": VARIANTS["shared"], "one of many": VARIANTS["one of many"]}
GUARD = 4096


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(CONFIGS[request.param])


def outputs(model: Model, runner: p.Runner, capacity: int) -> bytes:
    if model.layouts:
        runner.bind_slots(model.slots())
    out, cache, size = b"", new_cache(model), len(model.program.ops)
    for rows in ([(0, i) for i in range(capacity)], [(1, 0)]):
        assert runner.run(0, size, batch(rows, [len(rows) - 1]), cache) == size
        out += runner.logits(1).tobytes()
    return out + cache.tobytes()


def needed(tier: str, threads: int, model: Model, capacity: int, logit_capacity: int = 1) -> int:
    backend = select(tier, threads=threads)
    return backend.workspace_bytes(
        model.program.shape,
        max_positions=model.config.context,
        capacity=capacity,
        logit_capacity=logit_capacity,
    )


@pytest.mark.parametrize("tier", HERE)
@pytest.mark.parametrize(("threads", "capacity"), [(1, 1), (1, 12), (3, 12)])
def test_exactly_so_much_is_enough(model: Model, tier: str, threads: int, capacity: int) -> None:
    backend = select(tier, threads=threads)
    nbytes = needed(tier, threads, model, capacity)
    plain = backend.compile(model.program, capacity=capacity, logit_capacity=1)
    expected = outputs(model, plain, capacity)
    for fill in (0xFF, 0x80):
        whole = aligned(nbytes + 2 * GUARD, fill)
        memory = whole[GUARD : GUARD + nbytes]
        runner = backend.compile(model.program, capacity=capacity, logit_capacity=1, memory=memory)
        assert outputs(model, runner, capacity) == expected
        assert memory.tobytes() != bytes([fill]) * nbytes
        assert (whole[:GUARD] == fill).all()
        assert (whole[GUARD + nbytes :] == fill).all()


@pytest.mark.parametrize("tier", HERE)
def test_other_memory_is_refused(model: Model, tier: str) -> None:
    backend, nbytes = select(tier, threads=2), needed(tier, 2, model, 5)
    room = aligned(nbytes + 64)
    read_only = aligned(nbytes)
    read_only.flags.writeable = False
    wrong = {
        "has .* bytes": room[: nbytes - 1],
        "multiple of 64": room[1 : nbytes + 1],
        "cannot be written": read_only,
        "contiguous": np.zeros(2 * nbytes + 64, np.uint8)[::2],
        "array of uint8": np.zeros(nbytes, np.int8),
        "contiguous array": aligned(nbytes).reshape(1, -1),
    }
    for message, memory in wrong.items():
        with pytest.raises(InputError, match=message):
            backend.compile(model.program, capacity=5, logit_capacity=1, memory=memory)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="multiple of 64"):
        backend.compile(model.program, capacity=5, logit_capacity=1, memory=room[8 : nbytes + 8])


@pytest.mark.parametrize("tier", HERE)
def test_what_is_read_lies_in_the_memory(model: Model, tier: str) -> None:
    nbytes = needed(tier, 1, model, 5)
    memory = aligned(nbytes)
    backend = select(tier, threads=1)
    runner = backend.compile(model.program, capacity=5, logit_capacity=1, memory=memory)
    x = np.arange(5 * model.program.shape.hidden, dtype=np.int32).reshape(5, -1)
    runner.put(x)
    width = np.int64 if tier == "reference" else np.int32
    assert x.astype(width).tobytes() in memory.tobytes()


def test_memory_follows_the_sizes(model: Model) -> None:
    """One byte depends on none but rows, context and threads."""
    for tier in HERE:
        base = needed(tier, 1, model, 8)
        assert needed(tier, 1, model, 9) > base
        assert needed(tier, 1, model, 8, logit_capacity=2) > base
        if tier != "reference":
            assert needed(tier, 2, model, 8) > base
            longer = replace(model.config, context=model.config.context + 1)
            backend = select(tier, threads=1)
            sizes = [
                backend.workspace_bytes(
                    model.program.shape, max_positions=n, capacity=8, logit_capacity=1
                )
                for n in (257, model.config.context, longer.context)
            ]
            assert sizes[0] == sizes[1] < sizes[2]
