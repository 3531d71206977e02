"""`headrace context-check`: does a context of this length fit its memory plan, and how long does it take?"""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from cyclopts import Parameter

from headrace import config, locate
from headrace.cli import progress
from headrace.cli.memory_options import DEFAULT_MEMORY, MemoryOptions
from headrace.cli.whole import WHOLE
from headrace.errors import SettingError
from headrace.llm import DEFAULT_MODEL, LLM
from headrace.memory.facts import model_facts, plan_model
from headrace.memory.inputs import MAX_CONTEXT, PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.machine import process_memory, read_machine
from headrace.serve.process.lock import beside
from headrace.values import GenerationStats, SamplingParams

DEFAULT_TOKENS = 8192
FIRST_RUNG = 2048
OVER = 1  # exit code where a plan was not kept


@dataclass(frozen=True)
class Check:
    """One prompt through the engine. Sizes in bytes, times in seconds.

    tokens: of the prompt and the reply together; reply: the ids that were written.
    """

    tokens: int
    target_bytes: int
    window: int
    peak_bytes: int
    group_peak_bytes: int | None
    fits: bool
    stats: GenerationStats
    reply: tuple[int, ...]


def context_check(
    model: str = DEFAULT_MODEL,
    *,
    tokens: Annotated[int | None, WHOLE] = None,
    reply_tokens: Annotated[int, WHOLE] = 16,
    ladder: Annotated[bool, Parameter(negative=())] = False,
    plan_only: Annotated[bool, Parameter(negative=())] = False,
    threads: Annotated[int | None, WHOLE] = None,
    kernels: str | None = None,
    memory: MemoryOptions = DEFAULT_MEMORY,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Read a made-up prompt through the engine and write a reply; report time, speed and peak memory against the plan.

    The exit code is 1 where the process took more than its plan allows.

    Parameters
    ----------
    model
        A name, an artifact, a GGUF file or a model directory.
    tokens
        Length of prompt and reply together. If not given, 8,192 or what the model and --max-context hold, if less.
    reply_tokens
        How many of them to write; end tokens do not end the reply.
    ladder
        Try 2,048 tokens first and double up to --tokens, in one process; end where the plan is not kept.
    plan_only
        Show the plan and load nothing.
    threads
        Threads of the kernels; every usable processor if not set.
    kernels
        Kernel tier, auto if not set.
    json
        One JSON object for each prompt; sizes in bytes.
    """
    options = memory.options()
    limit = MAX_CONTEXT if options.max_context == "auto" else options.max_context
    _check_lengths(tokens, reply_tokens, limit)
    with progress.shown() as report:
        path = locate.locate(model, progress=report)
    if tokens is None:
        tokens = min(DEFAULT_TOKENS, limit, model_facts(path, threads=1).context)
        _check_lengths(tokens, reply_tokens, limit)
    if options.max_context == "auto":
        options = replace(options, max_context=tokens)
    if plan_only:
        plan = plan_model(path, options, read_machine(), threads=threads)
        return _show_plan(plan.for_loading(), json)
    kept = True
    for check in _checks(
        str(path), _rungs(tokens, reply_tokens, ladder), reply_tokens, options, threads, kernels
    ):
        text = json_text.dumps(asdict(check)) if json else "\n".join(_lines(check))
        print(text, flush=True)
        kept = kept and check.fits
    return 0 if kept else OVER


def _check_lengths(tokens: int | None, reply_tokens: int, limit: int) -> None:
    """Refuse what no model can do, before one is converted or loaded. Raises SettingError."""
    for name, value in (("tokens", tokens), ("reply_tokens", reply_tokens)):
        if value is not None and value < 1:
            raise SettingError(f"{name} is {value}; it must be at least 1")
    if tokens is not None and tokens > limit:
        raise SettingError(f"tokens is {tokens}, which max_context, {limit}, does not hold")
    most = limit if tokens is None else tokens
    if reply_tokens >= most:
        raise SettingError(f"reply_tokens is {reply_tokens}: of {most} tokens none is left to read")


def _rungs(tokens: int, reply_tokens: int, ladder: bool) -> list[int]:
    """Lengths to try, replies included, shortest first."""
    rungs, rung = [tokens], FIRST_RUNG
    while ladder and rung < tokens:
        rungs.append(rung)
        rung *= 2
    return sorted(rung for rung in rungs if rung > reply_tokens)


def _checks(
    path: str,
    rungs: list[int],
    reply_tokens: int,
    options: PlanOptions,
    threads: int | None,
    kernels: str | None,
) -> Iterator[Check]:
    with (
        beside(config.load().home),
        LLM(path, threads=threads, kernels=kernels, memory=options) as llm,
    ):
        llm.engine.end_tokens = frozenset()
        for rung in rungs:
            check = _check(llm, rung, reply_tokens)
            yield check
            if not check.fits:
                return


def _check(llm: LLM, tokens: int, reply_tokens: int) -> Check:
    """One prompt with its reply: `tokens` together."""
    size = tokens - reply_tokens
    vocab = llm.engine.config.vocab_size
    # Differs from the first token on, so that no rung reuses what another one read.
    prompt = [(7919 * i * i + 104_729 * i + size) % vocab for i in range(size)]
    params = SamplingParams(temperature=0.0, max_tokens=reply_tokens)
    print(f"reading {size:,} tokens", file=sys.stderr, flush=True)
    reply = tuple(token.id for token in llm.engine.generate(prompt, params))
    stats, used = llm.engine.stats, process_memory()
    assert stats is not None
    return Check(
        tokens=tokens,
        target_bytes=llm.plan.target_bytes,
        window=llm.plan.window,
        peak_bytes=used.peak_bytes,
        group_peak_bytes=used.group_peak_bytes,
        fits=used.peak_bytes <= llm.plan.target_bytes and len(reply) == reply_tokens,
        stats=stats,
        reply=reply,
    )


def _lines(check: Check) -> Iterator[str]:
    stats = check.stats
    yield (
        f"{check.tokens:,} tokens: {stats.read_tokens:,} read in {stats.prefill_seconds:.2f} s"
        f" ({stats.prefill_rate:,.1f} tok/s),"
        f" wrote {stats.new_tokens} ({stats.decode_rate:,.1f} tok/s)"
    )
    group = (
        "" if check.group_peak_bytes is None else f", its group {check.group_peak_bytes / 1e9:.2f}"
    )
    verdict = "kept" if check.fits else "NOT kept"
    yield (
        f"  peak {check.peak_bytes / 1e9:.2f} GB{group}; the plan allows {check.target_bytes / 1e9:.2f}: {verdict}"
    )
    yield f"  fingerprint {stats.fingerprint}"


def _show_plan(plan: Plan, json: bool) -> int:
    if json:
        print(json_text.dumps(asdict(plan), indent=1))
    else:
        for name, nbytes in plan.ledger.rows().items():
            print(f"{name:>10}  {nbytes / 1e9:8.3f} GB")
        print(
            f"{'total':>10}  {plan.target_bytes / 1e9:8.3f} GB for a context of {plan.window:,} tokens"
        )
    return 0
