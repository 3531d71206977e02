"""The law for drafts: whatever is drafted, tokens, logits and keys and values are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.pages import PagesExhaustedError
from headrace.engine.sequence import Work
from headrace.engine.speculate import Drafter, Speculate
from headrace.experts.stream import StreamOptions
from headrace.kernels.select import TIERS
from headrace.values import SamplingParams, Token
from law import engines

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(55)]  # the answer goes over the end of a page
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SAMPLED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    presence_penalty=0.4,
    repetition_penalty=1.2,
    seed=3,
    max_tokens=24,
)
END = 258

Get = Callable[[str], Artifact]


@dataclass(frozen=True)
class Outcome:
    """Everything that drafts must not change."""

    tokens: tuple[Token, ...]
    fingerprint: str
    reason: str
    held: tuple[int, ...]
    kv: bytes


class Script:
    """Drafts what a recorded run says, `wrong` from the n-th token of a draft on; n of None: all of it right."""

    def __init__(self, recorded: Tokens[int], wrong: Callable[[int], int | None]) -> None:
        self._recorded = list(recorded)
        self._wrong = wrong
        self._calls = 0

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        at = self._wrong(self._calls)
        self._calls += 1
        drafts = self._recorded[len(history) :][:limit]
        if at is None:
            return drafts
        return drafts[:at] + [(d + 1) % 256 for d in drafts[at : at + 1]] + drafts[at + 1 :]


class Always:
    """Drafts the same tokens, as many as it likes."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        return self._tokens


class Random:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def propose(self, history: Tokens[int], limit: int) -> list[int]:
        return [self._random.choice((history[-1], 3, END)) for _ in range(limit + 2)]


opened = partial(engines.opened, threads=1, context=128)


def run(
    engine: Engine,
    params: SamplingParams = GREEDY,
    speculate: Speculate = "off",
    drafter: Drafter | Tokens[Drafter] | None = None,
    prompt: list[int] = PROMPT,
    end: int | None = None,
    cancel: bool = False,
    meanwhile: Callable[[], object] = lambda: None,
) -> Outcome:
    """end: tokens after which it is closed, or cancelled. meanwhile: is done after every token."""
    sequence, tokens = engine.new_sequence(), []
    steps = engine.generate(
        prompt,
        params,
        sequence=sequence,
        speculate=speculate,
        drafter=drafter,
        cancel=(lambda: len(tokens) == end) if cancel else None,
    )
    for token in steps:
        tokens.append(token)
        meanwhile()
        if len(tokens) == end and not cancel:
            steps.close()
    stats = engine.stats
    assert stats is not None
    assert stats.new_tokens == len(tokens)
    assert stats.accepted_tokens <= stats.drafted_tokens
    kv = engine.kv_bytes(sequence)
    held = sequence.tokens
    sequence.release()
    return Outcome(tuple(tokens), stats.fingerprint, stats.finish_reason, held, kv)


def recorded(plain: Outcome, prompt: list[int] = PROMPT) -> list[int]:
    return prompt + [t.id for t in plain.tokens]


def drafters(plain: Outcome, prompt: list[int] = PROMPT) -> dict[str, Drafter | None]:
    whole = recorded(plain, prompt)
    return {
        "right": Script(whole, lambda call: None),
        "wrong": Script(whole, lambda call: 0),
        "alternating": Script(whole, lambda call: (None, 0)[call % 2]),
        "wrong later": Script(whole, lambda call: call % 5),
        "ends": Always(END, END, 1),
        "unknown": Always(5, -3, 10**6),
        "endless": Always(*range(200)),
        "random": Random(1),
        "silent": Always(),
        "lookup": None,
    }


def check(engine: Engine, params: SamplingParams, depths: Tokens[Speculate]) -> None:
    plain = run(engine, params)
    for depth in depths:
        for name, drafter in drafters(plain).items():
            assert run(engine, params, depth, drafter) == plain, (depth, name)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_draft_changes_the_outcome(
    tiny_artifact: Get, family: str, params: SamplingParams
) -> None:
    with opened(tiny_artifact(family)) as engine:
        check(engine, params, (1, 4, 8, "auto"))


def test_every_depth(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        check(engine, SAMPLED, range(16))


@pytest.mark.parametrize("chunk", [1, 2, 7, 512])
@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_and_threads(tiny_artifact: Get, chunk: int, threads: int) -> None:
    """Passes that have no room for drafts, or for some."""
    with opened(tiny_artifact("qwen3"), chunk=chunk, threads=threads) as engine:
        check(engine, SAMPLED, (3, 8))


@pytest.mark.parametrize("kernels", TIERS)
def test_every_tier(tiny_artifact: Get, kernels: str) -> None:
    params = replace(SAMPLED, max_tokens=10)
    with opened(tiny_artifact("llama")) as engine:
        wanted = run(engine, params)
    with opened(tiny_artifact("llama"), kernels) as engine:
        for name, drafter in drafters(wanted).items():
            assert run(engine, params, 4, drafter) == wanted, name


@pytest.mark.parametrize("family", tiny.MIXTURES)
@pytest.mark.parametrize(
    "experts", [None, StreamOptions(5, 32), StreamOptions(9, 32, reserve=3)], ids=["all", "5", "9"]
)
def test_mixtures(tiny_artifact: Get, family: str, experts: StreamOptions | None) -> None:
    with opened(tiny_artifact(family), experts=experts) as engine:
        check(engine, replace(SAMPLED, max_tokens=12), (2, 8, "auto"))


def test_nothing_is_drafted_while_routes_are_traced(tiny_artifact: Get, tmp_path: Path) -> None:
    """A trace holds what tokens chose, and nothing of drafts that were refused."""
    traces = []
    for depth in (0, 4):
        path = tmp_path / str(depth)
        with Engine(tiny_artifact("mixtral"), max_context=128, trace_routes=path) as engine:
            list(engine.generate(PROMPT, SAMPLED, speculate=depth, drafter=Always(1, 2, 3)))
            assert engine.stats is not None
            assert engine.stats.drafted_tokens == 0
        traces.append(path.read_bytes())
    assert traces[0] == traces[1]


@pytest.mark.parametrize("room", range(2, 12))
def test_the_edge_of_the_context(tiny_artifact: Get, room: int) -> None:
    params = replace(SAMPLED, max_tokens=None)
    with opened(tiny_artifact("llama"), context=len(PROMPT) + room) as engine:
        plain = run(engine, params)
        assert (len(plain.tokens), plain.reason) == (room, "length")
        check(engine, params, (1, 3, 8))


def test_limits(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        for limit in range(1, 12):
            check(engine, replace(SAMPLED, max_tokens=limit), (5,))


def test_an_end_inside_a_draft(tiny_artifact: Get) -> None:
    """What was drafted behind it is taken back, and so is the end itself, which nothing reads."""
    found = 0
    with opened(tiny_artifact("llama")) as engine:
        for seed in range(40):
            params = SamplingParams(temperature=100.0, seed=seed, max_tokens=60)
            plain = run(engine, params)
            if plain.reason != "stop" or len(plain.tokens) < 3:
                continue
            found += 1
            whole = [*recorded(plain), END, 1, 2, 3, 4, 5, 6, 7, 8]
            for depth in (1, 2, 7, 8):
                right = Script(whole, lambda call: None)
                assert run(engine, params, depth, right) == plain
        assert found > 2


@pytest.mark.parametrize("cancel", [False, True], ids=["closed", "cancelled"])
@pytest.mark.parametrize("end", range(1, 14))
def test_an_end_in_the_middle(tiny_artifact: Get, end: int, cancel: bool) -> None:
    with opened(tiny_artifact("llama")) as engine:
        whole = recorded(run(engine, SAMPLED))
        plain = run(engine, SAMPLED, end=end, cancel=cancel)
        assert (len(plain.tokens), plain.reason) == (end, "cancelled")
        for wrong in (lambda call: None, lambda call: 2):
            drafter = Script(whole, wrong)
            assert run(engine, SAMPLED, 5, drafter, end=end, cancel=cancel) == plain


def test_a_cancelled_pass_takes_its_drafts_back(tiny_artifact: Get) -> None:
    """The reference asks between operations. A prompt's passes are as long as before."""
    with opened(tiny_artifact("llama"), "reference", chunk=60) as engine:
        whole = recorded(run(engine, SAMPLED))
        for number in (70, 75, 83, 90):
            sequence, calls = engine.new_sequence(), count(1)
            steps = engine.generate(
                PROMPT,
                SAMPLED,
                sequence=sequence,
                cancel=lambda calls=calls, number=number: next(calls) > number,
                speculate=4,
                drafter=Script(whole, lambda call: None),
            )
            tokens = [token.id for token in steps]
            assert tokens == whole[len(PROMPT) :][: len(tokens)]
            assert 0 < len(tokens) < 24
            assert sequence.tokens == tuple(whole[: len(PROMPT) + len(tokens) - 1])
            assert [len(part) for part, _ in engine.chunks(PROMPT)] == [55]
            sequence.release()


def test_another_pass_between_tokens(tiny_artifact: Get) -> None:
    """It overwrites logits that were not looked at yet."""
    with opened(tiny_artifact("llama")) as engine:
        plain, other = run(engine, SAMPLED), engine.new_sequence()

        def meanwhile() -> None:
            if len(other) < 100:
                engine.forward([Work(other, [9, 8, 7], all_logits=True)])

        for name, drafter in drafters(plain).items():
            assert run(engine, SAMPLED, 6, drafter, meanwhile=meanwhile) == plain, name


def test_two_generations_in_turns(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        alone = run(engine, SAMPLED)
        right = (Script(recorded(alone), lambda call: None) for _ in range(2))
        both = [engine.generate(PROMPT, SAMPLED, speculate=5, drafter=d) for d in right]
        for wanted in alone.tokens:
            assert [next(steps) for steps in both] == [wanted, wanted]
        for steps in both:
            assert list(steps) == []
            assert engine.stats is not None
            assert engine.stats.fingerprint == alone.fingerprint


def test_no_room_for_drafts_is_no_failure(tiny_artifact: Get) -> None:
    """Pages that others hold: the generation ends where a plain one does."""
    ends = []
    for depth in (0, 8):
        with opened(tiny_artifact("llama")) as engine:
            whole = recorded(run(engine, SAMPLED))
            mates = [engine.new_sequence() for _ in range(3)]  # three of the four pages
            for mate in mates:
                engine.read(mate, [1])
            tokens: list[int] = []
            right = Script(whole, lambda call: None)
            steps = engine.generate(PROMPT, SAMPLED, speculate=depth, drafter=right)
            with pytest.raises(PagesExhaustedError):
                tokens.extend(token.id for token in steps)
            ends.append(tokens)
    assert ends[0] == ends[1]
    assert len(ends[0]) == 64 - len(PROMPT) + 1


def test_the_prefix_cache_gets_what_was_accepted(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        whole = recorded(run(engine, SAMPLED))
        for name, drafter in drafters(run(engine, SAMPLED)).items():
            engine.prefixes.clear()
            list(engine.generate(PROMPT, SAMPLED, speculate=7, drafter=drafter))
            assert engine.prefixes.longest([*whole, 1, 2]) == len(whole) - 1, name
            longer = [*whole, 5, 6]
            wanted = run(engine, SAMPLED, prompt=longer)
            found = tuple(engine.generate(longer, SAMPLED, speculate=7, drafter=drafter))
            assert found == wanted.tokens, name


def test_drafts_save_passes_and_are_counted(tiny_artifact: Get) -> None:
    with opened(tiny_artifact("llama")) as engine:
        plain, before = run(engine), engine.passes
        run(engine, GREEDY, 5, drafters(plain)["right"])
        assert engine.stats is not None
        assert (engine.stats.drafted_tokens, engine.stats.accepted_tokens) == (19, 19)
        assert engine.passes - before == 1 + 4  # the prompt; 23 tokens, 6 a pass
        run(engine, GREEDY, 5, drafters(plain)["wrong"])
        assert engine.stats.accepted_tokens == 0
        assert engine.stats.drafted_tokens > 60
        run(engine, GREEDY)
        assert (engine.stats.drafted_tokens, engine.stats.accepted_tokens) == (0, 0)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    behaviour=st.lists(st.one_of(st.none(), st.integers(0, 8)), min_size=1, max_size=12),
    depth=st.one_of(st.integers(0, 15), st.just("auto")),
    length=st.integers(1, 75),
    temperature=st.sampled_from([0.0, 1.0]),
    limit=st.one_of(st.none(), st.integers(1, 20)),
)
def test_whatever_a_drafter_does(
    tiny_artifact: Get,
    behaviour: list[int | None],
    depth: Speculate,
    length: int,
    temperature: float,
    limit: int | None,
) -> None:
    """Right, or wrong from some token on, call after call; prompts up to and over the end of a page."""
    params = replace(SAMPLED, temperature=temperature, max_tokens=limit)
    prompt = (PROMPT * 2)[:length]
    with opened(tiny_artifact("llama"), context=90) as engine:
        plain = run(engine, params, prompt=prompt)
        drafter = Script(recorded(plain, prompt), lambda call: behaviour[call % len(behaviour)])
        assert run(engine, params, depth, drafter, prompt) == plain
