"""Loads a model: artifact, memory plan, tokenizer, engine, and what is used through the engine.

What fails on the way leaves nothing loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace import locate
from headrace.adapters import NamedAdapters, needed_bytes, open_adapters
from headrace.artifact.container import Artifact, open_artifact
from headrace.drafting import (
    DEFAULT_DRAFT,
    Draft,
    Drafting,
    check_draft,
    check_vocabulary,
    draft_engine,
)
from headrace.engine.engine import Engine
from headrace.engine.planned import governor, stream_options
from headrace.engine.prefix_disk import DiskOptions
from headrace.engine.prefix_tier import open_disk
from headrace.engine.scheduler import Scheduler
from headrace.engine.turns import Turns
from headrace.memory.facts import kernel_threads, plan_model
from headrace.memory.governor import Governor
from headrace.memory.inputs import PlanOptions
from headrace.memory.ledger import Plan
from headrace.memory.machine import read_machine
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model.

    threads, kernels: None takes the settings'. trace_routes: a file that gets the experts that every position chose.
    beside_bytes: what the caller will take beside the model, inside the budget. with_forecast: whether a fitted
    forecast is used. prefix_disk: where prefixes are kept beyond this process; a directory that cannot be used is told
    in a warning. adapters: LoRA adapters by name, each an artifact of this model or a PEFT folder, which is converted.
    draft: where drafts come from that a generation asks for (`speculate`); draft_model: a smaller model with the same
    vocabulary that makes them, inside the budget.
    """

    threads: int | None = None
    kernels: str | None = None
    memory: PlanOptions = PlanOptions()
    trace_routes: Path | None = None
    beside_bytes: int = 0
    with_forecast: bool = True
    prefix_disk: DiskOptions | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    draft: Draft = DEFAULT_DRAFT
    draft_model: str | Path | None = None


@dataclass
class Loaded:
    """A model in memory, and what it is used through."""

    artifact: Artifact
    plan: Plan
    tokenizer: Tokenizer
    template: ChatTemplate | None
    engine: Engine
    drafting: Drafting
    adapters: NamedAdapters
    governor: Governor | None
    turns: Turns

    def close(self) -> None:
        self.drafting.close()
        self.engine.close()


def load(model: str | Path, options: LoadOptions) -> Loaded:
    """Raises what `LLM` raises."""
    check_draft(options.draft, options.draft_model is not None)
    artifact = replace(open_artifact(locate.locate(model)), with_forecast=options.with_forecast)
    smaller = None
    if options.draft_model is not None:
        smaller = open_artifact(locate.locate(options.draft_model))
    adapters = open_adapters(options.adapters, artifact)
    threads, kernels = locate.compute_settings(options.threads, options.kernels)
    machine = read_machine()
    plan = plan_model(
        artifact,
        options.memory,
        machine,
        threads=threads,
        beside_bytes=options.beside_bytes
        + needed_bytes(adapters, kernel_threads(threads, machine)),
        draft=smaller,
    ).for_loading()
    tokenizer = _tokenizer(artifact)
    if smaller is not None:
        check_vocabulary(artifact, tokenizer, smaller)
    engine = Engine(
        artifact,
        threads=threads,
        kernels=kernels,
        max_context=plan.window,
        num_sequences=plan.num_sequences,
        retained_contexts=plan.retained_contexts,
        logit_rows=plan.logit_rows,
        chunk=plan.chunk_rows,
        experts=stream_options(plan) if artifact.records else None,
        trace_routes=options.trace_routes,
    )
    drafting: Drafting | None = None
    try:
        second = None
        if smaller is not None:
            second = draft_engine(smaller, plan.window, threads=threads, kernels=kernels)
        drafting = Drafting(artifact, engine, options.draft, second)
        if options.prefix_disk is not None and (disk := open_disk(options.prefix_disk)) is not None:
            engine.attach_disk(disk)
        named = NamedAdapters(engine, adapters, plan.ledger.headroom)
        engine.warm()
        keeper = governor(plan, engine.experts)
        turns = Turns(Scheduler(engine, keeper))
        template = _template(artifact, tokenizer)
        return Loaded(artifact, plan, tokenizer, template, engine, drafting, named, keeper, turns)
    except BaseException:
        if drafting is not None:
            drafting.close()
        engine.close()
        raise


def _tokenizer(artifact: Artifact) -> Tokenizer:
    info = artifact.manifest.tokenizer
    return Tokenizer.from_file(artifact.tokenizer_path, bos=info.bos, eos=info.end)


def _template(artifact: Artifact, tokenizer: Tokenizer) -> ChatTemplate | None:
    if artifact.template is None:
        return None
    bos, eos = (_name(tokenizer, i) for i in (tokenizer.bos, next(iter(tokenizer.eos), None)))
    return ChatTemplate(artifact.template, bos=bos, eos=eos)


def _name(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
