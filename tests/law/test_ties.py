"""Equal logits are one choice on every path: the lowest id that is allowed."""

from __future__ import annotations

from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.engine.damped import DampedParams
from headrace.engine.engine import Engine
from headrace.engine.sequence import Work
from headrace.engine.speculate import Speculate
from headrace.kernels.select import TIERS
from headrace.values import SamplingParams
from law.engines import opened

PROMPT = [(7 * i * i + 3 * i) % 128 for i in range(70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
HALF = 128


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model in which token t and t + 128 always have equal logits."""
    base = tmp_path_factory.mktemp("twins")
    source = tiny.write_checkpoint(base / "source", "llama")
    weights = tiny.state(tiny.config("llama"))
    weights["model.embed_tokens.weight"][HALF : 2 * HALF] = weights["model.embed_tokens.weight"][
        :HALF
    ]
    tiny.write_tensors(source / "model.safetensors", weights)
    return convert(source, base / "artifact")


class Only:
    """A constraint that always allows the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    can_end = ended = False

    def mask(self) -> NDArray[np.uint32]:
        words = np.zeros(-(-tiny.VOCAB // 32), np.uint32)
        for token in self._tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def forced(self) -> list[int]:
        return []

    def advance(self, token: int) -> None:
        assert token in self._tokens

    def fork(self) -> Self:
        return self

    def rollback(self, count: int) -> None:
        pass


class Upper:
    """Drafts the other of two equal tokens, after the right one."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def propose(self, history: list[int], limit: int) -> list[int]:
        right = self._answer[len(history) - len(PROMPT) :][:limit]
        return right[:1] + [t + HALF for t in right[1:2] if t < HALF] + right[2:]


WAYS: dict[str, dict[str, object]] = {
    "greedy": {},
    "damped": {"damped": DampedParams(alpha_q15=2**18, max_order=3, top_k=7)},
    "one candidate": {"damped": DampedParams(top_k=1)},
    "sampled": {"sampling": SamplingParams(temperature=1.0, top_k=1, seed=3, max_tokens=12)},
    "masked": {"constraint": Only(list(range(3, 256)))},
    "damped and masked": {
        "constraint": Only([*range(5, 9), *range(40, 256)]),
        "damped": DampedParams(alpha_q15=2**18, top_k=3),
    },
}


def run(engine: Engine, way: str, speculate: Speculate = "off", **more: object) -> list[int]:
    how = {**WAYS[way], **more}
    sampling = how.pop("sampling", GREEDY)
    engine.end_tokens = frozenset()
    steps = engine.generate(PROMPT, sampling, speculate=speculate, **how)  # type: ignore[arg-type]
    return [token.id for token in steps]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", TIERS)
def test_the_lowest_id_wins(twins: Artifact, kernels: str, way: str) -> None:
    if kernels == "reference" and way not in ("greedy", "damped and masked"):
        pytest.skip("slow, and the pick is the same code")
    with opened(twins, threads=1) as engine:
        wanted = run(engine, way, reuse=False)
    if not way.startswith("damped"):  # which may take the other of the two for a change
        low = 3 if way == "masked" else 0
        assert all(not low + HALF <= token < 2 * HALF for token in wanted)
    with opened(twins, kernels) as engine:
        assert run(engine, way, reuse=False) == wanted
        assert run(engine, way) == wanted
        assert run(engine, way) == wanted  # warm
        if kernels != "reference":
            for depth in (1, 4, 8):
                assert run(engine, way, depth) == wanted
                assert run(engine, way, depth, drafter=Upper(wanted)) == wanted


@pytest.mark.parametrize("kernels", TIERS)
def test_they_are_equal_in_every_row_of_a_batch(twins: Artifact, kernels: str) -> None:
    with opened(twins, kernels, num_sequences=4) as engine:
        sequences = [engine.new_sequence() for _ in range(4)]
        work = [Work(s, PROMPT[: 3 + 5 * i], all_logits=i < 2) for i, s in enumerate(sequences)]
        logits = engine.forward(work)
        assert len(logits) == 3 + 8 + 1 + 1
        assert np.array_equal(logits[:, :HALF], logits[:, HALF : 2 * HALF])
        alone = engine.new_sequence()
        assert np.array_equal(logits[-1].copy(), engine.read(alone, PROMPT[:18]))


def test_an_upper_one_wins_where_the_lower_is_not_allowed(twins: Artifact) -> None:
    with opened(twins, threads=1) as engine:
        free = run(engine, "greedy")
        allowed = [*range(HALF, 2 * HALF)]
        assert run(engine, "greedy", constraint=Only(allowed))[0] == free[0] + HALF


def test_all_logits_equal(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A head of zeros: token 0, or the lowest that is allowed, whatever the path."""
    base = tmp_path_factory.mktemp("zeros")
    source = tiny.write_checkpoint(base / "source", "llama3")
    weights = tiny.state(tiny.config("llama3"))
    weights["lm_head.weight"][:] = 0
    tiny.write_tensors(source / "model.safetensors", weights)
    with opened(convert(source, base / "artifact"), threads=1) as engine:
        for speculate in ("off", 3):
            assert run(engine, "greedy", speculate) == [0] * 12
            assert run(engine, "sampled", speculate) == [0] * 12
            assert run(engine, "masked", speculate) == [3] * 12
        # Damping takes the next of equal ones where one has come before.
        assert sorted(run(engine, "damped")[:7]) == list(range(7))
