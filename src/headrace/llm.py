"""The Python API: a model that answers. Joins text and engine; knows no command line and no HTTP.

Several generations run beside each other and share passes, whichever threads read them; those that memory was not
planned for wait in order of arrival. A generation ends when its iterator is exhausted or closed.
Its tokens stay in the KV cache as long as nobody needs the room, and a later one reads only what it does not share
with them: a turn of a chat costs what is new in it. The answers are those of a fresh model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from traceback import clear_frames
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from headrace import locate
from headrace.artifact.adapter import open_adapter
from headrace.artifact.schemas import find_schema
from headrace.completion import Answer, Completion
from headrace.drafting import DEFAULT_DRAFT, Draft
from headrace.engine.pages import pages_for
from headrace.engine.phased import Phased
from headrace.engine.prefix_disk import DiskOptions
from headrace.engine.scheduler import Ticket
from headrace.engine.speculate import DEFAULT_SPECULATE
from headrace.engine.turns import Turns
from headrace.errors import InputError, PromptSizeError, UnsupportedError
from headrace.heads import Heads
from headrace.loading import LoadOptions, load
from headrace.memory.inputs import PlanOptions
from headrace.options import CONSTRAINTS, GenerateOptions, How, check_how, check_names, split
from headrace.phases import Thinking, ThinkingRun, ThinkOptions, answer_options, thinking_plan
from headrace.prompt import as_text, num_characters, token_ids
from headrace.stream import Stream, finished
from headrace.text.conversation import Messages, Tools
from headrace.text.schema import Schema
from headrace.text.template import encode_chat
from headrace.values import Message, SamplingParams

if TYPE_CHECKING:
    from headrace.text.grammar import Grammar, GrammarCompiler

DEFAULT_MODEL = "smollm2:135m"
CHARACTERS_PER_TOKEN = 512  # no vocabulary has a longer token: a longer prompt is refused unread


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
        parallel: int = 1,
        memory: PlanOptions | None = None,
        trace_routes: Path | None = None,
        beside_bytes: int = 0,
        with_forecast: bool = True,
        prefix_disk: DiskOptions | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        draft: Draft = DEFAULT_DRAFT,
        draft_model: str | Path | None = None,
    ) -> None:
        """model: a name of the registry, or a path to an artifact, a GGUF file or a checkpoint's folder.

        A named model that is not there yet is pulled after asking on the terminal. memory_gb: bounds the whole process,
        in GB of 10^9 bytes; max_context: positions to make room for; parallel: generations that memory is planned for,
        each with a context of its own; more share these. memory: all memory options in place of these three. The rest:
        see `LoadOptions`. Raises MemoryBudgetError for what cannot fit, DraftModelError.
        """
        if memory is None:
            memory = PlanOptions(
                memory_gb=memory_gb,
                max_context="auto" if max_context is None else max_context,
                parallel=parallel,
            )
        options = LoadOptions(
            threads=threads,
            kernels=kernels,
            memory=memory,
            trace_routes=trace_routes,
            beside_bytes=beside_bytes,
            with_forecast=with_forecast,
            prefix_disk=prefix_disk,
            adapters=adapters or {},
            draft=draft,
            draft_model=draft_model,
        )
        try:
            self._loaded = load(model, options)
        except BaseException as error:
            clear_frames(error.__traceback__)  # whoever keeps the error keeps them
            raise
        self.artifact = self._loaded.artifact
        self.plan = self._loaded.plan
        self.tokenizer = self._loaded.tokenizer
        self.engine = self._loaded.engine
        self._heads = Heads(self.tokenizer, self._loaded.template)
        self._turns = self._loaded.turns
        self._grammars: GrammarCompiler | None = None
        self._closed = False
        self._closing = threading.Lock()
        # The one that ended last; with several at a time, see `Stream.completion`.
        self.last: Completion | None = None

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
        """Free threads and memory. Generations that run or wait are cancelled first."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with self._turns.ending():
                self._loaded.close()

    def cancel(self) -> None:
        """Stop every generation that runs or waits now, each within one step. Callable from any thread."""
        self._turns.cancel()

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
    ) -> Stream:
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
    ) -> Stream:
        """As `chat`, in pieces of text."""
        sampling, how = self._split(options)
        return self.stream_ids(self.chat_ids(messages), sampling, **how)

    def think(
        self, prompt: str | bytes | Sequence[Message], **options: Unpack[ThinkOptions]
    ) -> Thinking:
        """Think, then answer: two phases over one state, each with its own sampling and limit. See `Thinking`.

        prompt: a user's, or a conversation. A thought without max_tokens may take half of the room that is left; a
        grammar starts with the answer's first token.
        """
        sampling, how = self._split(answer_options(options))
        ids = self.prompt_ids(prompt) if isinstance(prompt, str | bytes) else self.chat_ids(prompt)
        how["shared_prefix_tokens"] = self._head(ids, how.get("shared_prefix_tokens"))
        plan = thinking_plan(options, sampling, how, self.engine.config.vocab_size)
        self._check_open()
        adapter = self._loaded.adapters.find(how.get("adapter"))
        phases = Phased(
            self.engine,
            self._turns,
            adapter,
            reuse=how.get("reuse", True),
            head=how.get("shared_prefix_tokens") or 0,
        )
        return Thinking(ThinkingRun(phases, self.tokenizer, ids, plan, self._ended))

    def _head(self, ids: list[int], given: int | None) -> int:
        """How much of a prompt others begin with."""
        return self._heads.length(ids) if given is None else given

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
        params, how = split(options, self.engine.config.vocab_size)
        how["grammar"] = self._grammar(options)
        self._loaded.adapters.find(how.get("adapter"))
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
        self._check_open()
        with self._turns.between():
            self._loaded.adapters.load(name, adapter)
        return name

    def unload_adapter(self, name: str) -> None:
        """Free an adapter and its name. Raises InputError for a name that nothing has, or that a generation uses."""
        self._check_open()
        with self._turns.between():
            found = self._loaded.adapters.find(name)
            if found is not None and self._turns.uses(found.salt):
                raise InputError(f"a generation uses the adapter {name!r:.80}")
            self._loaded.adapters.unload(name)

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
        self._check_open()
        pages = pages_for(min(len(ids), self.engine.context))
        logits: NDArray[np.int32] = self._turns.run(partial(self.engine.logits, ids), pages)
        return logits

    def forget(self) -> None:
        """Drop what the KV cache holds of earlier generations; the next one reads all of its prompt."""
        self._check_open()
        with self._turns.between():
            self.engine.prefixes.clear()

    @property
    def given_back(self) -> int:
        """Bytes of the plan that others were given because they needed memory."""
        governor = self._loaded.governor
        return 0 if governor is None else governor.given_back

    def prompt_ids(
        self,
        prompt: str | bytes,
        *,
        system: str | None = None,
        raw: bool = False,
        look: Callable[[], None] | None = None,
    ) -> list[int]:
        """What the model reads for a prompt. With `raw`, control tokens may be spelled in it. look: see `chat_ids`."""
        if not isinstance(prompt, str | bytes):
            raise InputError(f"the prompt is of type {type(prompt).__name__}, not text or bytes")
        if not prompt:
            raise InputError("the prompt is empty")
        if raw:
            if system is not None:
                raise InputError("a raw prompt has no system message")
            self._could_fit(len(prompt))
            return self.tokenizer.encode_prompt(prompt, look=look, check=self._could_hold)
        messages = [] if system is None else [Message("system", system)]
        return self.chat_ids([*messages, Message("user", as_text(prompt))], look=look)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that are loaded: the identity of each one's content by its name."""
        return self._loaded.adapters.identities()

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._loaded.template is not None

    def generate_ids(self, ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        """As `generate`, after a prompt of token ids."""
        sampling, how = self._split(options)
        return self._complete(list(ids), sampling, **how)

    def chat_ids(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        variables: Mapping[str, object] | None = None,
        look: Callable[[], None] | None = None,
    ) -> list[int]:
        """What the model reads for a conversation: messages, or mappings as its template wants them.

        tools: functions in OpenAI's form, for a template that tells of them; variables: others that it knows, such as
        enable_thinking. look: is called now and then; what it raises ends the work. Raises UnsupportedError without a
        template.
        """
        if self._loaded.template is None:
            raise UnsupportedError(
                "the model has no chat template", hint="give a raw prompt (raw=True, or --raw)"
            )
        if isinstance(messages, str | bytes | Message) or not messages:
            raise InputError("a conversation is a sequence of at least one message")
        self._could_fit(sum(map(num_characters, messages)))
        ids = encode_chat(
            self.tokenizer,
            self._loaded.template,
            messages,
            tools=tools,
            extra=variables,
            look=look,
            check=self._could_hold,
        )
        if len(ids) <= self.engine.context:
            self._heads.note(messages, ids, tools, variables, look)
        return ids

    def _could_hold(self, tokens: int) -> None:
        """As `_could_fit`, of tokens that there surely are."""
        if tokens > self.engine.context:
            raise PromptSizeError(tokens, self.engine.context, "tokens or more")

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
        **how: Unpack[How],
    ) -> Stream:
        """Pieces of text after the prompt `ids`. continues: see `Tokenizer.stream`; the rest: see `GenerateOptions`."""
        check_names(how, How)
        check_how(sampling, how)
        prompt, grammar = token_ids(ids), how.get("grammar")
        self._loaded.adapters.find(how.get("adapter"))
        # A grammar speaks of every byte, so no leading space is left out of what follows it.
        answer = Answer(self.tokenizer, sampling, continues or grammar is not None)
        return Stream(self._turns, answer, lambda: self.ticket(prompt, sampling, how), self._ended)

    def _complete(
        self,
        ids: list[int],
        sampling: SamplingParams,
        *,
        continues: bool = False,
        **how: Unpack[How],
    ) -> Completion:
        return finished(self.stream_ids(ids, sampling, continues=continues, **how))

    @property
    def turns(self) -> Turns:
        """What runs the generations: for who submits a `ticket` and takes its tokens alone."""
        return self._turns

    def ticket(self, ids: list[int], sampling: SamplingParams, how: How) -> Ticket:
        """A generation to submit to `turns`. Raises what is wrong with it."""
        self._check_open()
        grammar, speculate = how.get("grammar"), how.get("speculate", DEFAULT_SPECULATE)
        return Ticket(
            self.engine.generation(
                ids,
                sampling,
                adapter=self._loaded.adapters.find(how.get("adapter")),
                reuse=how.get("reuse", True),
                constraint=None if grammar is None else grammar.start(),
                speculate=speculate,
                drafter=self._loaded.drafting.drafters(speculate),
                damped=how.get("damped"),
                head=self._head(ids, how.get("shared_prefix_tokens")),
            )
        )

    def _ended(self, completion: Completion | None) -> None:
        self.last = completion

    def _check_open(self) -> None:
        if self._closed:
            raise InputError("the model is closed")
