"""Many threads, one model: they share passes, and each has the answer that it has alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.artifact.container import Artifact
from headrace.engine.scheduler import AHEAD
from headrace.errors import InputError
from headrace.llm import LLM
from headrace.memory.inputs import PlanOptions
from headrace.stream import Stream

LONG = 900
WAIT = 60


@pytest.fixture(scope="module")
def path(tiny_artifact: Callable[[str], Artifact]) -> Path:
    return tiny_artifact("llama").path


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1, parallel=4) as model:
        model.engine.end_tokens = frozenset()
        yield model


def ask(llm: LLM, number: int, **options: object) -> str:
    return "".join(llm.stream(f"Q{number}", seed=number, max_tokens=40, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("parallel", [1, 4])
def test_threads_get_what_each_gets_alone(
    tiny_artifact: Callable[[str], Artifact], family: str, parallel: int
) -> None:
    with LLM(tiny_artifact(family).path, threads=1, parallel=parallel) as llm:
        alone = [ask(llm, i) for i in range(8)]
        llm.forget()
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda i: ask(llm, i), range(8))) == alone


def test_generations_share_passes(llm: LLM) -> None:
    llm.generate("x", max_tokens=1)
    before = llm.engine.passes
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait(WAIT)
        ask(llm, number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 40 <= llm.engine.passes - before < 4 * 40


def test_one_thread_reads_several(llm: LLM) -> None:
    alone = [ask(llm, i) for i in range(3)]
    streams = [llm.stream(f"Q{i}", seed=i, max_tokens=40) for i in range(3)]
    pieces = [""] * 3
    live = set(range(3))
    while live:
        for i in list(live):
            piece = next(streams[i], None)
            if piece is None:
                live.discard(i)
            else:
                pieces[i] += piece
    assert pieces == alone
    assert [s.completion.text for s in streams if s.completion] == alone


def test_one_that_nobody_reads_blocks_nobody(path: Path) -> None:
    """There is room for one window alone: who stands still gives it up, and goes on later as if nothing had been."""
    with LLM(path, threads=1) as llm:
        llm.engine.end_tokens = frozenset()
        alone = "".join(llm.stream("Why?", seed=1, max_tokens=LONG))
        stream = llm.stream("Why?", seed=1, max_tokens=LONG)
        first = next(stream)
        assert llm.generate("Other", seed=2, max_tokens=LONG).stats.new_tokens == LONG
        assert first + "".join(stream) == alone
        assert stream.completion is not None
        assert stream.completion.stats.new_tokens == LONG


def test_one_that_nobody_reads_takes_no_more_and_more_room(llm: LLM) -> None:
    stream = llm.stream("Why?", seed=1, max_tokens=LONG)
    next(stream)
    ask(llm, 1)
    ask(llm, 2)
    ticket = stream._ticket
    assert ticket is not None
    assert len(ticket.tokens) <= AHEAD
    stream.close()
    assert stream.completion is not None
    assert stream.completion.stats.new_tokens < AHEAD


def test_a_stream_is_cancelled_from_another_thread_and_the_others_go_on(llm: LLM) -> None:
    alone = ask(llm, 7)
    stream, begun, text = llm.stream("Why?", seed=1, max_tokens=LONG), threading.Event(), []

    def work() -> None:
        for piece in stream:
            text.append(piece)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(WAIT)
    other = llm.stream("Q7", seed=7, max_tokens=40)
    head = next(other)
    stream.cancel()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert stream.completion is not None
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.text == "".join(text)
    assert head + "".join(other) == alone


def test_threads_that_share_a_stream_get_a_piece_each(llm: LLM) -> None:
    alone = list(llm.stream("Q1", seed=1, max_tokens=200))
    for _ in range(5):
        stream = llm.stream("Q1", seed=1, max_tokens=200)
        with ThreadPoolExecutor(3) as pool:
            parts = [f.result(WAIT) for f in [pool.submit(list, stream) for _ in range(3)]]
        assert sorted(piece for part in parts for piece in part) == sorted(alone)
        assert stream.completion is not None
        assert stream.completion.text == "".join(alone)


def test_a_stream_is_closed_from_another_thread(llm: LLM) -> None:
    for _ in range(5):
        stream, begun, text = llm.stream("Why?", seed=1, max_tokens=LONG), threading.Event(), []

        def work(
            stream: Stream = stream, begun: threading.Event = begun, text: list[str] = text
        ) -> None:
            for piece in stream:
                text.append(piece)
                begun.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert begun.wait(WAIT)
        stream.close()
        assert stream.completion is not None
        assert stream.completion.finish_reason == "cancelled"
        thread.join(WAIT)
        assert not thread.is_alive()
        assert stream.completion.text == "".join(text)


def test_a_stream_that_was_cancelled_before_it_began(llm: LLM) -> None:
    stream = llm.stream("Why?", seed=1, max_tokens=LONG)
    stream.cancel()
    assert list(stream) == []
    assert stream.completion is not None
    assert stream.completion.finish_reason == "cancelled"


def test_cancel_ends_all_that_run(llm: LLM) -> None:
    streams = [llm.stream(f"Q{i}", seed=i, max_tokens=LONG) for i in range(3)]
    for stream in streams:
        next(stream)
    llm.cancel()
    for stream in streams:
        list(stream)
        assert stream.completion is not None
        assert stream.completion.finish_reason == "cancelled"
    assert llm.generate("x", seed=1, max_tokens=3).finish_reason == "length"


def test_what_is_forgotten_is_closed(llm: LLM) -> None:
    stream = llm.stream("Why?", seed=1, max_tokens=LONG)
    next(stream)
    del stream
    gc.collect()
    llm.forget()
    assert llm.engine.pages.num_used == 0


def test_logits_and_forget_beside_streams(llm: LLM) -> None:
    ids = llm.prompt_ids("Why?")
    wanted, alone = llm.logits(ids), ask(llm, 3)
    stream = llm.stream("Q3", seed=3, max_tokens=40)
    head = next(stream)
    assert (llm.logits(ids) == wanted).all()
    llm.forget()
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(llm.logits, ids) for _ in range(4)]
        rest = "".join(stream)
        assert all((f.result() == wanted).all() for f in found)
    assert head + rest == alone


def test_close_while_many_threads_stream(path: Path) -> None:
    llm = LLM(path, threads=1, parallel=3)
    llm.engine.end_tokens = frozenset()
    begun = threading.Barrier(7)

    def work(number: int) -> str:
        stream = llm.stream(f"Q{number}", seed=number, max_tokens=LONG)
        if number < 3:
            next(stream)
        begun.wait(WAIT)
        try:
            list(stream)
        except InputError as error:  # it had not begun
            return error.message
        assert stream.completion is not None
        return stream.completion.finish_reason

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(work, i) for i in range(6)]
        begun.wait(WAIT)
        llm.close()
        reasons = {f.result(WAIT) for f in futures}
    assert reasons <= {"cancelled", "the model is closed"}


def test_threads_that_stream_close_and_cancel_at_random(llm: LLM) -> None:
    alone = [ask(llm, i) for i in range(8)]
    llm.forget()

    def work(number: int) -> None:
        for turn in range(6):
            stream = llm.stream(f"Q{number}", seed=number, max_tokens=40)
            text = ""
            for count, piece in enumerate(stream):
                text += piece
                if turn % 3 == 1 and count == number:
                    stream.close()
                if turn % 3 == 2 and count == number:
                    stream.cancel()
            if turn % 3 == 0:
                assert text == alone[number]
            else:
                assert alone[number].startswith(text)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert llm.engine.pages.num_used == llm.engine.prefixes.num_pages


def test_a_plan_counts_every_window(path: Path) -> None:
    one, four = PlanOptions(max_context=256), PlanOptions(max_context=256, parallel=4)
    with LLM(path, memory=one) as single, LLM(path, memory=four) as many:
        assert many.plan.ledger.kv == 4 * single.plan.ledger.kv
        assert many.engine.pages.num_pages == 4 * single.engine.pages.num_pages
        assert many.engine.logit_rows > single.engine.logit_rows
        assert many.plan.ledger.workspace > single.plan.ledger.workspace
