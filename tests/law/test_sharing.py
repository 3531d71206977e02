"""The law for shared prefixes: warm = cold = forked = restored, at every length, in tokens, logits and KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.sequence import Sequence, Work
from headrace.experts.stream import StreamOptions
from headrace.values import SamplingParams
from law import engines

Get = Callable[[str], Artifact]
Outcome = tuple[tuple[int, ...], str]  # tokens and fingerprint

CHUNK = 50
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]
# Around tiles, pages and chunks, and the end of the prompt.
EDGES = (1, 2, 15, 16, 17, 49, 50, 51, 63, 64, 65, 99, 100, 101, 127, 128, 129, 148, 149, 150)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
KERNELS = [("reference", 1), (None, 1), (None, 2), ("portable", 2)]


@contextmanager
def opened(
    artifact: Artifact,
    kernels: str | None = None,
    threads: int = 2,
    chunk: int = CHUNK,
    num_sequences: int = 3,
    experts: StreamOptions | None = None,
) -> Iterator[Engine]:
    """An engine whose answers no token ends."""
    sizes = {"chunk": chunk, "num_sequences": num_sequences}
    with engines.opened(artifact, kernels, threads, **sizes, experts=experts) as engine:
        engine.end_tokens = frozenset()
        yield engine


def run(engine: Engine, prompt: list[int], params: SamplingParams, reuse: bool = True) -> Outcome:
    tokens = tuple(t.id for t in engine.generate(prompt, params, reuse=reuse))
    assert engine.stats is not None
    return tokens, engine.stats.fingerprint


def reused(engine: Engine) -> int:
    assert engine.stats is not None
    return engine.stats.reused_tokens


def after(shared: int, length: int = 20) -> list[int]:
    """A prompt that leaves PROMPT after `shared` tokens."""
    follows = PROMPT[shared] if shared < len(PROMPT) else 0
    return PROMPT[:shared] + [(follows + 1 + 11 * i) % 256 for i in range(length)]


@pytest.mark.parametrize(("kernels", "threads"), KERNELS)
def test_warm_is_cold_at_every_length(
    tiny_artifact: Get, kernels: str | None, threads: int
) -> None:
    edges = EDGES if kernels != "reference" else (63, 129)
    with opened(tiny_artifact("qwen3"), kernels, threads) as engine:
        for params in (GREEDY, SAMPLED):
            for shared in edges:
                engine.prefixes.clear()
                run(engine, PROMPT, params)
                warm = run(engine, after(shared), params)
                assert reused(engine) == shared
                assert warm == run(engine, after(shared), params, reuse=False)
                assert reused(engine) == 0
                resumed = engine.new_sequence()
                engine.resume(resumed, after(shared))
                assert len(resumed) == shared + 20
                _same_bytes(engine, resumed)
                resumed.release()
        assert engine.pages.num_used == engine.prefixes.num_pages


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f != "qwen3"])
def test_every_family(tiny_artifact: Get, family: str) -> None:
    with opened(tiny_artifact(family)) as engine:
        run(engine, PROMPT, SAMPLED)
        for shared in EDGES:
            warm = run(engine, after(shared), SAMPLED)
            assert reused(engine) >= shared
            assert warm == run(engine, after(shared), SAMPLED, reuse=False)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_a_mixture_that_streams(tiny_artifact: Get, family: str) -> None:
    with opened(tiny_artifact(family), experts=StreamOptions(6, 32, reserve=2)) as engine:
        run(engine, PROMPT, SAMPLED)
        for shared in (17, 64, 100, 149):
            warm = run(engine, after(shared), SAMPLED)
            assert warm == run(engine, after(shared), SAMPLED, reuse=False)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:64], PROMPT[:65], PROMPT[:2], PROMPT[:1]])
def test_an_exact_repeat_reads_its_last_token(tiny_artifact: Get, prompt: list[int]) -> None:
    with opened(tiny_artifact("llama")) as engine:
        cold = run(engine, prompt, SAMPLED)
        for _ in range(3):
            assert run(engine, prompt, SAMPLED) == cold
            assert reused(engine) == len(prompt) - 1


def test_conversations_that_alternate(tiny_artifact: Get) -> None:
    """A is long, B shares its first hundred tokens, then A goes on: neither overwrites the other."""
    with opened(tiny_artifact("llama")) as engine:
        a, b = list(PROMPT), after(100)
        for turn in range(4):
            for conversation in (a, b):
                asked = [*conversation, 7 + turn]
                got = run(engine, asked, SAMPLED)
                if turn:
                    assert reused(engine) == len(conversation) - 1
                assert got == run(engine, asked, SAMPLED, reuse=False)
                conversation += [7 + turn, *got[0]]


def test_a_request_may_opt_out(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        run(engine, PROMPT, SAMPLED, reuse=False)
        assert (engine.prefixes.num_pages, engine.pages.num_used) == (0, 0)
        run(engine, PROMPT, SAMPLED)
        held = engine.prefixes.num_tokens
        run(engine, after(5), SAMPLED, reuse=False)
        assert (reused(engine), engine.prefixes.num_tokens) == (0, held)


def test_a_full_pool_makes_room(tiny_artifact: Get) -> None:
    """Room for one sequence alone: whatever was kept gives way, and nothing is refused."""
    with opened(tiny_artifact("llama"), num_sequences=1) as engine:
        long = [(5 * i * i + i) % 256 for i in range(250)]
        wanted = run(engine, long, SAMPLED)
        for prompt in (PROMPT, after(64, 100), long, long[:200], long, [*long[:190], *PROMPT[:60]]):
            assert run(engine, prompt, SAMPLED) == run(engine, prompt, SAMPLED, reuse=False)
        assert run(engine, long, SAMPLED) == wanted
        assert engine.pages.num_used <= 4


@pytest.mark.parametrize("kernels", [None, "reference"])
def test_a_cancelled_prefill_keeps_what_it_read(tiny_artifact: Get, kernels: str | None) -> None:
    with opened(tiny_artifact("llama"), kernels, chunk=16) as engine:
        starts, got = [], []
        while not got:
            patience = iter([False] * (2 if kernels is None else 40))
            got = list(engine.generate(PROMPT, GREEDY, cancel=lambda p=patience: next(p, True)))
            starts.append(reused(engine))
        assert starts == sorted(set(starts))  # each starts later than the one before
        assert len(starts) > 3
        assert got[0].id == run(engine, PROMPT, GREEDY, reuse=False)[0][0]


def test_a_client_too_impatient_for_a_whole_pass_gets_shorter_ones(tiny_artifact: Get) -> None:
    """The reference is asked between operations: a pass of any rows asks as often."""
    with opened(tiny_artifact("llama"), "reference", chunk=128) as engine:
        rows: list[int] = []

        def stop() -> bool:
            rows.append(0)
            return len(rows) > 3

        for _ in range(3):
            rows.clear()
            assert not list(engine.generate(PROMPT, GREEDY, cancel=stop))
        assert next(len(part) for part, _ in engine.chunks(PROMPT)) == 128 // 8
        run(engine, PROMPT, GREEDY)
        assert [len(part) for part, _ in engine.chunks(PROMPT)] == [128, 22]
        steps = engine.generate(PROMPT, GREEDY, cancel=lambda: bool(rows) and rows.pop() < 0)
        next(steps)
        rows[:] = [-1, 0]  # in the middle of a step
        assert not list(steps)
        assert [len(part) for part, _ in engine.chunks(PROMPT)] == [128, 22]


@pytest.mark.parametrize(("kernels", "threads"), KERNELS)
def test_forks_diverge_and_are_each_what_they_would_be_alone(
    tiny_artifact: Get, kernels: str | None, threads: int
) -> None:
    with opened(tiny_artifact("llama"), kernels, threads, num_sequences=4) as engine:
        for length in (16, 63, 64, 65, 100, 129, 149) if kernels != "reference" else (65,):
            whole = engine.new_sequence()
            engine.read(whole, PROMPT)
            forks = [whole.fork(length), whole.fork(length)]
            rests = [after(length)[length:], [9] * 20]
            for at in range(20):  # also in one pass with the whole
                work = [Work(f, r[at : at + 1]) for f, r in zip(forks, rests, strict=True)]
                engine.forward([*work, Work(whole, [at])])
            _alone(engine, forks[0], PROMPT[:length] + rests[0])
            _alone(engine, forks[1], PROMPT[:length] + rests[1])
            _alone(engine, whole, PROMPT + list(range(20)))
            for sequence in (*forks, whole):
                sequence.release()
            assert engine.pages.num_used == 0


def _alone(engine: Engine, sequence: Sequence, tokens: list[int]) -> None:
    """The sequence holds what a new one holds after reading `tokens`, and its next logits are those."""
    assert list(sequence.tokens) == tokens
    fresh = engine.new_sequence()
    engine.read(fresh, tokens)
    assert engine.kv_bytes(fresh) == engine.kv_bytes(sequence)
    wanted = engine.read(fresh, [3]).copy()
    fork = sequence.fork()
    assert np.array_equal(engine.read(fork, [3]), wanted)
    fork.release(), fresh.release()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_interleaving_is_plain_recomputing(tiny_artifact: Get, data: st.DataObject) -> None:
    """Sequences fork, rewind, end and are restored beside generations that reuse; the pool is short."""
    with opened(tiny_artifact("llama"), num_sequences=3, threads=1) as engine:
        live: list[Sequence] = []
        for _ in range(data.draw(st.integers(2, 10))):
            act = data.draw(
                st.sampled_from(["generate", "grow", "fork", "rewind", "restore", "end", "mark"])
            )
            prompt = after(data.draw(st.sampled_from(EDGES)), data.draw(st.integers(1, 40)))
            if act == "generate":
                got = run(engine, prompt, SAMPLED)
                assert got == run(engine, prompt, SAMPLED, reuse=False)
            elif act == "mark":
                engine.prefixes.mark(prompt)
            elif act == "grow" or not live:
                if len(live) < 2:
                    live.append(engine.new_sequence())
                    engine.prefixes.adopt(live[-1], prompt)
                sequence = data.draw(st.sampled_from(live))
                engine.read(sequence, prompt[: min(sequence.room, 40)] or [1])
            else:
                sequence = data.draw(st.sampled_from(live))
                length = data.draw(st.integers(0, len(sequence)))
                if act == "fork" and len(live) < 2:
                    live.append(sequence.fork(length))
                elif act == "rewind":
                    sequence.rewind(length)
                elif act == "restore":
                    blob = engine.save(sequence)
                    sequence.release()
                    live[live.index(sequence)] = engine.restore(blob)
                elif act == "end":
                    engine.prefixes.keep(sequence)
                    sequence.release()
                    live.remove(sequence)
        for sequence in live:
            _same_bytes(engine, sequence)


def _same_bytes(engine: Engine, sequence: Sequence) -> None:
    fresh = engine.new_sequence()
    if len(sequence):
        engine.read(fresh, list(sequence.tokens))
    assert engine.kv_bytes(fresh) == engine.kv_bytes(sequence)
    fresh.release()
