"""`headrace run`: one answer, or a chat. Owns the flags and where text and statistics go."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from headrace import locate
from headrace.cli import progress, stats
from headrace.cli.answer import answer
from headrace.errors import InputError, SettingError
from headrace.llm import DEFAULT_MODEL, LLM
from headrace.values import GenerationStats, SamplingParams

Text = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Texts = Annotated[list[str] | None, Parameter(allow_leading_hyphen=True, negative=())]
Flag = Annotated[bool, Parameter(negative=())]
DEFAULTS = SamplingParams()


def run(
    model: str = DEFAULT_MODEL,
    *,
    prompt: Text = None,
    system: Text = None,
    raw: Flag = False,
    greedy: Flag = False,
    seed: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float = DEFAULTS.top_p,
    top_k: int = DEFAULTS.top_k,
    min_p: float = DEFAULTS.min_p,
    presence_penalty: float = DEFAULTS.presence_penalty,
    repetition_penalty: float = DEFAULTS.repetition_penalty,
    stop: Texts = None,
    threads: int | None = None,
    kernels: str | None = None,
    max_context: int | None = None,
    stats_json: Path | None = None,
    digest: Flag = False,
) -> int:
    """Answer a prompt, or chat when there is a terminal and no prompt.

    The answer goes to standard output, statistics to standard error; they end in a fingerprint of
    the logits, which is the same on every machine.

    Parameters
    ----------
    model
        A name (`headrace pull` lists them), an artifact, a GGUF file or a model directory.
    prompt
        What to answer. Without it, standard input is read when it is piped.
    system
        A system message for the conversation.
    raw
        Continue the prompt as it stands, without the chat template.
    greedy
        Pick the most likely token always: temperature 0.
    seed
        Seed of the draws, 0 to 2^64 - 1. Without it a random one is drawn and reported.
    max_tokens
        Most tokens to write. Without it, as many as the context holds.
    temperature
        0 is greedy; 0.7 if not given.
    top_p
        Keep the likeliest tokens that together have this probability; 1 keeps all.
    top_k
        Keep this many of the likeliest tokens; 0 keeps all.
    min_p
        Keep tokens at least this likely, relative to the likeliest; 0 keeps all.
    presence_penalty
        Subtracted from the logit of every token that occurred.
    repetition_penalty
        Divides the logit of every token that occurred; 1 does nothing.
    stop
        End before this text; may be given several times.
    threads
        Threads of the kernels; all usable processors if not given.
    kernels
        Kernel tier: amx, avx512, avx2, neon, portable, reference or auto.
    max_context
        Positions to make room for, at most the model's own.
    stats_json
        Also write the statistics to this file.
    digest
        Print the fingerprint in place of the answer.
    """
    sampling = SamplingParams(
        temperature=_temperature(greedy, temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
    )
    if stats_json is not None:
        stats.check_writable(stats_json)
    text = _prompt(prompt, raw)
    with loaded(model, threads=threads, kernels=kernels, max_context=max_context) as (llm, facts):
        if text is None:
            return _chat(llm, facts, system, sampling, raw)
        ids = llm.prompt_ids(text, system=system, raw=raw)
        code = answer(llm, llm.stream_ids(ids, sampling, continues=raw), quiet=digest)
        return _report(llm, facts, code, stats_json, digest)


def _temperature(greedy: bool, temperature: float | None) -> float:
    if not greedy:
        return DEFAULTS.temperature if temperature is None else temperature
    if temperature:
        raise SettingError(f"greedy means temperature 0, but temperature is {temperature}")
    return 0.0


def _prompt(given: str | None, raw: bool) -> str | bytes | None:
    """The prompt as given or piped; None where a person can be asked."""
    if given is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    if given is not None:
        text: str | bytes = given
    else:
        piped = b"" if sys.stdin is None else sys.stdin.buffer.read()
        text = piped if raw else piped.removesuffix(b"\n").removesuffix(b"\r")
    if not text:
        raise InputError("the prompt is empty")
    return text


@contextmanager
def loaded(
    model: str, *, threads: int | None, kernels: str | None, max_context: int | None
) -> Iterator[tuple[LLM, stats.RunFacts]]:
    """A model found (converted or pulled, with progress, if need be) and opened."""
    with progress.shown() as report:
        path = locate.locate(model, progress=report)
    start = time.perf_counter()
    with LLM(path, threads=threads, kernels=kernels, max_context=max_context) as llm:
        backend = llm.engine.backend
        yield (
            llm,
            stats.RunFacts(
                identity=llm.artifact.identity,
                kernels=backend.name,
                threads=getattr(backend, "threads", 1),
                load_seconds=time.perf_counter() - start,
            ),
        )


def _report(
    llm: LLM, facts: stats.RunFacts, code: int, stats_json: Path | None, digest: bool
) -> int:
    done = _stats(llm)
    if stats_json is not None:
        stats.write_json(stats_json, stats.as_json(done, facts))
    if digest:
        print(done.fingerprint, flush=True)
    print("\n".join(stats.lines(done, facts)), file=sys.stderr, flush=True)
    return code


def _stats(llm: LLM) -> GenerationStats:
    assert llm.last is not None
    return llm.last.stats


def _chat(
    llm: LLM, facts: stats.RunFacts, system: str | None, sampling: SamplingParams, raw: bool
) -> int:
    from headrace.cli import chat

    if raw:
        raise InputError("a raw prompt is missing", hint="give --prompt, or pipe one in")
    return chat.chat(llm, facts, system, sampling)
