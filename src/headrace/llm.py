"""The Python API: a model that answers. Joins text and engine; knows no command line and no HTTP.

One generation runs at a time; others wait. A generation ends when its iterator is exhausted or closed.
Its tokens stay in the KV cache as long as nobody needs the room, and a later one reads only what it does not share
with them: a turn of a chat costs what is new in it. The answers are those of a fresh model.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import clear_frames
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace import locate
from headrace.adapters import NamedAdapters, needed_bytes, open_adapters
from headrace.artifact.adapter import Adapter, open_adapter
from headrace.artifact.container import Artifact, open_artifact
from headrace.artifact.schemas import find_schema
from headrace.completion import Answer, Completion
from headrace.engine.engine import Engine
from headrace.engine.planned import governor, stream_options
from headrace.engine.prefix_disk import DiskOptions
from headrace.engine.prefix_tier import open_disk
from headrace.engine.speculate import DEFAULT_SPECULATE, Speculate, depth_of
from headrace.errors import HeadraceError, InputError, PromptSizeError, UnsupportedError
from headrace.memory.facts import kernel_threads, plan_model
from headrace.memory.inputs import PlanOptions
from headrace.memory.machine import read_machine
from headrace.options import CONSTRAINTS, GenerateOptions, How
from headrace.prompt import as_text, num_characters, token_ids
from headrace.text.schema import Schema
from headrace.text.template import ChatTemplate, encode_chat
from headrace.text.tokenizer import Tokenizer
from headrace.values import Message, SamplingParams, Token

if TYPE_CHECKING:
    from headrace.text.grammar import Grammar, GrammarCompiler

DEFAULT_MODEL = "smollm2:135m"
CHARACTERS_PER_TOKEN = 512  # no vocabulary has a longer token: a longer prompt is refused unread


class BusyError(HeadraceError):
    """A thread asked for a second generation while its first is unfinished: it would wait for itself."""

    code = "busy"
    http_status = 409


class LLM:
    """A loaded model. May be used from several threads; `close` it, or use it in a `with`."""

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        memory_gb: float | None = None,
        threads: int | None = None,
        kernels: str | None = None,
        max_context: int | None = None,
        memory: PlanOptions | None = None,
        trace_routes: Path | None = None,
        beside_bytes: int = 0,
        with_forecast: bool = True,
        prefix_disk: DiskOptions | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """model: a name of the registry, or a path to an artifact, a GGUF file or a checkpoint's folder.

        A named model that is not there yet is pulled after asking on the terminal. threads, kernels:
        None takes the settings'. memory_gb: bounds the whole process, in GB of 10^9 bytes; max_context: positions to
        make room for. memory: all memory options in place of these two. trace_routes: a file that gets the experts
        that every position chose. beside_bytes: what the caller will take beside the model, inside the budget.
        with_forecast: whether a fitted forecast is used. prefix_disk:
        where prefixes are kept beyond this process; a directory that cannot be used is told in a warning. adapters:
        LoRA adapters by name, each an artifact of this model or a PEFT folder, which is converted. Raises
        MemoryBudgetError for what cannot fit.
        """
        if memory is None:
            memory = PlanOptions(
                memory_gb=memory_gb, max_context="auto" if max_context is None else max_context
            )
        self.artifact = replace(open_artifact(locate.locate(model)), with_forecast=with_forecast)
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._steps: Generator[Token, None, None] | None = None
        self._cancelled = threading.Event()
        self._closed = False
        self.last: Completion | None = None
        try:
            self._load(
                *locate.compute_settings(threads, kernels),
                memory,
                trace_routes,
                prefix_disk,
                beside_bytes,
                open_adapters(adapters, self.artifact),
            )
        except BaseException as error:
            # Whoever keeps the error keeps its frames, and they this object: none of them may hold the model.
            clear_frames(error.__traceback__)
            vars(self).clear()
            raise

    def _load(
        self,
        threads: int | None,
        kernels: str | None,
        memory: PlanOptions,
        trace_routes: Path | None,
        prefix_disk: DiskOptions | None,
        beside_bytes: int,
        adapters: Mapping[str, Adapter],
    ) -> None:
        machine = read_machine()
        beside_bytes += needed_bytes(adapters, kernel_threads(threads, machine))
        self.plan = plan_model(
            self.artifact, memory, machine, threads=threads, beside_bytes=beside_bytes
        ).for_loading()
        self.tokenizer = _tokenizer(self.artifact)
        self._template = _template(self.artifact, self.tokenizer)
        self._grammars: GrammarCompiler | None = None
        self.engine = Engine(
            self.artifact,
            threads=threads,
            kernels=kernels,
            max_context=self.plan.window,
            retained_contexts=self.plan.ledger.retained // self.plan.ledger.kv,
            chunk=self.plan.chunk_rows,
            experts=stream_options(self.plan) if self.artifact.records else None,
            trace_routes=trace_routes,
        )
        try:
            if prefix_disk is not None and (disk := open_disk(prefix_disk)) is not None:
                self.engine.attach_disk(disk)
            self._adapters = NamedAdapters(self.engine, adapters, self.plan.ledger.headroom)
            self.engine.warm()
            self._governor = governor(self.plan, self.engine.experts)
        except BaseException:
            self.engine.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free threads and memory. A running generation is cancelled first."""
        if self._closed:
            return
        self._closed = True
        self._cancelled.set()
        if self._owner == threading.get_ident() and self._steps is not None:
            self._steps.close()  # this thread's own, unfinished iterator: it cannot be waited for
            self.engine.close()
            return
        with self._turn:
            self.engine.close()

    def cancel(self) -> None:
        """Stop the generation that runs now, within one step. Callable from any thread."""
        self._cancelled.set()

    def generate(
        self,
        prompt: str | bytes,
        *,
        system: str | None = None,
        raw: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Answer a user's prompt, or with `raw` continue the text as it stands."""
        sampling, how = self._split(options)
        ids = self.prompt_ids(prompt, system=system, raw=raw)
        return self._complete(ids, sampling, continues=raw, **how)

    def stream(
        self,
        prompt: str | bytes,
        *,
        system: str | None = None,
        raw: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generator[str, None, None]:
        """As `generate`, in pieces of text as they come. `last` is the completion once it has ended."""
        sampling, how = self._split(options)
        ids = self.prompt_ids(prompt, system=system, raw=raw)
        return self.stream_ids(ids, sampling, continues=raw, **how)

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> Completion:
        """The next turn of a conversation. `stats.reused_tokens` of it were in the KV cache."""
        sampling, how = self._split(options)
        return self._complete(self.chat_ids(messages), sampling, **how)

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[GenerateOptions]
    ) -> Generator[str, None, None]:
        """As `chat`, in pieces of text."""
        sampling, how = self._split(options)
        return self.stream_ids(self.chat_ids(messages), sampling, **how)

    def compile(
        self,
        *,
        schema: Schema | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Grammar:
        """What an answer has to be, compiled once for many generations (their `grammar`). Exactly one of:

        schema: a JSON Schema, as a value or as JSON text, or "@" and the name of one that the model carries. regex: an
        expression that the whole answer matches. grammar: EBNF in Lark's notation, or GBNF. Raises GrammarError, which
        names the keyword, for what cannot be followed exactly.
        """
        if sum(given is not None for given in (schema, regex, grammar)) != 1:
            raise InputError("give one of schema, regex and grammar")
        if self._grammars is None:
            from headrace.text.grammar import GrammarCompiler  # its library takes time to import

            self._grammars = GrammarCompiler(self.tokenizer)
        if isinstance(schema, str) and schema.startswith("@"):
            schema = find_schema(self.artifact, schema[1:])
        if schema is not None:
            return self._grammars.schema(schema)
        return self._grammars.ebnf(grammar or "") if regex is None else self._grammars.regex(regex)

    def _split(self, options: GenerateOptions) -> tuple[SamplingParams, How]:
        """Options as values. Raises SettingError, InputError or GrammarError."""
        others = {*CONSTRAINTS, "speculate", "adapter"}
        params = SamplingParams(**{k: v for k, v in options.items() if k not in others})  # type: ignore[arg-type]
        how: How = {"grammar": self._grammar(options)}
        if "speculate" in options:
            depth_of(options["speculate"])
            how["speculate"] = options["speculate"]
        if (adapter := options.get("adapter")) is not None:
            self._adapters.find(adapter)
            how["adapter"] = adapter
        return params, how

    def _grammar(self, options: GenerateOptions) -> Grammar | None:
        given = {k: v for k, v in options.items() if k in CONSTRAINTS and v is not None}
        grammar = options.get("grammar")
        if grammar is None or isinstance(grammar, str) or len(given) > 1:
            return self.compile(**given) if given else None  # type: ignore[arg-type]
        if getattr(grammar, "vocabulary", None) is not self.tokenizer:
            raise InputError("the grammar is neither text nor compiled by this model")
        return grammar

    def load_adapter(self, path: str | Path, name: str | None = None) -> str:
        """Load a LoRA adapter beside the model: an artifact of it, or a PEFT folder, which is converted once.

        Returns its name, the folder's unless one is given, for `adapter` of the generating methods. Raises InputError,
        FileError, AdapterMismatchError, AdapterShapeError, MemoryBudgetError.
        """
        adapter = open_adapter(locate.locate_adapter(path, self.artifact), self.artifact)
        name = Path(path).expanduser().resolve().name if name is None else name
        with self._own_turn():
            self._adapters.load(name, adapter)
        return name

    def unload_adapter(self, name: str) -> None:
        """Free an adapter and its name. Raises InputError for a name that nothing has."""
        with self._own_turn():
            self._adapters.unload(name)

    def tokenize(self, text: str | bytes) -> list[int]:
        """Ids of `text` alone; the names of control tokens in it are ordinary text."""
        if not isinstance(text, str | bytes):
            raise InputError(f"the text is of type {type(text).__name__}, not text or bytes")
        return self.tokenizer.encode(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ids, without control tokens."""
        return self.tokenizer.decode(token_ids(tokens, empty=True))

    def logits(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Logits after each token: i32[len(tokens), vocab], fixed point (`engine.fraction_bits`)."""
        ids = token_ids(tokens)
        with self._own_turn():
            return self.engine.logits(ids)

    def forget(self) -> None:
        """Drop what the KV cache holds of earlier generations; the next one reads all of its prompt."""
        with self._own_turn():
            self.engine.prefixes.clear()

    def prompt_ids(
        self, prompt: str | bytes, *, system: str | None = None, raw: bool = False
    ) -> list[int]:
        """What the model reads for a prompt. With `raw`, control tokens may be spelled in it."""
        if not isinstance(prompt, str | bytes):
            raise InputError(f"the prompt is of type {type(prompt).__name__}, not text or bytes")
        if not prompt:
            raise InputError("the prompt is empty")
        if raw:
            if system is not None:
                raise InputError("a raw prompt has no system message")
            self._could_fit(len(prompt))
            return self.tokenizer.encode_prompt(prompt)
        messages = [] if system is None else [Message("system", system)]
        return self.chat_ids([*messages, Message("user", as_text(prompt))])

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that are loaded: the identity of each one's content by its name."""
        return self._adapters.identities()

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def generate_ids(self, ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        """As `generate`, after a prompt of token ids."""
        sampling, how = self._split(options)
        return self._complete(list(ids), sampling, **how)

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """What the model reads for a conversation. Raises UnsupportedError without a template."""
        if self._template is None:
            raise UnsupportedError(
                "the model has no chat template", hint="give a raw prompt (raw=True, or --raw)"
            )
        if isinstance(messages, str | bytes | Message) or not messages:
            raise InputError("a conversation is a sequence of at least one message")
        self._could_fit(sum(map(num_characters, messages)))
        return encode_chat(self.tokenizer, self._template, messages)

    def _could_fit(self, characters: int) -> None:
        """Refuse what cannot fit before its tokens are counted. Raises PromptSizeError."""
        if characters > CHARACTERS_PER_TOKEN * self.engine.context:
            raise PromptSizeError(characters, self.engine.context)

    def stream_ids(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        *,
        continues: bool = False,
        reuse: bool = True,
        grammar: Grammar | None = None,
        speculate: Speculate = DEFAULT_SPECULATE,
        adapter: str | None = None,
    ) -> Generator[str, None, None]:
        """Pieces of text after the prompt `ids`. continues: see `Tokenizer.stream`; the rest: see `Engine.generate`."""
        depth_of(speculate)
        self._adapters.find(adapter)
        return self._pieces(token_ids(ids), sampling, continues, grammar, speculate, adapter, reuse)

    def _complete(
        self,
        ids: list[int],
        sampling: SamplingParams,
        *,
        continues: bool = False,
        grammar: Grammar | None = None,
        speculate: Speculate = DEFAULT_SPECULATE,
        adapter: str | None = None,
    ) -> Completion:
        with closing(self._pieces(ids, sampling, continues, grammar, speculate, adapter)) as pieces:
            for _ in pieces:
                pass
            return _ended(self.last)

    def _pieces(
        self,
        ids: list[int],
        sampling: SamplingParams,
        continues: bool,
        grammar: Grammar | None,
        speculate: Speculate,
        adapter: str | None,
        reuse: bool = True,
    ) -> Generator[str, None, None]:
        with self._own_turn():
            self.last = None
            # A grammar speaks of every byte, so no leading space is left out of what follows it.
            answer = Answer(self.tokenizer, sampling, continues or grammar is not None)
            steps = self.engine.generate(
                ids,
                sampling,
                cancel=self._cancelled.is_set,
                adapter=self._adapters.find(adapter),
                reuse=reuse,
                constraint=None if grammar is None else grammar.start(),
                speculate=speculate,
            )
            self._steps = steps
            try:
                with closing(steps):
                    for token in steps:
                        if piece := answer.push(token.id):
                            yield piece
                        if answer.stopped:
                            break
                    else:
                        stats = self.engine.stats
                        cut = stats is not None and stats.finish_reason != "stop"
                        if piece := answer.flush(cut=cut):
                            yield piece
            finally:
                # Without statistics an interruption came before the engine could leave them; it is on its way.
                if (stats := self.engine.stats) is not None:
                    self.last = answer.completion(stats)

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        if self._owner == threading.get_ident():
            raise BusyError(
                "this thread has an unfinished generation", hint="close its iterator first"
            )
        with self._turn:
            self._cancelled.clear()
            if self._closed:
                raise InputError("the model is closed")
            self._owner = threading.get_ident()
            if self._governor is not None:
                self._governor.between_requests()
            try:
                yield
            finally:
                self._owner = None


def _ended(completion: Completion | None) -> Completion:
    assert completion is not None
    return completion


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
