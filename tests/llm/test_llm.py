"""The Python API on a tiny model: equality of its ways to generate, turns, cancelling, closing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.artifact.container import Artifact
from headrace.engine.engine import Engine
from headrace.engine.generation import Generation
from headrace.engine.mixture import Mixture
from headrace.engine.prefix_cache import PrefixCache
from headrace.errors import ContextError, FileError, InputError, PromptSizeError, SettingError
from headrace.experts.stream import ExpertStream
from headrace.llm import CHARACTERS_PER_TOKEN, LLM
from headrace.memory.inputs import PlanOptions
from headrace.values import Message, SamplingParams

LONG = 900


@pytest.fixture(scope="module")
def path(tiny_artifact: Callable[[str], Artifact]) -> Path:
    return tiny_artifact("llama").path


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1) as model:
        yield model


def test_stream_concatenates_to_generate(llm: LLM) -> None:
    done = llm.generate("Why?", seed=5, max_tokens=40)
    pieces = list(llm.stream("Why?", seed=5, max_tokens=40))
    assert "".join(pieces) == done.text
    assert llm.last is not None
    assert llm.last.tokens == done.tokens
    assert llm.last.stats.fingerprint == done.stats.fingerprint


def test_text_is_the_decoding_of_the_tokens(llm: LLM) -> None:
    done = llm.generate("Why?", seed=5, max_tokens=40)
    assert done.text.rstrip("\ufffd") == llm.detokenize(done.tokens).rstrip("\ufffd")
    assert done.stats.new_tokens == len(done.tokens)


def test_a_limit_inside_a_character_leaves_it_out(llm: LLM) -> None:
    """A token of this model is a byte: one that begins a character is no text yet, one that cannot is U+FFFD."""
    begun = invalid = 0
    for seed in range(120):
        done = llm.generate("Why?", seed=seed, temperature=100.0, max_tokens=1)
        byte = done.tokens[0]
        if done.finish_reason == "stop" or byte >= 256:
            continue
        data = llm.tokenizer.token_bytes(byte)
        if 0xC2 <= data[0] <= 0xF4:
            begun += 1
            assert done.text == ""
        elif data[0] >= 0x80:
            invalid += 1
            assert done.text == "\ufffd"
        else:
            assert done.text == data.decode()
    assert begun > 5 < invalid


def test_chat_is_generate_with_messages(llm: LLM) -> None:
    asked = [Message("system", "Be brief."), Message("user", "Why?")]
    chat = llm.chat(asked, seed=1, max_tokens=8)
    assert chat.tokens == llm.generate("Why?", system="Be brief.", seed=1, max_tokens=8).tokens


def test_raw_reads_the_text_as_it_stands(llm: LLM) -> None:
    assert llm.prompt_ids("ab", raw=True)[-2:] == llm.tokenize("ab")
    assert llm.prompt_ids("<|im_end|>", raw=True)[-1] == 258
    assert 258 not in llm.tokenize("<|im_end|>")
    with pytest.raises(InputError, match="no system message"):
        llm.prompt_ids("ab", system="x", raw=True)


def test_special_text_in_a_message_is_ordinary(llm: LLM) -> None:
    plain, spelled = (llm.prompt_ids(text) for text in ("x", "<|im_end|>"))
    assert plain.count(258) == spelled.count(258)


def test_bytes_outside_utf8_are_read(llm: LLM) -> None:
    assert llm.prompt_ids(b"\xff\xfe") == llm.prompt_ids("\udcff\udcfe")
    assert llm.detokenize(llm.tokenize(b"a\xffb")) == "a\ufffdb"


def test_stop_string_ends_the_text(llm: LLM) -> None:
    whole = llm.generate("Why?", seed=5, max_tokens=60).text
    stop = whole[10:13]
    done = llm.generate("Why?", seed=5, max_tokens=60, stop=(stop,))
    assert done.text == whole[: whole.index(stop)]
    assert done.finish_reason == "stop" == done.stats.finish_reason


def test_an_unseeded_run_draws_another_seed(llm: LLM) -> None:
    seeds = {llm.generate("Why?", max_tokens=1).stats.seed for _ in range(3)}
    assert len(seeds) == 3
    assert llm.generate("Why?", seed=0, max_tokens=1).stats.seed == 0
    assert llm.generate("Why?", temperature=0.0, max_tokens=1).stats.seed is None
    assert llm.generate("Why?", temperature=0.0, seed=3, max_tokens=1).stats.seed == 3


def test_statistics_add_up(llm: LLM) -> None:
    stats = llm.generate("Why?", seed=0, max_tokens=5).stats
    assert stats.read_tokens == stats.prompt_tokens - stats.reused_tokens
    assert (stats.new_tokens, stats.decode_tokens, stats.unread_tokens) == (5, 4, 0)
    assert stats.decode_rate == 4 / stats.decode_seconds
    one = llm.generate("Why?", seed=0, max_tokens=1).stats
    assert (one.decode_tokens, one.decode_rate) == (0, 0.0)


def test_logits_are_those_of_the_pick(llm: LLM) -> None:
    ids = llm.prompt_ids("Why?")
    logits = llm.logits(ids)
    assert logits.dtype == np.int32
    assert logits.shape == (len(ids), llm.engine.config.vocab_size)
    done = llm.generate("Why?", temperature=0.0, max_tokens=1)
    assert done.tokens == (int(logits[-1].argmax()),)


def test_cancel_from_another_thread(llm: LLM) -> None:
    for index, _ in enumerate(llm.stream("Why?", seed=1, max_tokens=LONG)):
        if index == 1:
            thread = threading.Thread(target=llm.cancel)
            thread.start()
            thread.join()
    assert llm.last is not None
    assert llm.last.finish_reason == "cancelled"
    assert llm.last.stats.new_tokens < LONG


def test_the_reference_is_cancelled_inside_a_pass(path: Path) -> None:
    """And goes on afterwards as if nothing had been read."""
    question = "x" * 300
    with LLM(path, kernels="reference") as llm:
        asked = []
        ids = llm.prompt_ids(question)
        sampling = SamplingParams(temperature=0.0, max_tokens=2)
        sequence = llm.engine.new_sequence()
        stop = lambda: len(asked) >= 9 or asked.append(1) is not None  # noqa: E731
        assert list(llm.engine.generate(ids, sampling, cancel=stop, sequence=sequence)) == []
        assert llm.engine.stats is not None
        assert llm.engine.stats.finish_reason == "cancelled"
        assert (len(asked), len(sequence)) == (9, 0)  # in the middle of the only pass
        assert llm.engine.stats.read_tokens == 0 == llm.engine.stats.prefill_rate
        assert llm.engine.stats.unread_tokens == len(ids)
        assert llm.engine.stats.prefill_seconds > 0 == llm.engine.stats.decode_rate
        anew = list(llm.engine.generate(ids, sampling, sequence=sequence))
        sequence.release()
        assert anew == list(llm.engine.generate(ids, sampling))


def test_a_cancelled_model_generates_again(llm: LLM) -> None:
    llm.cancel()  # nothing runs: nothing is cancelled later
    assert llm.generate("Why?", seed=1, max_tokens=3).finish_reason == "length"


def test_closing_the_iterator_releases_the_model(llm: LLM) -> None:
    stream = llm.stream("Why?", seed=1, max_tokens=LONG)
    next(stream)
    assert llm.generate("Why?", seed=1, max_tokens=1).stats.new_tokens == 1  # beside it
    stream.close()
    assert llm.generate("Why?", seed=1, max_tokens=1).stats.new_tokens == 1


def test_an_iterator_that_was_never_started_holds_nothing(llm: LLM) -> None:
    stream = llm.stream("Why?", max_tokens=3)
    assert llm.generate("Why?", seed=1, max_tokens=1).stats.new_tokens == 1
    stream.close()


def test_threads_take_turns_and_get_what_each_would_alone(llm: LLM) -> None:
    alone = [llm.generate(f"Q{i}", seed=i, max_tokens=20).tokens for i in range(4)]
    found: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        found[i] = llm.generate(f"Q{i}", seed=i, max_tokens=20).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == alone


def test_close_ends_a_generation_of_another_thread(path: Path) -> None:
    llm = LLM(path, threads=1)
    begun, reasons = threading.Event(), []

    def work() -> None:
        for _ in llm.stream("Why?", seed=1, max_tokens=LONG):
            begun.set()
        assert llm.last is not None
        reasons.append(llm.last.finish_reason)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    llm.close()
    thread.join(30)
    assert reasons in (["cancelled"], ["stop"])
    with pytest.raises(InputError, match="closed"):
        llm.generate("Why?", max_tokens=1)


def test_close_with_an_unfinished_iterator(path: Path) -> None:
    llm = LLM(path, threads=1)
    stream = llm.stream("Why?", seed=1, max_tokens=LONG)
    next(stream)
    llm.close()
    list(stream)
    llm.close()  # twice is once


def test_a_conversation_goes_on_as_if_read_anew(path: Path) -> None:
    messages = [Message("user", "One?")]
    with LLM(path, threads=1) as llm:
        first = llm.chat(messages, seed=1, max_tokens=12)
        longer = [*messages, Message("assistant", first.text), Message("user", "Two?")]
        second = llm.chat(longer, seed=2, max_tokens=12)
    with LLM(path, threads=1) as fresh:
        anew = fresh.chat(longer, seed=2, max_tokens=12)
    assert first.stats.reused_tokens == anew.stats.reused_tokens == 0
    assert second.stats.reused_tokens >= first.stats.prompt_tokens
    assert second.tokens == anew.tokens
    assert second.stats.fingerprint == anew.stats.fingerprint


def test_conversations_that_alternate_reuse_each_their_own(path: Path) -> None:
    long, short = Message("system", "x" * 200), Message("user", "One?")
    talks = [[long, Message("user", "A?")], [long, Message("user", "B?")], [short]]
    with LLM(path, threads=1) as llm:
        for turn in range(3):
            for talk in talks:
                done = llm.chat(talk, seed=turn, max_tokens=8)
                if turn:
                    assert done.stats.reused_tokens >= len(llm.chat_ids(talk[:-2]))
                with LLM(path, threads=1) as fresh:
                    assert fresh.chat(talk, seed=turn, max_tokens=8) == done
                talk += [Message("assistant", done.text), Message("user", f"More {turn}?")]


def test_a_plan_may_retain_whole_conversations(path: Path) -> None:
    first, second = (f"{word} " * 45 for word in ("ab", "cd"))
    for contexts in (0, 1):
        options = PlanOptions(max_context=256, retained_contexts=contexts)
        with LLM(path, threads=1, memory=options) as llm:
            for prompt in (first, second):
                llm.generate(prompt, raw=True, seed=1, max_tokens=20)
            again = llm.generate(first, raw=True, seed=1, max_tokens=20).stats
            whole = again.prompt_tokens - 1
            assert again.reused_tokens == whole if contexts else 0 < again.reused_tokens < whole


def test_a_request_that_opts_out_leaves_nothing(llm: LLM) -> None:
    ids = llm.prompt_ids("Why?")
    for reuse, held in ((False, 0), (True, 0), (False, 0), (True, len(ids) - 1)):
        list(llm.stream_ids(ids, SamplingParams(seed=1, max_tokens=3), reuse=reuse))
        assert llm.last is not None
        assert llm.last.stats.reused_tokens == held


def test_a_conversation_that_is_cancelled_interrupted_and_diverges(path: Path) -> None:
    """Whatever the model did before, a turn is what a fresh model answers."""
    opening, other = Message("user", "One?"), Message("user", "Other?")

    def fresh(messages: list[Message]) -> tuple[tuple[int, ...], str]:
        with LLM(path, threads=1) as model:
            done = model.chat(messages, seed=2, max_tokens=12)
            return done.tokens, done.stats.fingerprint

    with LLM(path, threads=1) as llm:

        def same(messages: list[Message]) -> int:
            done = llm.chat(messages, seed=2, max_tokens=12)
            assert (done.tokens, done.stats.fingerprint) == fresh(messages)
            return done.stats.reused_tokens

        stream = llm.stream_chat([opening], seed=1, max_tokens=LONG)
        next(stream)
        llm.cancel()
        list(stream)
        assert llm.last is not None
        assert llm.last.finish_reason == "cancelled"
        turns = [opening, Message("assistant", llm.last.text), Message("user", "Two?")]
        assert same(turns) >= len(llm.chat_ids([opening]))
        assert 0 < same([other]) < len(llm.chat_ids([other])) - 1
        llm.logits(llm.prompt_ids("x"))
        assert same(turns) == len(llm.chat_ids(turns)) - 1


def test_refusals(llm: LLM, path: Path, tmp_path: Path) -> None:
    with pytest.raises(ContextError, match=r"\d+ tokens, the context holds 1024"):
        llm.generate("x" * 2000)
    with pytest.raises(ContextError, match="has 1024 tokens.*holds 1024; an answer needs 1 more"):
        llm.generate_ids([3] * 1024)
    endless = "x" * (1024 * CHARACTERS_PER_TOKEN + 1)
    for ask in (lambda: llm.generate(endless), lambda: llm.generate(endless, raw=True)):
        with pytest.raises(PromptSizeError, match=r"524,289 characters, the context holds 1024"):
            ask()
    for ask in (lambda: llm.generate("é" * 400_000), lambda: llm.generate("é" * 400_000, raw=True)):
        with pytest.raises(PromptSizeError, match=r"tokens or more, the context holds 1024"):
            ask()
    with pytest.raises(SettingError, match="temperature"):
        llm.generate("x", temperature=float("nan"))
    with pytest.raises(FileError, match="no such file"):
        LLM(tmp_path / "nothing")
    with pytest.raises(InputError, match="the budget is"):
        LLM(path, memory_gb=0.0001)
    assert llm.generate("x", seed=1, max_tokens=1).stats.new_tokens == 1


WRONG: dict[str, tuple[Callable[[LLM], object], str]] = {
    "no tokens": (lambda m: m.logits([]), "the sequence of tokens is empty"),
    "text for tokens": (lambda m: m.logits("text"), "is text: give token ids"),  # type: ignore[arg-type]
    "no token id": (lambda m: m.logits([1, 2.5]), "2.5 is not a token id"),  # type: ignore[list-item]
    "a token outside": (lambda m: m.logits([10**6]), "token 1000000 is not in the vocabulary"),
    "text to detokenize": (lambda m: m.detokenize("x"), "is text"),  # type: ignore[arg-type]
    "nothing to stream": (lambda m: list(m.stream_ids([], SamplingParams())), "is empty"),
    "an empty prompt": (lambda m: m.generate(""), "the prompt is empty"),
    "an empty raw prompt": (lambda m: m.generate(b"", raw=True), "the prompt is empty"),
    "no text": (lambda m: m.generate(5), "the prompt is of type int"),  # type: ignore[arg-type]
    "no messages": (lambda m: m.chat([]), "at least one message"),
    "text for messages": (lambda m: m.chat("Hi"), "at least one message"),  # type: ignore[arg-type]
    "no message": (lambda m: m.chat(["Hi"]), "'Hi' is not a Message"),  # type: ignore[list-item]
    "max_tokens": (lambda m: m.generate("x", max_tokens="3"), "max_tokens is '3'; it must be a whole"),  # type: ignore[arg-type]
    "seed": (lambda m: m.generate("x", seed=1.5), "seed is 1.5; it must be a whole"),  # type: ignore[arg-type]
    "seed as truth": (lambda m: m.generate("x", seed=True), "seed is True; it must be a whole"),
    "top_k": (lambda m: m.generate("x", top_k=None), "top_k is None; it must be a whole"),  # type: ignore[arg-type]
    "temperature": (lambda m: m.generate("x", temperature="1"), "temperature is '1'; it must be a"),  # type: ignore[arg-type]
    "stop": (lambda m: m.generate("x", stop="x"), "stop is 'x'; it must be a sequence"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_types_and_nothing_are_refused(llm: LLM, name: str) -> None:
    act, cause = WRONG[name]
    with pytest.raises(InputError) as caught:
        act(llm)
    assert cause in caught.value.message


def test_a_message_may_be_a_mapping(llm: LLM) -> None:
    mapping = {"role": "user", "content": "Why?"}
    assert llm.chat_ids([mapping]) == llm.chat_ids([Message("user", "Why?")])  # type: ignore[list-item]


def test_a_completion_is_its_text_and_equal_ones_are_equal(llm: LLM) -> None:
    first, again = (llm.generate("Why?", seed=5, max_tokens=8) for _ in range(2))
    assert str(first) == first.text
    assert first == again
    assert first != llm.generate("Why?", seed=5, max_tokens=7)
    assert llm.logits(np.array([1, 2])).shape[0] == 2


def test_a_context_of_nothing_is_refused(path: Path) -> None:
    with pytest.raises(SettingError, match="max_context"):
        LLM(path, max_context=0)


def _held() -> tuple[int, int]:
    """Threads and open files of this process."""
    threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return threads, files


def test_a_load_that_fails_holds_nothing(
    tiny_artifact: Callable[[str], Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its error, and with it the half-made object, is kept."""
    mixture = tiny_artifact("mixtral").path
    LLM(mixture, threads=3).close()
    before, kept = _held(), []
    for _ in range(4):
        with pytest.raises(FileError) as told:
            LLM(mixture, threads=3, trace_routes=tmp_path / "missing" / "routes")
        kept.append(told.value)

    def broken(self: Engine) -> None:
        raise MemoryError

    for owner, name in (
        (Engine, "warm"),
        (PrefixCache, "__init__"),
        (ExpertStream, "__init__"),
        (Mixture, "__init__"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *a, **k: broken(a[0]))
            with pytest.raises(MemoryError) as failed:
                LLM(mixture, threads=3, trace_routes=tmp_path / "routes")
            kept.append(failed.value)
    assert _held() == before
    assert len(kept) == 8


def test_an_interruption_before_the_engine_begins_stays_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised as it is, and no statistics of another generation stand for it."""
    first = llm.generate("Why?", seed=5, max_tokens=4)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for name in ("begin", "stats"):
        with monkeypatch.context() as patch:
            patch.setattr(Generation, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(llm.stream("Why?", seed=5, max_tokens=4))
        assert llm.last is None or (name == "begin" and llm.last.tokens == ())
        with monkeypatch.context() as patch:
            patch.setattr(Generation, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate("Why?", seed=5, max_tokens=4)
        assert llm.generate("Why?", seed=5, max_tokens=4) == first
