"""`headrace serve`: a model behind the APIs that clients speak. Owns the flags, and opens the model."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

from cyclopts import Parameter

import headrace
from headrace import config, locate
from headrace.cli import progress
from headrace.cli.memory_options import DEFAULT_MEMORY, MemoryOptions
from headrace.cli.prefix_options import DEFAULT_PREFIX, PrefixOptions
from headrace.cli.run import NO_DRAFTS, DraftFlags, Flag
from headrace.cli.whole import WHOLE
from headrace.engine.prefix_disk import DiskOptions
from headrace.errors import SettingError
from headrace.llm import DEFAULT_MODEL, LLM
from headrace.memory.inputs import PlanOptions
from headrace.serve.http.server import HOST, PORT
from headrace.serve.process.run import Opened, Site, run

# The first that comes near to an unknown path lends the shape of its error.
DIALECTS = ("openai_chat", "openai_responses", "anthropic", "ollama", "gateway")
PREFILL_MINUTES = 30.0
MAX_PREFILL_MINUTES = 100_000.0


def _about(text: str) -> Parameter:
    return Parameter(help=text, negative=())


@Parameter(name="*")
@dataclass(frozen=True)
class SiteFlags:
    """The flags that say where the server is reached, by whom, and how long."""

    host: Annotated[
        str,
        _about("The address to listen on. Beyond loopback a key is needed, and a proxy with TLS."),
    ] = HOST
    port: Annotated[int, WHOLE, _about("The port; 0 takes a free one.")] = PORT
    api_key: Annotated[
        str | None,
        Parameter(show_default=False),
        _about(
            "A key that clients have to bring. HEADRACE_API_KEY sets it where no list of processes shows it."
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        _about(
            "Another name that clients reach the server by, with or without a port; may be given several times."
        ),
    ] = None
    idle_exit: Annotated[
        float | None,
        _about(
            "Stop after so many minutes without a request and without a registered process that runs; 0 keeps serving."
        ),
    ] = None
    log_json: Annotated[Flag, _about("Log lines of JSON.")] = False

    def site(self, model: str) -> Site:
        """The same as a value. Raises SettingError."""
        settings = config.load()
        return Site(
            model=model,
            home=settings.home,
            host=self.host,
            port=self.port,
            api_key=settings.api_key if self.api_key is None else self.api_key,
            allow_hosts=tuple(self.allow_host or ()),
            idle_exit=self.idle_exit or None,
            log_json=self.log_json,
        )


NO_SITE = SiteFlags()


@dataclass(frozen=True)
class Asked:
    """What to open. adapters: folders by name; max_prefill_wait: seconds, None for any."""

    model: str
    name: str
    adapters: dict[str, Path]
    threads: int | None
    kernels: str | None
    memory: PlanOptions
    prefix_disk: DiskOptions | None
    reuse: bool
    drafts: DraftFlags
    max_prefill_wait: float | None


def serve(
    model: str = DEFAULT_MODEL,
    *,
    site: SiteFlags = NO_SITE,
    parallel: Annotated[int, WHOLE] = 1,
    max_prefill_wait: float = PREFILL_MINUTES,
    adapter: Annotated[list[str] | None, Parameter(negative=())] = None,
    drafts: DraftFlags = NO_DRAFTS,
    threads: Annotated[int | None, WHOLE] = None,
    kernels: str | None = None,
    memory: MemoryOptions = DEFAULT_MEMORY,
    prefix: PrefixOptions = DEFAULT_PREFIX,
    no_prefix_cache: Flag = False,
) -> int:
    """Serve a model to clients of OpenAI, Anthropic, Ollama and the AI SDK until it is stopped.

    Control-C and `headrace stop` end it in order: requests that run end with an error, and what is to be kept is
    written. A second one ends it at once. One process of a user has a model while a server runs. The log goes to
    standard error: a line for every request, with nothing of its text.

    Parameters
    ----------
    model
        A name (`headrace pull` lists them), an artifact, a GGUF file or a model directory.
    parallel
        Generations that may each fill the context at the same time. More share that room as far as it goes.
    max_prefill_wait
        Minutes from a request to its first token, with its wait in line, after which it fails; 0 waits for ever.
    adapter
        A LoRA adapter as NAME=PATH, which clients select as MODEL+NAME; may be given several times.
    threads
        Threads of the kernels; every usable processor if not set.
    kernels
        Kernel tier, auto if not set: amx, avx512, avx2, neon, portable or reference. None changes the answer.
    no_prefix_cache
        Read every prompt as a whole, and keep nothing of it. The answers are the same.
    """
    drafts.check()
    asked = Asked(
        model=model,
        name=served_name(model),
        adapters=adapters(adapter or []),
        threads=threads,
        kernels=kernels,
        memory=replace(memory.options(), parallel=parallel),
        prefix_disk=prefix.options(),
        reuse=not no_prefix_cache,
        drafts=drafts,
        max_prefill_wait=_seconds(max_prefill_wait),
    )
    if no_prefix_cache and asked.prefix_disk is not None:
        raise SettingError("--no-prefix-cache is given together with --prefix-cache-dir")
    return run(site.site(asked.name), partial(_open, asked))


def served_name(model: str) -> str:
    """What clients call a model: its name, or that of its file or folder."""
    path = Path(model).expanduser()
    if not (path.exists() or "/" in model or model.endswith(".gguf")):
        return model
    name = path.resolve().name.removesuffix(".gguf")
    return name.replace("+", "-") or "model"


def adapters(given: list[str]) -> dict[str, Path]:
    """Folders by name. Raises SettingError for what is not NAME=PATH, and for a name that is there twice."""
    out: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path) or "+" in name or not name.isprintable():
            raise SettingError(f"--adapter {text!r:.200} is not NAME=PATH, with a name without +")
        if name in out:
            raise SettingError(f"--adapter gives the name {name!r:.100} twice")
        out[name] = Path(path)
    return out


def _seconds(minutes: float) -> float | None:
    if not 0 <= minutes <= MAX_PREFILL_MINUTES:
        raise SettingError(
            f"--max-prefill-wait {minutes:g} is not between 0 and {MAX_PREFILL_MINUTES:g}"
        )
    return minutes * 60 or None


@contextmanager
def _open(asked: Asked) -> Iterator[Opened]:
    from headrace.serve.model.backend import ModelBackend

    with progress.shown() as report:
        path = locate.locate(asked.model, progress=report)
        smaller = asked.drafts.draft_model
        second = None if smaller is None else locate.locate(smaller, progress=report)
    with LLM(
        path,
        threads=asked.threads,
        kernels=asked.kernels,
        memory=asked.memory,
        prefix_disk=asked.prefix_disk,
        adapters=asked.adapters,
        draft=asked.drafts.draft,
        draft_model=second,
    ) as llm:
        backend = ModelBackend(
            llm,
            asked.name,
            version=headrace.__version__,
            max_prefill_wait=asked.max_prefill_wait,
            reuse=asked.reuse,
            speculate=asked.drafts.speculate,
        )
        try:
            yield Opened(
                backend,
                dialects(),
                counts=lambda: backend.counts,
                cache_bytes=_cache_bytes(llm, asked.prefix_disk),
            )
        finally:
            backend.close()


def dialects() -> list[ModuleType]:
    """The modules that speak to clients."""
    return [importlib.import_module(f"headrace.serve.dialects.{name}") for name in DIALECTS]


def _cache_bytes(llm: LLM, disk: DiskOptions | None) -> dict[str, Callable[[], int]]:
    engine = llm.engine
    out = {"memory": lambda: engine.prefixes.num_pages * engine.shape.page_bytes}
    if disk is not None:
        out["disk"] = partial(_folder_bytes, disk.directory)
    return out


def _folder_bytes(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in os.scandir(folder))
    except OSError:  # a file went away, or the folder never came
        return 0
