"""The law with a head that drafts: whatever it says, tokens, logits and keys and values are those of plain decoding.

And the head itself: on every tier the same logits, at every step the drafts of a head that has read the history alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.head import read_head
from headrace.engine.engine import Engine
from headrace.engine.mtp import SETTLED_ROWS, MtpDrafter, MtpHead
from headrace.engine.sequence import Work
from headrace.engine.speculate import Lookup
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import TIERS, select
from law.test_speculation import GREEDY, PROMPT, SAMPLED, opened, recorded, run

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "olmoe")
Get = Callable[[str], Artifact]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """The tiny model of a family with a head of random weights."""
    made: dict[str, Artifact] = {}

    def get(family: str) -> Artifact:
        if family not in made:
            made[family] = tiny.make(tmp_path_factory.mktemp(family) / "a", family, head=1)
        return made[family]

    return get


@contextmanager
def head_of(
    artifact: Artifact, engine: Engine, kernels: str | None = None, vocab_size: int = 1 << 20
) -> Iterator[MtpHead]:
    found = read_head(artifact)
    assert found is not None
    backend = select(kernels or engine.backend.name, threads=1)
    head = MtpHead(found, backend, engine.fraction_bits, engine.context, vocab_size)
    yield head
    head.close()


class Checked:
    """Drafts with a head, or what a recorded run says, and looks whether the head drafts what a fresh one would."""

    def __init__(self, head: MtpHead, script: Tokens[int], kinds: str, window: int = 0) -> None:
        """kinds: of each call in turn: h for the head's drafts, r for right ones, w for wrong, s for short."""
        self._head = head
        self._drafter = MtpDrafter(head)
        self._script = list(script)
        self._kinds = kinds
        self._calls = 0
        self._states: dict[int, NDArray[np.int32]] = {}
        self.checked = 0

    def follow(self, start: int, tokens: Tokens[int], hidden: NDArray[np.int32]) -> None:
        for at, row in enumerate(hidden):
            self._states[start + at] = row.copy()
        self._drafter.follow(start, tokens, hidden)

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        found = self._drafter.propose(history, limit)
        base = min(self._states)
        every = list(history[base:])
        # Of the last token the state is not known.
        states = np.stack([self._states[base + i] for i in range(len(every) - 1)])
        fresh = MtpDrafter(self._head)
        fresh.follow(base, every[:-1], states)
        assert found == fresh.propose(history, limit)
        assert len(found) == limit
        self.checked += 1
        kind = self._kinds[self._calls % len(self._kinds)]
        self._calls += 1
        right = self._script[len(history) :][:limit]
        wrong = [*right[:1], *((d + 1) % 256 for d in right[1:])]
        return {"h": found, "r": right, "w": wrong, "s": right[:1]}[kind]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_draft_changes_the_outcome(headed: Get, family: str, params: object) -> None:
    artifact = headed(family)
    experts = StreamOptions(5, 32) if family in tiny.MIXTURES else None
    with opened(artifact, experts=experts) as engine, head_of(artifact, engine) as head:
        plain = run(engine, params)  # type: ignore[arg-type]
        for depth in (*range(9), "auto"):
            assert run(engine, params, depth, MtpDrafter(head)) == plain  # type: ignore[arg-type]
        both = [Lookup(engine.context), MtpDrafter(head)]
        assert run(engine, params, 3, both) == plain  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [3, 40, 512])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kinds", ["h", "r", "w", "rw", "rrs", "hrws"])
def test_it_is_where_the_history_is(headed: Get, family: str, chunk: int, kinds: str) -> None:
    """After right and refused drafts, and prompts in several passes; also where a constraint or a mate gets between."""
    artifact = headed(family)
    with opened(artifact, chunk=chunk) as engine, head_of(artifact, engine) as head:
        plain, other = run(engine, SAMPLED), engine.new_sequence()

        def meanwhile() -> None:
            if len(other) < 20:
                engine.forward([Work(other, [9, 8])])

        for depth in (1, 2, 5):
            for between in (lambda: None, meanwhile):
                drafter = Checked(head, recorded(plain), kinds)
                found = run(engine, SAMPLED, depth, drafter, meanwhile=between)
                assert found == plain
                assert drafter.checked > 0


def test_a_prompt_in_chunks_is_read_as_it_comes(headed: Get) -> None:
    """No more states wait than those of a pass, and of a few before."""
    artifact, waiting = headed("llama"), []

    class Counted(MtpDrafter):
        def follow(self, start: int, tokens: Tokens[int], hidden: NDArray[np.int32]) -> None:
            super().follow(start, tokens, hidden)
            waiting.append(len(self._states))

    drafts = []
    for chunk in (8, 20, 512):
        with opened(artifact, chunk=chunk) as engine, head_of(artifact, engine) as head:
            waiting.clear()
            run(engine, GREEDY, 3, Counted(head))
            assert max(waiting) <= chunk + SETTLED_ROWS + 1
            assert engine.stats is not None
            drafts.append((engine.stats.drafted_tokens, engine.stats.accepted_tokens))
    assert len(set(drafts)) == 1


@pytest.mark.parametrize("kernels", TIERS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_tier_says_the_same(headed: Get, family: str, kernels: str) -> None:
    artifact, count = headed(family), 9
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 256, count).tolist()
    states = rng.integers(-(1 << 18), 1 << 18, (count, 64)).astype(np.int32)
    results = []
    with opened(artifact, kernels) as engine:
        for name, threads in ((kernels, 1), (None, 2)):
            found = read_head(artifact)
            assert found is not None
            backend = select(name, threads=threads)
            head = MtpHead(found, backend, engine.fraction_bits, engine.context)
            cache = head.new_cache()
            some, _ = head.read(cache, 0, tokens[:5], states[:5], draft=False)
            each = [
                head.read(cache, i, tokens[i : i + 1], states[i : i + 1], draft=True)
                for i in range(5, count)
            ]
            results.append((some.tobytes(), head.logits().tobytes(), cache.tobytes()))
            results[-1] += tuple((s.tobytes(), t) for s, t in each)
            head.close()
    assert results[0] == results[1]


def test_some_of_the_vocabulary(headed: Get) -> None:
    """Logits of the first tokens are those of all of them."""
    artifact = headed("llama")
    states = np.arange(64, dtype=np.int32)[None] << 10
    with opened(artifact) as engine:
        every = []
        for size in (16, 40, 272, 1000):
            with head_of(artifact, engine, vocab_size=size) as head:
                assert head.vocab_size == min(size // 16 * 16, 272)
                head.read(head.new_cache(), 0, [5], states, draft=True)
                every.append(head.logits().copy())
        for logits in every:
            assert np.array_equal(logits, every[-1][: len(logits)])
        with head_of(artifact, engine, vocab_size=16) as head:
            assert run(engine, SAMPLED, 4, MtpDrafter(head)) == run(engine, SAMPLED)


@pytest.mark.parametrize("room", range(2, 12))
def test_the_edge_of_the_context(headed: Get, room: int) -> None:
    params, artifact = replace(SAMPLED, max_tokens=None), headed("llama")
    with (
        opened(artifact, context=len(PROMPT) + room) as engine,
        head_of(artifact, engine) as head,
    ):
        plain = run(engine, params)
        assert (len(plain.tokens), plain.reason) == (room, "length")
        for depth in (1, 3, 8):
            for kinds in ("h", "r", "hr"):
                assert run(engine, params, depth, Checked(head, recorded(plain), kinds)) == plain


def test_behind_a_prefix_that_was_kept(headed: Get) -> None:
    """It begins where states begin: the first pass of this generation."""
    artifact = headed("llama")
    with opened(artifact) as engine, head_of(artifact, engine) as head:
        plain = list(engine.generate(PROMPT, SAMPLED))
        assert engine.stats is not None
        assert engine.prefixes.longest(PROMPT) > 0
        for depth in (1, 4):
            script = PROMPT + [t.id for t in plain]
            drafter = Checked(head, script, "hr")
            again = list(engine.generate(PROMPT, SAMPLED, speculate=depth, drafter=drafter))
            assert again == plain
            assert engine.stats.reused_tokens > 0
            assert drafter.checked > 0
            assert min(drafter._states) == engine.stats.reused_tokens


def test_a_state_that_is_not_wanted_costs_no_pass(headed: Get) -> None:
    """And one that is wanted is X behind the last layer, whatever company its row has."""
    artifact = headed("mixtral")
    seen: list[tuple[int, list[int], NDArray[np.int32]]] = []

    def hear(start: int, tokens: Tokens[int], hidden: NDArray[np.int32]) -> None:
        seen.append((start, list(tokens), hidden.copy()))

    with opened(artifact, num_sequences=4) as engine:
        alone = engine.new_sequence()
        wanted = engine.forward([Work(alone, PROMPT[:20], all_logits=False, hidden=hear)]).copy()
        plain = engine.new_sequence()
        assert np.array_equal(engine.forward([Work(plain, PROMPT[:20])]), wanted)
        mate, again = engine.new_sequence(), engine.new_sequence()
        engine.forward([Work(mate, [3, 4, 5]), Work(again, PROMPT[:20], hidden=hear)])
        first, second = seen
        assert first[:2] == second[:2] == (0, PROMPT[:20])
        assert np.array_equal(first[2], second[2])
        engine.forward([Work(again, [7], hidden=hear)])
        assert seen[2][:2] == (20, [7])
