"""What exact reuse of prefixes is worth: replays of conversations, with reuse at every token, aligned, and cold.

Aligned is the rule of engines whose results depend on how a prompt was cut: a state is saved where a prefill pass of
the prompt ended, and only such a state is gone on from, by passes of the same size; generated tokens are none.
It is simulated here by forgetting what the rule would not have. All answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import machine, model
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.speculate import ARTICLE, CODE
from bench.systems import HEADRACE
from headrace.llm import LLM
from headrace.values import GenerationStats, Message, SamplingParams

MODES = ("exact", "aligned", "cold")
CONTEXT = 4096
REPLY_TOKENS = 24

RULES = "\n".join(
    f"{number}. {rule}"
    for number, rule in enumerate(
        (
            f"When the customer asks about {topic}, answer in at most {size} short sentences, name the "
            f"page of the handbook, and never promise {promise}."
            for topic, size, promise in (
                ("a delivery that is late", 3, "a date"),
                ("a refund", 2, "an amount"),
                ("a broken part", 3, "a repair at home"),
                ("an account that is locked", 2, "access on the same day"),
                ("an invoice", 2, "a change after the month has ended"),
                ("opening hours", 1, "an appointment on a holiday"),
                ("a discount", 2, "one that is not in the list"),
                ("a cancelled order", 3, "that it can be undone"),
                ("the warranty", 3, "more than two years"),
                ("personal data", 2, "anything but what the policy says"),
                ("a complaint about a colleague", 4, "a result"),
                ("a missing parcel", 3, "that it will be found"),
            )
        ),
        1,
    )
)
SYSTEM = f"You answer customers of a shop for bicycles. Follow these rules:\n{RULES}"
TURNS = (
    (
        "My order has not arrived. What can I do?",
        "It was the blue one.",
        "Thank you. And the lock?",
    ),
    ("The brake squeaks.", "Only when it rains.", "Can you repair it tomorrow?"),
    ("I want my money back.", "I have the bill.", "How long does it take?"),
)
TEXT = f"{RULES}\n\n{ARTICLE}\n\n{CODE}"
EDITS = (("1874", "1875"), ("whale oil", "fish oil"), ("Anna", "Hanna"), ("twenty thousand", "a million"))  # fmt: skip
AGENT = "You edit a repository. Reply with one command.\n\n" + "\n\n".join(
    f"def handler_{n}(request):\n"
    f'    """Answers requests of kind {n}."""\n'
    f"    value = request.get('value', {n})\n"
    f"    return {{'kind': {n}, 'value': value * {n + 2}}}"
    for n in range(24)
)

Replay = Iterator[tuple[list[int], Callable[[str], None]]]  # a prompt, and who is told the reply


@dataclass
class Spent:
    """One replay in one mode."""

    requests: int = 0
    prompt_tokens: int = 0
    read_tokens: int = 0
    seconds: float = 0.0  # to first tokens
    fingerprint: str = ""

    def add(self, stats: GenerationStats) -> None:
        self.requests += 1
        self.prompt_tokens += stats.prompt_tokens
        self.read_tokens += stats.read_tokens
        self.seconds += stats.prefill_seconds
        self.fingerprint += stats.fingerprint


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "reuse"."""
    run = machine.new_run(command("reuse", settings))
    rows = [row for threads in settings.threads for row in _rows(settings, threads, run)]
    append(settings.results / "reuse.jsonl", rows)
    return rows


def chats(llm: LLM) -> Replay:
    """Conversations of several turns with one system message."""
    for questions in TURNS:
        messages = [Message("system", SYSTEM)]
        for question in questions:
            messages.append(Message("user", question))
            replies: list[str] = []
            yield llm.chat_ids(messages), replies.append
            messages.append(Message("assistant", replies[0]))


def edits(llm: LLM) -> Replay:
    """A question about a text that is edited in the middle, each time further behind."""
    text = TEXT
    for before, after in (("", ""), *EDITS):
        text = text.replace(before, after) if before else text
        yield llm.prompt_ids(f"{text}\n\nWho was the last keeper?"), lambda reply: None


def agent(llm: LLM) -> Replay:
    """A long prompt whose end changes: what was done, and a state that is never the same."""
    log = ""
    for step in range(6):
        state = f"Step {step}: {step * 7} tests pass, {41 - step * 7} fail."
        replies: list[str] = []
        yield llm.prompt_ids(f"{AGENT}\n\nDone so far:\n{log}\n{state}"), replies.append
        log += f"- {replies[0][:60]}\n  handler_{step} was changed, {step + 3} lines.\n"


REPLAYS = {
    "a chat with a system message": chats,
    "edits in a text": edits,
    "a coding agent": agent,
}


def aligned(prompt: Sequence[int], earlier: Sequence[Sequence[int]], rows: int) -> int:
    """How much of a prompt the rule reuses, by passes of `rows` tokens; its last token is always read."""
    shared = max((_common(prompt[:-1], other) for other in earlier), default=0)
    return shared // rows * rows


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(ids, others, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def replayed(llm: LLM, replay: Callable[[LLM], Replay], mode: str, rows: int) -> Spent:
    """rows: of a prefill pass."""
    llm.forget()
    spent, earlier = Spent(), list[list[int]]()
    params = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS)
    engine = llm.engine
    for prompt, tell in replay(llm):
        sequence = engine.new_sequence()
        if mode != "cold":
            engine.resume(sequence, prompt[:-1])
        if mode == "aligned":
            sequence.rewind(min(len(sequence), aligned(prompt, earlier, rows)))
        tokens = [t.id for t in engine.generate(prompt, params, sequence=sequence)]
        if mode != "cold":
            engine.keep(sequence, len(prompt))
        sequence.release()
        earlier.append(prompt)
        tell(llm.detokenize(tokens))
        assert engine.stats is not None
        spent.add(engine.stats)
    return spent


def _rows(settings: Settings, threads: int, run: Run) -> Iterator[Row]:
    with LLM(model.kept_artifact(settings), threads=threads, max_context=CONTEXT) as llm:
        for name, replay in REPLAYS.items():
            done: dict[str, list[Spent]] = {mode: [] for mode in MODES}
            replayed(llm, replay, "exact", llm.plan.chunk_rows)
            for _ in range(settings.rounds):
                for mode in MODES:
                    done[mode].append(replayed(llm, replay, mode, llm.plan.chunk_rows))
            if len({s.fingerprint for each in done.values() for s in each}) != 1:
                raise AssertionError(f"{name}: reuse changed an answer")
            for mode, each in done.items():
                yield _row(name, mode, each, llm.plan.chunk_rows, threads, run)


def _row(name: str, mode: str, each: list[Spent], rows: int, threads: int, run: Run) -> Row:
    last = each[-1]
    facts: dict[str, Any] = {
        "mode": mode,
        "requests": last.requests,
        "prompt_tokens": last.prompt_tokens,
        "read_tokens": last.read_tokens,
        "pass_rows": rows,
    }
    samples = tuple(s.seconds / s.requests for s in each)
    return Row("reuse", name, HEADRACE, threads, "s", samples, run, facts)
