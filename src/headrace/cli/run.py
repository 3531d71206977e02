"""`headrace run`: one answer, or a chat. Owns the flags and where text and statistics go."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from headrace import config, locate
from headrace.artifact.jsontext import read_bytes
from headrace.cli import progress, stats
from headrace.cli.answer import answer
from headrace.cli.memory_options import DEFAULT_MEMORY, MemoryOptions
from headrace.cli.prefix_options import DEFAULT_PREFIX, PrefixOptions
from headrace.cli.whole import WHOLE, WHOLE_AUTO_OR_OFF
from headrace.drafting import DEFAULT_DRAFT, Draft, check_draft
from headrace.engine.damped import DampedParams
from headrace.engine.prefix_disk import DiskOptions
from headrace.engine.speculate import DEFAULT_SPECULATE, Speculate, depth_of
from headrace.errors import FileError, InputError, SettingError
from headrace.llm import DEFAULT_MODEL, LLM
from headrace.memory.inputs import PlanOptions
from headrace.options import How
from headrace.serve.process.lock import beside
from headrace.values import GenerationStats, SamplingParams

if TYPE_CHECKING:
    from headrace.text.grammar import Grammar

Text = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
NO_DEFAULT = Parameter(show_default=False)
DEFAULTS = SamplingParams()
MAX_PROMPT_BYTES = 64 << 20
MAX_GRAMMAR_BYTES = 2 << 20
ADAPTER = "adapter"  # the name of the one that was given


def _about(text: str) -> Parameter:
    return Parameter(help=text, negative=())


@Parameter(name="*")
@dataclass(frozen=True)
class SamplingFlags:
    """The flags that say how tokens are picked."""

    greedy: Annotated[
        bool, NO_DEFAULT, _about("Always pick the likeliest token: temperature 0.")
    ] = False
    damped: Annotated[
        bool,
        NO_DEFAULT,
        _about(
            "Greedy, but what repeats the answer so far is less likely: ends loops without chance."
        ),
    ] = False
    seed: Annotated[
        int | None,
        WHOLE,
        _about("Seed of the draws, 0 to 2^64 - 1. Without it a random one is drawn and reported."),
    ] = None
    max_tokens: Annotated[
        int | None,
        WHOLE,
        _about(
            "Most tokens to write; a character that the last one leaves unfinished is left out. "
            "Without it, as many as the context holds."
        ),
    ] = None
    temperature: Annotated[
        float | None,
        _about(f"0 is greedy, as is less than 2^-20; {DEFAULTS.temperature} if not given."),
    ] = None
    top_p: Annotated[
        float,
        _about("Keep the likeliest tokens that together have this probability; 1 keeps all."),
    ] = DEFAULTS.top_p
    top_k: Annotated[int, WHOLE, _about("Keep this many of the likeliest tokens; 0 keeps all.")] = (
        DEFAULTS.top_k
    )
    min_p: Annotated[
        float,
        _about("Keep tokens that are at least this share as likely as the likeliest; 0 keeps all."),
    ] = DEFAULTS.min_p
    presence_penalty: Annotated[
        float, _about("Subtracted from the logit of every token that the answer holds already.")
    ] = DEFAULTS.presence_penalty
    repetition_penalty: Annotated[
        float,
        _about(
            "Makes the tokens of the prompt and the answer less likely: divides a positive logit, "
            "multiplies a negative one; 1 does nothing."
        ),
    ] = DEFAULTS.repetition_penalty
    stop: Annotated[
        list[str] | None,
        Parameter(allow_leading_hyphen=True),
        _about("End in front of this text; may be given several times."),
    ] = None

    def params(self) -> SamplingParams:
        """The same as a value. Raises SettingError."""
        chosen = {f.name: getattr(self, f.name) for f in fields(SamplingParams)}
        chosen |= {
            "temperature": _temperature(
                "damped" if self.damped else "greedy" if self.greedy else None, self.temperature
            )
        }
        return SamplingParams(**{**chosen, "stop": tuple(map(_utf8, self.stop or ()))})


NO_FLAGS = SamplingFlags()


@Parameter(name="*")
@dataclass(frozen=True)
class GrammarFlags:
    """The flags that say what an answer has to be: at most one of them."""

    json_schema: Annotated[
        str | None,
        _about(
            "Answer in JSON that this schema allows: a file, the schema's text, which begins with {, or @ and the "
            "name of one that the model carries (headrace schema)."
        ),
    ] = None
    regex: Annotated[
        str | None,
        Parameter(allow_leading_hyphen=True),
        _about("Answer with a text that this regular expression matches as a whole."),
    ] = None
    grammar: Annotated[
        Path | None,
        _about("Answer with a text of the grammar in this file: EBNF as Lark writes it, or GBNF."),
    ] = None

    def compiled(self, llm: LLM) -> Grammar | None:
        """Raises GrammarError, FileError, or InputError for more than one flag."""
        if self == NO_GRAMMAR:
            return None
        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith(("{", "@")):
            schema = _read_text(Path(schema))
        grammar = None if self.grammar is None else _read_text(self.grammar)
        regex = None if self.regex is None else _utf8(self.regex)
        return llm.compile(schema=schema, regex=regex, grammar=grammar)


NO_GRAMMAR = GrammarFlags()


@Parameter(name="*")
@dataclass(frozen=True)
class ReportFlags:
    """The flags that say what is told besides the answer."""

    trace_routes: Annotated[
        Path | None,
        _about(
            "Write the experts that every position of every layer chose to this file (models with experts)."
        ),
    ] = None
    stats_json: Annotated[
        Path | None, _about("Also write the statistics to this file as JSON; needs a prompt.")
    ] = None
    digest: Annotated[
        Flag, _about("Print the fingerprint in place of the answer; needs a prompt.")
    ] = False

    def check_writable(self) -> None:
        """Raises an error for statistics that could not be written."""
        if self.stats_json is not None:
            stats.check_writable(self.stats_json)

    def check(self, chat: bool, raw: bool) -> None:
        """Raises InputError for what needs a prompt."""
        if chat and (raw or self.digest or self.stats_json is not None):
            raise InputError(
                "--raw, --digest and --stats-json need a prompt",
                hint="give --prompt, or pipe one in",
            )


NO_REPORT = ReportFlags()


@Parameter(name="*")
@dataclass(frozen=True)
class DraftFlags:
    """The flags that say what is drafted, and by whom."""

    speculate: Annotated[
        Speculate,
        WHOLE_AUTO_OR_OFF,
        _about(
            "Tokens to draft and to check together: a number up to 15, auto for as many as pay, or off. The answer is "
            "the same."
        ),
    ] = DEFAULT_SPECULATE
    draft: Annotated[
        Draft,
        _about(
            "Where drafts come from: lookup (what came before in prompt and answer), mtp (a head that the model has), "
            "model (--draft-model), or auto: lookup, and where it finds nothing what else there is."
        ),
    ] = DEFAULT_DRAFT
    draft_model: Annotated[
        str | None,
        _about("A smaller model with the same vocabulary that drafts; --memory-gb counts both."),
    ] = None

    def check(self) -> None:
        """Raises SettingError."""
        check_draft(self.draft, self.draft_model is not None)
        if depth_of(self.speculate) == 0 and (self.draft_model or self.draft != DEFAULT_DRAFT):
            raise SettingError(
                "drafts are asked for, and speculate is off", hint="give --speculate auto"
            )


NO_DRAFTS = DraftFlags()


def run(
    model: str = DEFAULT_MODEL,
    *,
    prompt: Text = None,
    system: Text = None,
    raw: Flag = False,
    sampling: SamplingFlags = NO_FLAGS,
    constraint: GrammarFlags = NO_GRAMMAR,
    drafts: DraftFlags = NO_DRAFTS,
    adapter: Path | None = None,
    threads: Annotated[int | None, WHOLE] = None,
    kernels: str | None = None,
    memory: MemoryOptions = DEFAULT_MEMORY,
    prefix: PrefixOptions = DEFAULT_PREFIX,
    report: ReportFlags = NO_REPORT,
) -> int:
    """Answer a prompt, or chat when there is a terminal and no prompt.

    The answer goes to standard output, statistics to standard error; they end in a fingerprint of the logits, which is
    the same on every machine. Control-C ends an answer with exit code 130; where it is ignored on entry, as in a
    background job of nohup, it stays ignored. HEADRACE_THREADS and HEADRACE_KERNELS set what the flags do not.

    Parameters
    ----------
    model
        A name (`headrace pull` lists them), an artifact, a GGUF file or a model directory.
    prompt
        What to answer. Without it, standard input is read when it is piped, at most 64 MiB.
    system
        A system message in front of the prompt or the chat.
    raw
        Continue the prompt as it stands, without the chat template.
    adapter
        A LoRA adapter of the model: an artifact of headrace convert, or a PEFT folder, which is converted once.
    threads
        Threads of the kernels; every usable processor if not set.
    kernels
        Kernel tier, auto if not set: amx, avx512, avx2, neon, portable or reference. None changes the answer.
    """
    params, system = sampling.params(), None if system is None else _utf8(system)
    drafts.check()
    report.check_writable()
    text = _prompt(prompt, raw)
    report.check(text is None, raw)
    with loaded(
        model,
        threads=threads,
        kernels=kernels,
        memory=memory.options(),
        trace_routes=report.trace_routes,
        prefix_disk=prefix.options(),
        adapter=adapter,
        drafts=drafts,
    ) as (llm, facts):
        how = _how(llm, sampling, constraint, drafts, adapter)
        if text is None:
            return _chat(llm, facts, system, params, how)
        ids = llm.prompt_ids(text, system=system, raw=raw)
        code = answer(llm, llm.stream_ids(ids, params, continues=raw, **how), quiet=report.digest)
        return _report(llm, facts, code, report.stats_json, report.digest)


def _how(
    llm: LLM,
    sampling: SamplingFlags,
    constraint: GrammarFlags,
    drafts: DraftFlags,
    adapter: Path | None,
) -> How:
    how: How = {"grammar": constraint.compiled(llm), "speculate": drafts.speculate}
    if sampling.damped:
        how["damped"] = DampedParams.for_vocab(llm.engine.config.vocab_size)
    if adapter is not None:
        how["adapter"] = ADAPTER
    return how


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, MAX_GRAMMAR_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"byte {error.start}", "is not UTF-8") from None


def _utf8(argument: str) -> str:
    """An argument's bytes read as UTF-8, whatever the locale says that they are."""
    return os.fsencode(argument).decode("utf-8", "surrogateescape")


def _temperature(how: str | None, temperature: float | None) -> float:
    """how: the flag that picks without chance, if any."""
    if how is None:
        return DEFAULTS.temperature if temperature is None else temperature
    if temperature:
        raise SettingError(f"{how} means temperature 0, but temperature is {temperature}")
    return 0.0


def _prompt(given: str | None, raw: bool) -> str | bytes | None:
    """The prompt as given or piped; None where a person can be asked."""
    if given is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    if given is not None:
        text: str | bytes = _utf8(given)
    else:
        piped = _piped()
        text = piped if raw else piped.removesuffix(b"\n").removesuffix(b"\r")
    if not text:
        raise InputError("the prompt is empty")
    return text


def _piped() -> bytes:
    """Standard input, which may have no end."""
    if sys.stdin is None:
        return b""
    piped = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(piped) > MAX_PROMPT_BYTES:
        raise InputError(f"the piped prompt is longer than {MAX_PROMPT_BYTES:,} bytes")
    return piped


@contextmanager
def loaded(
    model: str,
    *,
    threads: int | None,
    kernels: str | None,
    memory: PlanOptions,
    trace_routes: Path | None = None,
    prefix_disk: DiskOptions | None = None,
    adapter: Path | None = None,
    drafts: DraftFlags = NO_DRAFTS,
) -> Iterator[tuple[LLM, stats.RunFacts]]:
    """A model found (converted or pulled, with progress, if need be) and opened.

    Raises ModelBusyError while a server of this user runs.
    """
    with progress.shown() as report:
        path = locate.locate(model, progress=report)
        smaller = drafts.draft_model
        second = None if smaller is None else locate.locate(smaller, progress=report)
    start = time.perf_counter()
    with (
        beside(config.load().home),
        LLM(
            path,
            threads=threads,
            kernels=kernels,
            memory=memory,
            trace_routes=trace_routes,
            prefix_disk=prefix_disk,
            adapters=None if adapter is None else {ADAPTER: adapter},
            draft=drafts.draft,
            draft_model=second,
        ) as llm,
    ):
        backend = llm.engine.backend
        yield (
            llm,
            stats.RunFacts(
                identity=llm.artifact.identity,
                kernels=backend.name,
                threads=getattr(backend, "threads", 1),
                load_seconds=time.perf_counter() - start,
                adapter=None if adapter is None else llm.adapters[ADAPTER],
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
    llm: LLM,
    facts: stats.RunFacts,
    system: str | None,
    sampling: SamplingParams,
    how: How,
) -> int:
    from headrace.cli import chat

    return chat.chat(llm, facts, system, sampling, how)
