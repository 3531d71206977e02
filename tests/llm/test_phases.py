"""A thought and an answer: the answer is that of a new model that is given all that stays of the thought."""

from __future__ import annotations

import gc
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.engine.prefix_disk import DiskOptions, survey
from headrace.errors import CancelledError, ContextError, InputError, SettingError
from headrace.llm import LLM
from headrace.phases import Thinking
from headrace.values import Message, SamplingParams

ASK = "Is the river wide?"
THINK = {"temperature": 1.0, "seed": 4, "max_tokens": 40}
ANSWER = {"temperature": 0.8, "seed": 9, "max_tokens": 20}
SCHEMA = {
    "type": "object",
    "properties": {"wide": {"type": "boolean"}, "why": {"enum": ["it is", "it is not"]}},
    "required": ["wide", "why"],
    "additionalProperties": False,
}


def check(llm: LLM, thinking: Thinking, **options: object) -> None:
    """The law: prompt, thought and what closes it are a prompt like any other, for nothing but what is computed."""
    thought, answer = thinking.thought, thinking.answer
    assert thought is not None
    assert answer is not None
    ids = [*thinking.prompt, *thought.tokens, *thinking.closing]
    llm.forget()
    fresh = llm.generate_ids(ids, reuse=False, **options)  # type: ignore[arg-type]
    assert fresh.tokens == answer.tokens
    assert fresh.stats.fingerprint == answer.stats.fingerprint
    assert fresh.stats.finish_reason == answer.finish_reason
    assert answer.stats.prompt_tokens == len(ids)
    # What was picked last was not read yet; nothing else is read again.
    if thought.stats.unread_tokens == 0:
        read = len(thinking.prompt) + len(thought.tokens) - 1
        assert answer.stats.reused_tokens >= read
        assert answer.stats.read_tokens <= len(thinking.closing) + 1


@pytest.mark.parametrize("budget", [1, 2, 7, 40, None])
def test_a_budget_ends_a_thought(wild: LLM, budget: int | None) -> None:
    thinking = wild.think(ASK, thinking={**THINK, "max_tokens": budget}, **ANSWER)  # type: ignore[typeddict-item]
    answer = thinking.finish()
    assert thinking.thought is not None
    assert answer is wild.last
    if budget is not None:
        assert (len(thinking.thought.tokens), thinking.thought.ended) == (budget, "length")
    assert thinking.thought.stats.prompt_tokens == len(wild.prompt_ids(ASK))
    assert wild.detokenize(thinking.closing) == "</think>\n\n"
    check(wild, thinking, **ANSWER)


def test_each_phase_has_its_own_sampling_and_statistics(wild: LLM) -> None:
    """The thought is what generation with its parameters gives."""
    prompt = [Message("user", ASK)]
    plain = wild.chat(prompt, **THINK)  # type: ignore[arg-type]
    thinking = wild.think(prompt, thinking=THINK, temperature=0.0, max_tokens=5)  # type: ignore[typeddict-item]
    pieces = list(thinking)
    thought, answer = thinking.thought, thinking.answer
    assert thought is not None
    assert answer is not None
    assert thought.tokens == plain.tokens
    assert thought.stats.fingerprint == plain.stats.fingerprint
    assert (thought.stats.seed, answer.stats.seed) == (4, None)
    assert (thought.stats.new_tokens, answer.stats.new_tokens) == (40, 5)
    phases = [piece.phase for piece in pieces]
    assert phases == sorted(phases, reverse=True)  # thinking, then answer
    assert "".join(p.text for p in pieces if p.phase == "thinking") == thought.text == plain.text
    assert "".join(p.text for p in pieces if p.phase == "answer") == answer.text


def marker_of(wild: LLM, at: int) -> str:
    """Two characters that the thought says, not before its token `at`."""
    text = wild.generate(ASK, **THINK).text  # type: ignore[arg-type]
    return next(
        text[i : i + 2]
        for i in range(at, len(text))
        if text.find(text[i : i + 2]) == i and text[i : i + 2].isascii()
    )


@pytest.mark.parametrize("more", ["", "then", "\n\n"])
def test_a_thought_closes_itself_with_a_text(wild: LLM, more: str) -> None:
    end = marker_of(wild, 5)
    thinking = wild.think(ASK, thinking=THINK, end=end, transition=end + more, **ANSWER)  # type: ignore[typeddict-item]
    thinking.finish()
    assert thinking.thought is not None
    assert thinking.thought.ended == "closed"
    assert end not in thinking.thought.text
    assert wild.detokenize(thinking.thought.tokens) == thinking.thought.text + end
    assert wild.detokenize(thinking.closing) == more
    check(wild, thinking, **ANSWER)


def test_a_thought_closes_itself_with_a_control_token(wild: LLM) -> None:
    """The marker is not part of the thought, and what was read of it is not read again."""
    hot = {"temperature": 100.0, "max_tokens": 900}
    for seed in range(20):
        thinking = wild.think(
            ASK,
            thinking={**hot, "seed": seed},  # type: ignore[typeddict-item]
            end="<|im_start|>",
            transition="<|im_start|>answer\n",
            **ANSWER,  # type: ignore[arg-type]
        )
        thinking.finish()
        assert thinking.thought is not None
        assert 257 not in thinking.thought.tokens
        assert thinking.closing[0] == 257
        check(wild, thinking, **ANSWER)
        if thinking.thought.ended == "closed":
            return
    raise AssertionError("no seed closes the thought")


def test_an_end_token_ends_a_thought(wild: LLM) -> None:
    for seed in range(20):
        thinking = wild.think(
            ASK, thinking={"temperature": 100.0, "seed": seed, "max_tokens": 600}, **ANSWER
        )  # type: ignore[typeddict-item]
        thinking.finish()
        assert thinking.thought is not None
        if thinking.thought.ended == "stop":
            assert thinking.thought.stats.finish_reason == "stop"
            assert 258 not in thinking.thought.tokens
            check(wild, thinking, **ANSWER)
            return
    raise AssertionError("no seed ends the thought")


@pytest.mark.parametrize("at", [0, 1, 5])
def test_answer_now(wild: LLM, at: int) -> None:
    thinking = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    if not at:
        thinking.answer_now()
    for count, piece in enumerate(thinking, 1):
        if count == at:
            assert piece.phase == "thinking"
            other = threading.Thread(target=thinking.answer_now)
            other.start()
            other.join()
    assert thinking.thought is not None
    assert thinking.thought.ended == "answer_now"
    assert len(thinking.thought.tokens) <= at + 1
    assert thinking.answer is not None
    assert thinking.answer.stats.new_tokens > 0
    check(wild, thinking, **ANSWER)


@pytest.mark.parametrize("phase", ["thinking", "answer"])
def test_a_cancellation_reaches_both_phases(wild: LLM, phase: str) -> None:
    thinking = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    for piece in thinking:
        if piece.phase == phase:
            wild.cancel()
    assert thinking.thought is not None
    assert thinking.answer is not None
    assert thinking.answer.finish_reason == "cancelled"
    assert (thinking.thought.ended == "cancelled") == (phase == "thinking")
    assert (thinking.answer.tokens == ()) == (phase == "thinking")
    assert wild.generate(ASK, **ANSWER).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["now first", "cancel first"])
def test_a_cancellation_reaches_both_phases_whatever_else_is_asked(wild: LLM, order: str) -> None:
    thinking = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    for count, _ in enumerate(thinking):
        if count == 0 and order != "cancel first":
            thinking.answer_now()
        if count == 0:
            wild.cancel()
        if count == 0 and order == "cancel first":
            thinking.answer_now()
    assert thinking.thought is not None
    assert thinking.answer is not None
    assert thinking.thought.ended == "cancelled"
    assert (thinking.answer.finish_reason, thinking.answer.tokens) == ("cancelled", ())
    again = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    again.answer_now()
    assert again.finish().tokens  # a cancellation of before is over


def test_threads_share_one_and_any_may_end_it(wild: LLM) -> None:
    alone = list(wild.think(ASK, thinking=THINK, **ANSWER))  # type: ignore[typeddict-item]
    shared = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda _: list(shared), range(2)))
    assert Counter(parts[0] + parts[1]) == Counter(alone)
    for end in (Thinking.close, Thinking.cancel):
        thinking = wild.think(ASK, thinking={**THINK, "max_tokens": 800}, **ANSWER)  # type: ignore[typeddict-item]
        begun = threading.Event()

        def read(thinking: Thinking = thinking, begun: threading.Event = begun) -> None:
            for _ in thinking:
                begun.set()

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            begun.wait()
            end(thinking)
            reader.result()
        assert next(thinking, None) is None
        assert thinking.thought is None or thinking.thought.ended == "cancelled"
        assert thinking.answer is None or thinking.answer.tokens == ()
    assert list(wild.think(ASK, thinking=THINK, **ANSWER)) == alone  # type: ignore[typeddict-item]


def test_what_was_closed_has_no_answer(wild: LLM) -> None:
    for pieces in (0, 1):
        thinking = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
        for _ in range(pieces):
            next(thinking)
        thinking.close()
        thinking.close()
        with pytest.raises(CancelledError, match="closed"):
            thinking.finish()


def test_a_schema_starts_with_the_first_token_of_the_answer(wild: LLM) -> None:
    """However the thought ends, and with drafts the same."""
    end = marker_of(wild, 3)
    options = {"schema": SCHEMA, "temperature": 0.0, "max_tokens": 200}
    for ways in (
        {"thinking": {**THINK, "max_tokens": 3}},
        {"thinking": THINK, "end": end, "transition": end},
        {"thinking": THINK, "end": end, "transition": end + "{"},
    ):
        thinking = wild.think(ASK, **ways, **options)  # type: ignore[arg-type]
        text = thinking.finish().text
        assert text[0] == "{"
        assert set(json.loads(text)) == {"wide", "why"}
        check(wild, thinking, **options)
        again = wild.think(ASK, **ways, **options, speculate=6)  # type: ignore[arg-type]
        assert again.finish().tokens == thinking.finish().tokens


def test_damping_and_drafts_of_each_phase(wild: LLM) -> None:
    thinking = {"temperature": 0.0, "max_tokens": 30, "damped": True, "speculate": 4}
    first = wild.think(ASK, thinking=thinking, damped=True, max_tokens=20)  # type: ignore[typeddict-item]
    first.finish()
    check(wild, first, damped=True, max_tokens=20)
    del thinking["speculate"]
    second = wild.think(ASK, thinking=thinking, damped=True, max_tokens=20, speculate=3)  # type: ignore[typeddict-item]
    assert second.finish() == first.answer
    assert second.thought == first.thought


def test_an_opening_is_read_behind_the_prompt(wild: LLM) -> None:
    thinking = wild.think(ASK, opening="<think>\n", thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    thinking.finish()
    assert list(thinking.prompt) == wild.prompt_ids(ASK) + wild.tokenize("<think>\n")
    check(wild, thinking, **ANSWER)


def test_the_cache_keeps_the_prompt_and_nothing_private(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path
) -> None:
    disk = DiskOptions(tmp_path / "kv", min_tokens=1)
    with LLM(tiny_artifact("llama").path, threads=1, prefix_disk=disk) as llm:
        thinking = llm.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
        thinking.finish()
        assert thinking.thought is not None
        whole = [*thinking.prompt, *thinking.thought.tokens]
        assert llm.engine.prefixes.longest(whole) == len(thinking.prompt)
        again = llm.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
        assert again.finish() == thinking.answer
        assert again.thought is not None
        assert again.thought.stats.reused_tokens == len(thinking.prompt) - 1
        free = llm.engine.pages.num_free
        llm.think(ASK, thinking=THINK, reuse=False, **ANSWER).finish()  # type: ignore[typeddict-item]
        assert llm.engine.pages.num_free == free
        assert llm.engine.prefixes.num_tokens == len(thinking.prompt)
    stored = [t for s in survey(tmp_path / "kv").segments for t in s.tokens.tolist()]
    assert stored == list(thinking.prompt)


def test_no_room_for_both(wild: LLM) -> None:
    context = wild.engine.context
    long = "x" * (context - 20)
    with pytest.raises(ContextError):
        wild.think(long, thinking=THINK)  # type: ignore[typeddict-item]
    room = context - len(wild.prompt_ids("x"))
    thinking = wild.think("x", thinking={"temperature": 1.0, "seed": 1}, temperature=0.0)
    thinking.finish()
    assert thinking.thought is not None
    assert thinking.thought.ended in ("length", "stop")
    assert len(thinking.thought.tokens) <= room // 2 + 1


def test_what_cannot_be_is_refused(wild: LLM) -> None:
    for options, cause in (
        ({"thinking": {"schema": {}}}, "a thought has no schema"),
        ({"thinking": {"stop": ("x",)}}, "a thought has no stop"),
        ({"end": ""}, "the end of a thought is empty"),
        ({"end": "x<|im_start|>"}, "neither text nor one control token"),
        ({"end": "x", "transition": "y"}, "does not begin with the end"),
    ):
        with pytest.raises(InputError, match=cause):
            wild.think(ASK, **options)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="max_tokens is 0"):
        wild.think(ASK, thinking={"max_tokens": 0})
    with pytest.raises(InputError, match="a thought has no adapter"):
        wild.think(ASK, thinking={"adapter": "x"})
    with pytest.raises(SettingError, match="budget is no option; the nearest is "):
        wild.think(ASK, budget=3)  # type: ignore[call-arg]
    with pytest.raises(SettingError, match="openin is no option; the nearest is opening"):
        wild.think(ASK, openin="<think>")  # type: ignore[call-arg]
    with pytest.raises(SettingError, match="top_q is no option of a thought; the nearest is top_"):
        wild.think(ASK, thinking={"top_q": 3})  # type: ignore[typeddict-unknown-key]


def test_an_option_that_nothing_has_is_named_with_the_nearest(wild: LLM) -> None:
    say = [Message("user", ASK)]
    for call in (
        lambda **options: wild.generate(ASK, **options),
        lambda **options: wild.stream(ASK, **options),
        lambda **options: wild.chat(say, **options),
        lambda **options: wild.stream_chat(say, **options),
        lambda **options: wild.generate_ids([1], **options),
    ):
        with pytest.raises(SettingError, match="temprature is no option; .* is temperature"):
            call(temprature=1.0)
    with pytest.raises(SettingError, match="grammars is no option; the nearest is grammar"):
        wild.stream_ids([1], SamplingParams(), grammars=None)  # type: ignore[call-arg]


def test_beside_another_and_closing(wild: LLM) -> None:
    alone = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    alone.finish()
    thinking = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    next(iter(thinking))
    plain = wild.generate(ASK, **ANSWER)  # type: ignore[arg-type]
    assert thinking.finish() == alone.answer
    assert thinking.thought == alone.thought
    left = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    next(iter(left))
    left.close()
    del left
    dropped = wild.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    next(iter(dropped))
    del dropped
    gc.collect()
    assert wild.generate(ASK, **ANSWER) == plain  # type: ignore[arg-type]
    wild.forget()
    assert wild.engine.pages.num_used == 0


def test_many_at_a_time_wait_for_each_other(wild: LLM) -> None:
    """Room for one context: thoughts that are left half way, and others that want all of the room, come to their ends."""
    options = {"thinking": {"temperature": 1.0, "max_tokens": 300}, **ANSWER}
    seeds = range(6)

    def one(seed: int) -> tuple[object, object]:
        mine = {**options, "thinking": {**options["thinking"], "seed": seed}}  # type: ignore[dict-item]
        thinking = wild.think(ASK, **mine)  # type: ignore[arg-type]
        thinking.finish()
        return thinking.thought, thinking.answer

    alone = [one(seed) for seed in seeds]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, seeds)) == alone
    left = wild.think(ASK, thinking={**THINK, "max_tokens": 400}, **ANSWER)  # type: ignore[typeddict-item]
    next(iter(left))
    room = wild.engine.context - len(wild.prompt_ids(ASK))
    assert wild.generate(ASK, temperature=1.0, seed=1, max_tokens=room).tokens
    again = wild.think(ASK, thinking={**THINK, "max_tokens": 400}, **ANSWER)  # type: ignore[typeddict-item]
    assert left.finish() == again.finish()


def test_the_model_is_closed_in_the_middle(tiny_artifact: Callable[[str], Artifact]) -> None:
    llm = LLM(tiny_artifact("llama").path, threads=1)
    thinking = llm.think(ASK, thinking=THINK, **ANSWER)  # type: ignore[typeddict-item]
    next(iter(thinking))
    llm.close()
    assert list(thinking) == []
