"""Drafts under grammars, stop strings and in every way to ask: the answer is that without them."""

from __future__ import annotations

import pytest

from headrace.engine.speculate import Speculate
from headrace.errors import SettingError
from headrace.llm import LLM
from headrace.values import Message, SamplingParams
from llm.schemas import SCHEMAS

ASK = "Answer in JSON: {}, then say Answer in JSON: {}."


class Script:
    """What a recorded answer says, on every third call wrong from the second token on."""

    def __init__(self, prompt: int, recorded: list[int], wrong: bool) -> None:
        self._prompt = prompt
        self._recorded = recorded
        self._wrong = wrong
        self._calls = 0

    def propose(self, history: list[int], limit: int) -> list[int]:
        self._calls += 1
        drafts = self._recorded[len(history) - self._prompt :][:limit]
        if self._wrong and self._calls % 3 == 0:
            return [*drafts[:1], *(d + 1 for d in drafts[1:])]
        return drafts


def outcome(llm: LLM, name: str, temperature: float, **drafts: object) -> tuple[object, ...]:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, repetition_penalty=1.1)
    grammar = llm.compile(schema=SCHEMAS[name])
    sequence = llm.engine.new_sequence()
    steps = llm.engine.generate(
        llm.prompt_ids(ASK),
        params,
        constraint=grammar.start(),
        sequence=sequence,
        **drafts,  # type: ignore[arg-type]
    )
    tokens = [t.id for t in steps]
    stats, kv = llm.engine.stats, llm.engine.kv_bytes(sequence)
    assert stats is not None
    sequence.release()
    counts = (stats.forced_tokens, stats.forced_spans, stats.finish_reason)
    return tokens, stats.fingerprint, counts, kv


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_followed_the_same_way(wild: LLM, name: str, temperature: float) -> None:
    plain = outcome(wild, name, temperature)
    prompt = len(wild.prompt_ids(ASK))
    tokens = plain[0]
    assert isinstance(tokens, list)
    for depth in (1, 8):
        for jump in (True, False):
            for drafter in (
                Script(prompt, tokens, wrong=False),
                Script(prompt, tokens, wrong=True),
                None,
            ):
                found = outcome(
                    wild, name, temperature, speculate=depth, drafter=drafter, jump_forward=jump
                )
                assert found[:3] == plain[:3]
                assert found[3] == plain[3] or not jump


@pytest.mark.parametrize("name", ["record", "tree", "uuid"])
def test_a_real_model_follows_it_the_same_way(real: LLM, name: str) -> None:
    assert outcome(real, name, 0.0, speculate=4) == outcome(real, name, 0.0)


@pytest.mark.parametrize("speculate", ["auto", 1, 8])
def test_every_way_to_ask(wild: LLM, speculate: Speculate) -> None:
    options = {"seed": 4, "max_tokens": 80, "temperature": 0.3}
    plain = wild.generate(ASK, **options)  # type: ignore[arg-type]
    drafted = {**options, "speculate": speculate}
    done = wild.generate(ASK, **drafted)  # type: ignore[arg-type]
    assert (done, done.stats.fingerprint) == (plain, plain.stats.fingerprint)
    asked = [Message("user", ASK)]
    assert "".join(wild.stream(ASK, **drafted)) == plain.text  # type: ignore[arg-type]
    assert wild.chat(asked, **drafted) == plain  # type: ignore[arg-type]
    assert "".join(wild.stream_chat(asked, **drafted)) == plain.text  # type: ignore[arg-type]
    assert wild.generate_ids(wild.prompt_ids(ASK), **drafted) == plain  # type: ignore[arg-type]


def test_a_stop_string_in_the_midst_of_drafts(real: LLM) -> None:
    ask = "Repeat after me: one two three four. one two three four. one two three four."
    for stop in ("three", "four. one", "."):
        options = {"temperature": 0.0, "max_tokens": 40, "stop": (stop,)}
        plain = real.generate(ask, **options)  # type: ignore[arg-type]
        done = real.generate(ask, speculate=8, **options)  # type: ignore[arg-type]
        assert (done, done.stats.fingerprint) == (plain, plain.stats.fingerprint)


def test_what_comes_again_is_drafted(real: LLM) -> None:
    ask = "Repeat this: The quick brown fox jumps over the lazy dog near the river bank."
    plain = real.generate(ask, temperature=0.0, max_tokens=48)
    done = real.generate(ask, temperature=0.0, max_tokens=48, speculate=4)
    assert (done, done.stats.fingerprint) == (plain, plain.stats.fingerprint)
    assert done.stats.accepted_tokens > 0
    assert plain.stats.drafted_tokens == 0


def test_what_is_no_depth_is_refused_before_anything_runs(wild: LLM) -> None:
    for value in (-1, 16, "on", True):
        with pytest.raises(SettingError, match="speculate"):
            wild.stream(ASK, speculate=value)  # type: ignore[arg-type]
    ids, params = wild.prompt_ids(ASK), SamplingParams(max_tokens=2)
    with pytest.raises(SettingError, match="speculate"):
        wild.stream_ids(ids, params, speculate=99)


class Forbidden:
    """Drafts one token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def propose(self, history: list[int], limit: int) -> list[int]:
        return [self._token] * limit


@pytest.mark.parametrize("name", ["record", "tree"])
def test_what_a_grammar_forbids_is_not_read(wild: LLM, name: str) -> None:
    plain = outcome(wild, name, 1.0)
    [nowhere] = wild.tokenize(b"\x01")
    for depth in (1, 4, "auto"):
        assert (
            outcome(wild, name, 1.0, speculate=depth, drafter=Forbidden(nowhere))[:3] == plain[:3]
        )
        assert wild.engine.stats is not None
        assert wild.engine.stats.drafted_tokens == 0
