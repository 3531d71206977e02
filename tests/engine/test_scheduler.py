"""The scheduler: who is cancelled leaves between layers, who fails fails alone, and whoever retries gets further."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tiny
from headrace.artifact.container import Artifact
from headrace.artifact.convert import convert
from headrace.engine.constraint import Guide
from headrace.engine.engine import Engine
from headrace.engine.pages import PagesExhaustedError
from headrace.engine.scheduler import AHEAD, Errand, Scheduler, Ticket
from headrace.errors import ConstraintError, ExpertReadError
from headrace.experts.stream import StreamOptions
from headrace.kernels.program import Batch
from headrace.values import GenerationStats, SamplingParams
from law import engines

LAYERS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
FEW = SamplingParams(temperature=0.0, max_tokens=4)
FAMILIES = ["llama", "qwen3_moe"]


@pytest.fixture(scope="module", params=FAMILIES)
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("deep") / request.param
    return tiny.make(folder, request.param, num_hidden_layers=LAYERS)


@contextmanager
def opened(artifact: Artifact, **options: Any) -> Iterator[Engine]:
    if artifact.records:
        options["experts"] = StreamOptions(12, 200, reserve=4)
    sizes = {"threads": 1, "context": 512, "num_sequences": 4, **options}
    with engines.opened(artifact, **sizes) as engine:
        engine.end_tokens = frozenset()
        yield engine


def prompt(length: int, number: int = 0) -> list[int]:
    return [(7 * i * i + 3 * i * (number + 1) + number) % 256 for i in range(length)]


def alone(engine: Engine, tokens: list[int], params: SamplingParams) -> tuple[list[int], str]:
    found = [t.id for t in engine.generate(tokens, params, reuse=False)]
    assert engine.stats is not None
    return found, engine.stats.fingerprint


class Watched:
    """Counts ranges of operations that the runner is asked for, and rows of each; `then` is done before each."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[int] = []
        self.then: Callable[[int], object] = lambda count: None
        self._run = engine._runner.run
        engine._runner.run = self._counted  # type: ignore[method-assign]

    def _counted(self, begin: int, end: int, batch: Batch, cache: Any) -> int:
        self.rows.append(len(batch.tokens))
        self.then(len(self.rows))
        return self._run(begin, end, batch, cache)


def taken(ticket: Ticket) -> list[int]:
    out: list[int] = []
    while token := ticket.pop():
        out.append(token.id)
    return out


def run(scheduler: Scheduler, ticket: Ticket) -> list[int]:
    out = []
    for _ in range(10_000):
        if ticket.ended:
            return out + taken(ticket)
        scheduler.step()
        out += taken(ticket)
    raise AssertionError("it never ended")


def step_to_the_end(scheduler: Scheduler, tickets: list[Ticket]) -> None:
    while not all(t.ended for t in tickets):
        scheduler.step()


def stats_of(ticket: Ticket) -> GenerationStats:
    assert ticket.stats is not None
    return ticket.stats


def test_who_is_cancelled_leaves_between_layers(deep: Artifact) -> None:
    """The others' rows go on, and give what they give alone."""
    with opened(deep, chunk=200) as engine:
        wanted = alone(engine, prompt(90, 1), GREEDY)
        engine.prefixes.clear()
        scheduler, watched = Scheduler(engine), Watched(engine)
        goes = Ticket(engine.generation(prompt(95), GREEDY))
        stays = Ticket(engine.generation(prompt(90, 1), GREEDY))
        for each in (goes, stays):
            scheduler.submit(each)
        told = []
        scheduler.woken = lambda: told.append(len(watched.rows))

        def then(count: int) -> None:
            goes.cancelled |= count == 3

        watched.then = then
        scheduler.step()
        assert watched.rows[:3] == [185] * 3
        assert set(watched.rows[4:]) == {90}
        assert goes.ended
        assert told[0] in (3, 4)  # and need not wait for the others
        assert (stats_of(goes).finish_reason, stats_of(goes).unread_tokens) == ("cancelled", 95)
        assert taken(stays) == wanted[0][:1]
        assert run(scheduler, stays) == wanted[0][1:]
        assert stats_of(stays).fingerprint == wanted[1]
        assert engine.pages.num_used == engine.prefixes.num_pages


def test_a_pass_ends_where_all_are_cancelled(deep: Artifact) -> None:
    with opened(deep, chunk=200) as engine:
        scheduler, watched = Scheduler(engine), Watched(engine)
        tickets = [Ticket(engine.generation(prompt(80, i), GREEDY)) for i in range(2)]
        for ticket in tickets:
            scheduler.submit(ticket)
        watched.then = lambda count: scheduler.cancel() if count == 2 else None
        scheduler.step()
        assert len(watched.rows) <= 3
        assert all(t.ended and t.error is None for t in tickets)
        assert engine.pages.num_used == 0


def test_a_short_pass_is_one_call(tiny_artifact: Callable[[str], Artifact]) -> None:
    """Decode does not pay for cancellation."""
    with opened(tiny_artifact("llama")) as engine:
        scheduler, watched = Scheduler(engine), Watched(engine)
        tickets = [Ticket(engine.generation(prompt(5, i), FEW)) for i in range(3)]
        for ticket in tickets:
            scheduler.submit(ticket)
        step_to_the_end(scheduler, tickets)
        assert watched.rows == [15, 3, 3, 3]


@pytest.mark.parametrize("patience", [1, 2, 3, 5])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside others"])
def test_who_always_gives_up_after_some_layers_gets_there(
    deep: Artifact, patience: int, company: bool
) -> None:
    """Once passes are short, every retry of the same prompt starts later than the last, whoever else reads and writes meanwhile.

    Until it has its answer, or but one token is left, which nobody can read in less than a pass.
    """
    with opened(deep, chunk=128, num_sequences=6) as engine:
        wanted = alone(engine, prompt(300), FEW)[0]
        engine.prefixes.clear()
        scheduler, watched = Scheduler(engine), Watched(engine)
        many = SamplingParams(temperature=0.0, max_tokens=400)
        starts: list[int] = []
        others: list[Ticket] = []
        for number in range(200):
            for ticket in [t for t in others if t.ended]:
                others.remove(ticket)
            while company and len(others) < 2:  # one that writes, one that reads
                long = Ticket(
                    engine.generation(prompt(100 + 300 * (len(others)), number + 7), many)
                )
                others.append(long)
                scheduler.submit(long)
                scheduler.step()
            ticket = Ticket(engine.generation(prompt(300), FEW))
            scheduler.submit(ticket)
            began = len(watched.rows)

            def then(count: int, ticket: Ticket = ticket, began: int = began) -> None:
                ticket.cancelled |= count - began > patience and ticket.generation.reading

            watched.then = then
            while not ticket.ended:
                scheduler.step()
                taken(ticket)
                for other in others:
                    taken(other)
            starts.append(stats_of(ticket).reused_tokens)
            if stats_of(ticket).finish_reason == "length" or starts[-1] == 299:
                break
        watched.then = lambda count: None
        last = Ticket(engine.generation(prompt(300), FEW))
        scheduler.submit(last)
        while not last.ended:
            scheduler.step()
            for other in others:
                taken(other)
        assert taken(last) == wanted
        assert stats_of(last).reused_tokens == 299
        assert starts[-1] > 0
        # The first two shorten the pass, from 128 rows to 16 and 8; each of the others gets further.
        assert all(before < after for before, after in pairwise(starts[2:]))


def test_what_was_read_of_a_cancelled_prompt_is_kept(deep: Artifact) -> None:
    with opened(deep, chunk=64) as engine:
        scheduler = Scheduler(engine)
        ticket = Ticket(engine.generation(prompt(200), GREEDY))
        scheduler.submit(ticket)
        scheduler.step()
        scheduler.step()
        ticket.cancelled = True
        scheduler.step()
        assert (stats_of(ticket).unread_tokens, engine.prefixes.num_tokens) == (72, 128)
        again = Ticket(engine.generation(prompt(200), GREEDY))
        scheduler.submit(again)
        run(scheduler, again)
        assert stats_of(again).reused_tokens == 128


class Dead:
    """A grammar of one token, after which nothing can follow."""

    ended = can_end = False

    def __init__(self) -> None:
        self._left = 3

    def mask(self) -> np.ndarray:
        return np.full(9, 0xFFFFFFFF if self._left else 0, np.uint32)

    def forced(self) -> list[int]:
        return []

    def advance(self, token: int) -> None:
        self._left -= 1


def test_a_dead_end_is_its_own(tiny_artifact: Callable[[str], Artifact]) -> None:
    with opened(tiny_artifact("llama")) as engine:
        assert Guide(None, engine.config.vocab_size, frozenset()).allowed is None
        wanted = alone(engine, prompt(9), GREEDY)[0]
        scheduler = Scheduler(engine)
        dead = Ticket(engine.generation(prompt(7), GREEDY, constraint=Dead()))  # type: ignore[arg-type]
        fine = Ticket(engine.generation(prompt(9), GREEDY))
        for each in (dead, fine):
            scheduler.submit(each)
        assert run(scheduler, fine) == wanted
        assert isinstance(dead.error, ConstraintError)
        assert len(taken(dead)) == 3
        assert stats_of(dead).new_tokens == 3


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_an_expert_that_cannot_be_read_ends_who_needs_it(
    tiny_artifact: Callable[[str], Artifact], family: str
) -> None:
    with opened(tiny_artifact(family)) as engine:
        wanted = alone(engine, prompt(9), GREEDY)[0]
        mixture = engine.mixture
        assert mixture is not None
        whole = mixture.run

        def fails(batch: Batch, *arguments: Any, **options: Any) -> None:
            if 255 in batch.tokens:
                raise ExpertReadError(0, 0)
            whole(batch, *arguments, **options)

        mixture.run = fails  # type: ignore[method-assign]
        scheduler = Scheduler(engine)
        bad = Ticket(engine.generation([3, 255], GREEDY))
        fine = Ticket(engine.generation(prompt(9), GREEDY))
        for each in (bad, fine):
            scheduler.submit(each)
        assert run(scheduler, fine) == wanted
        assert isinstance(bad.error, ExpertReadError)
        assert engine.pages.num_used == engine.prefixes.num_pages


def test_an_interrupt_in_a_pass_costs_nobody_a_token(deep: Artifact) -> None:
    with opened(deep, chunk=128) as engine:
        wanted = [alone(engine, prompt(60, i), FEW) for i in range(3)]
        for at in range(1, 10):
            engine.prefixes.clear()
            scheduler, watched = Scheduler(engine), Watched(engine)
            tickets = [Ticket(engine.generation(prompt(60, i), FEW)) for i in range(3)]

            def then(count: int, at: int = at) -> None:
                if count == at:
                    raise KeyboardInterrupt

            watched.then = then
            for ticket in tickets:
                scheduler.submit(ticket)
            with pytest.raises(KeyboardInterrupt):
                step_to_the_end(scheduler, tickets)
            watched.then = lambda count: None
            for ticket, (tokens, fingerprint) in zip(tickets, wanted, strict=True):
                assert run(scheduler, ticket) == tokens
                assert stats_of(ticket).fingerprint == fingerprint


def test_a_generation_waits_until_its_pages_are_free(
    tiny_artifact: Callable[[str], Artifact],
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    with opened(tiny_artifact("llama"), context=128, num_sequences=1) as engine:
        scheduler = Scheduler(engine)
        small = SamplingParams(temperature=0.0, max_tokens=5)
        first, second = (Ticket(engine.generation(prompt(20, i), params)) for i in range(2))
        third = Ticket(engine.generation(prompt(20, 2), small))  # would fit, but came last
        for ticket in (first, second, third):
            scheduler.submit(ticket)
        run(scheduler, first)
        assert not second.generation.began
        assert not third.generation.began
        run(scheduler, second)
        run(scheduler, third)
        assert [stats_of(t).new_tokens for t in (first, second, third)] == [100, 100, 5]


def test_what_can_never_fit_is_refused(tiny_artifact: Callable[[str], Artifact]) -> None:
    """Sequences of somebody else hold the pages: nobody would ever give them back."""
    with opened(tiny_artifact("llama"), context=128, num_sequences=1) as engine:
        other = engine.new_sequence()
        engine.read(other, prompt(70))
        scheduler = Scheduler(engine)
        ticket = Ticket(engine.generation(prompt(20), FEW))
        scheduler.submit(ticket)
        scheduler.step()
        assert isinstance(ticket.error, PagesExhaustedError)
        other.release()
        again = Ticket(engine.generation(prompt(20), FEW))
        scheduler.submit(again)
        assert len(run(scheduler, again)) == 4


def test_an_errand_waits_in_line(tiny_artifact: Callable[[str], Artifact]) -> None:
    with opened(tiny_artifact("llama"), context=128, num_sequences=1) as engine:
        wanted = engine.logits(prompt(100))
        scheduler = Scheduler(engine)
        ticket = Ticket(engine.generation(prompt(90), GREEDY))
        errand = Errand(lambda: engine.logits(prompt(100)), 2)
        failing = Errand(lambda: engine.logits([-1]), 1)
        for what in (ticket, errand, failing):
            scheduler.submit(what)
        scheduler.step()
        assert not errand.ended
        run(scheduler, ticket)
        scheduler.step()
        scheduler.step()
        assert np.array_equal(errand.result, wanted)
        assert "not in the vocabulary" in str(failing.error)


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A model whose values are clipped here and there."""
    base = tmp_path_factory.mktemp("loud")
    source = tiny.write_checkpoint(base / "source", "llama")
    weights = tiny.state(tiny.config("llama"))
    weights["model.embed_tokens.weight"][::7] *= np.float32(10**7)
    tiny.write_tensors(source / "model.safetensors", weights)
    return convert(source, base / "artifact")


def test_clips_are_counted_for_whose_rows_they_are(loud: Artifact) -> None:
    with opened(loud, chunk=32) as engine:
        asked = [(prompt(20 + 30 * i, i), FEW) for i in range(3)]
        wanted = []
        for tokens, params in asked:
            list(engine.generate(tokens, params, reuse=False))
            assert engine.stats is not None
            wanted.append(engine.stats.saturations)
        assert len({tuple(w.values()) for w in wanted}) == 3
        assert all(sum(w.values()) for w in wanted)
        scheduler = Scheduler(engine)
        tickets = [Ticket(engine.generation(*a, reuse=False)) for a in asked]
        for ticket in tickets:
            scheduler.submit(ticket)
        step_to_the_end(scheduler, tickets)
        assert [stats_of(t).saturations for t in tickets] == wanted


def test_who_is_ahead_and_left_did_what_was_taken(
    tiny_artifact: Callable[[str], Artifact],
) -> None:
    """Tokens that nobody took are in no statistics."""
    with opened(tiny_artifact("llama")) as engine:
        steps = engine.generate(prompt(9), GREEDY, reuse=False)
        wanted = [next(steps).id for _ in range(5)]
        steps.close()
        assert engine.stats is not None
        alone = engine.stats
        scheduler = Scheduler(engine)
        ticket = Ticket(engine.generation(prompt(9), GREEDY, reuse=False))
        scheduler.submit(ticket)
        for _ in range(AHEAD):
            scheduler.step()
        found = [ticket.pop() for _ in range(5)]
        assert [t.id for t in found if t] == wanted
        ticket.cancelled = True
        scheduler.reap()
        stats = stats_of(ticket)
        assert (stats.new_tokens, stats.fingerprint, stats.finish_reason, stats.saturations) == (
            alone.new_tokens,
            alone.fingerprint,
            alone.finish_reason,
            alone.saturations,
        )
