"""A mapped model: its program, its experts, its schemas and tokenizer, and the count of what lives on it."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext, suppress
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.artifact.container import Artifact, open_artifact, watch
from headrace.artifact.forecast import read_forecast
from headrace.embed import errors
from headrace.embed.calls import PassLock
from headrace.embed.errors import (
    AllocationError,
    ArtifactRejectedError,
    InvalidArgumentError,
    LifecycleRefused,
    NoTokenTextError,
    ReleasedError,
    TokenRangeError,
)
from headrace.embed.memory import whole
from headrace.embed.schema import Schema, SchemaSet
from headrace.engine.batch import within_context
from headrace.errors import FileError, HeadraceError, InputError, KernelUnavailableError
from headrace.experts.stream import ExpertStream, StreamOptions
from headrace.kernels.program import Router
from headrace.kernels.select import native_module, select
from headrace.models.config import DecoderConfig
from headrace.models.decoder import build_program
from headrace.models.families import family
from headrace.text.tokenizer import Tokenizer

# What lives on a model, in the order in which a refusal to unmap it names them.
_LIVE = {
    "sequences": errors.ModelHasSequencesError,
    "prefixes": errors.ModelHasPrefixesError,
    "adapters": errors.ModelHasAdaptersError,
    "pools": errors.ModelHasPoolsError,
    "workspaces": errors.ModelHasWorkspacesError,
}


class Model:
    """One mapped artifact. Shared by any number of pools, workspaces and threads.

    Dense weights are mapped from the file. The experts of a mixture lie in memory of the model's own, `expert_bytes`.
    """

    def __init__(
        self,
        artifact: Artifact | Path | str,
        *,
        kernels: str | None = None,
        threads: int = 1,
        max_context: int | None = None,
        expert_slots: int | None = None,
    ) -> None:
        """artifact: opened, or where its directory is. threads: of each workspace; with 1, none is started.

        max_context: positions of one sequence, by default and at most the model's own. expert_slots: how many experts
        are held in memory (None: all of them). Raises ArtifactRejectedError, InvalidArgumentError.
        """
        try:
            self.artifact = artifact if isinstance(artifact, Artifact) else _opened(artifact)
            manifest = self.artifact.manifest
            self.config = DecoderConfig.from_json(manifest.config)
            family(manifest.family).check(self.config)
            forecasts = {i: Router(*r) for i, r in read_forecast(self.artifact).items()}
            program = build_program(
                self.config,
                manifest.tensors,
                self.artifact.tensors,
                manifest.fraction_bits,
                {r.layer: r.layout for r in self.artifact.records},
                forecasts,
            )
            info = manifest.tokenizer
            self.tokenizer = Tokenizer.from_file(
                self.artifact.tokenizer_path, bos=info.bos, eos=info.end
            )
        except errors.EmbedError:
            raise
        except InputError as error:
            raise ArtifactRejectedError(error.message, hint=error.hint) from error
        context = self.config.context
        self.context = (
            context if max_context is None else whole("max_context", max_context, 1, context)
        )
        self.program = within_context(program, self.context)
        self.threads = whole("threads", threads, 1)
        try:
            self.backend = select(kernels, threads=self.threads)
        except (InputError, KernelUnavailableError, TypeError) as error:
            raise InvalidArgumentError(f"kernels: {error}") from error
        self.schemas = SchemaSet(self.artifact, self.tokenizer, self.config.vocab_size)
        self._live: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._mapped = True
        self.experts: ExpertStream | None = None
        self._watch = watch(self.artifact)
        try:
            self.experts = self._open_experts(expert_slots)
        except BaseException:
            self._watch.close()
            raise
        # The experts of a mixture are one call's at a time.
        self.pass_lock = None if self.experts is None else PassLock()

    def __enter__(self) -> Self:
        self.check_mapped()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Unmap it; behind an exception of the block, which is what is told, where that can be."""
        with suppress(LifecycleRefused) if kind is not None else nullcontext():
            self.unmap()

    def _open_experts(self, slots: int | None) -> ExpertStream | None:
        records, shape = self.artifact.records, self.program.shape
        if not records:
            if slots is not None:
                raise InvalidArgumentError("expert_slots: the model has no experts")
            return None
        total = sum(r.num_experts for r in records)
        count = total if slots is None else whole("expert_slots", slots, 1, total)
        native = None if self.backend.name == "reference" else native_module()
        options = StreamOptions(slots=count, max_slots=count)
        layers, experts = shape.num_layers, shape.num_experts
        try:
            return ExpertStream(records, layers, experts, options, native=native)
        except MemoryError as error:
            raise AllocationError("the process has no memory for the experts") from error

    # ---- what it is -------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """SHA-256 of the artifact, 64 hex digits."""
        return self.artifact.identity

    @property
    def hidden_size(self) -> int:
        return self.program.shape.hidden

    @property
    def num_layers(self) -> int:
        return self.program.shape.num_layers

    @property
    def vocab_size(self) -> int:
        return self.program.shape.vocab

    @property
    def fraction_bits(self) -> int:
        return self.program.shape.fraction_bits

    @property
    def expert_bytes(self) -> int:
        """Memory that the experts of a mixture take; 0 for a dense model."""
        return 0 if self.experts is None else self.experts.slots.memory.nbytes

    # ---- text -------------------------------------------------------------------------------------

    def tokenize(self, text: str | bytes) -> list[int]:
        """Ids of a text; the names of control tokens in it are ordinary text."""
        self.check_mapped()
        if not isinstance(text, str | bytes):
            raise InvalidArgumentError(f"the text is of type {type(text).__name__}")
        return self.tokenizer.encode(text)

    def detokenize_stream(self, *, skip_special: bool = True) -> TokenStream:
        """Text of ids as they come. Raises ReleasedError."""
        self.check_mapped()
        return TokenStream(self, skip_special)

    # ---- schemas ----------------------------------------------------------------------------------

    @property
    def schema_names(self) -> tuple[str, ...]:
        """Names of the schemas that the artifact carries."""
        return self.schemas.names

    def schema(self, name: str) -> Schema:
        """A schema by name. Raises InvalidArgumentError, UnknownSchemaError, SchemaUnsatisfiableError."""
        self.check_mapped()
        return self.schemas.find(name)

    def compile_schema(
        self, schema: Any = None, *, regex: str | None = None, grammar: str | None = None
    ) -> Schema:
        """A schema that the artifact does not carry: a JSON Schema, or an expression, or EBNF; exactly one.

        Raises SchemaUnsatisfiableError, InvalidArgumentError.
        """
        self.check_mapped()
        given = {"schema": schema, "regex": regex, "grammar": grammar}
        found = [(kind, text) for kind, text in given.items() if text is not None]
        if len(found) != 1:
            raise InvalidArgumentError("give one of schema, regex and grammar")
        return self.schemas.compile(*found[0])

    # ---- lifecycle --------------------------------------------------------------------------------

    @property
    def live(self) -> dict[str, int]:
        """How many sequences, prefixes, adapters, pools and workspaces live on the model."""
        with self._lock:
            return {kind: self._live[kind] for kind in _LIVE}

    def hold(self, kind: str) -> None:
        """One more of a kind lives. Raises ReleasedError."""
        with self._lock:
            self.check_mapped()
            self._live[kind] += 1

    def drop(self, kind: str) -> None:
        with self._lock:
            self._live[kind] -= 1

    def check_mapped(self) -> None:
        if not self._mapped:
            raise ReleasedError("the model was unmapped")

    def check_files(self, *, after: bool = False) -> None:
        """Weights are what they were when the model was mapped. Raises FileError; after a pass, where they were not."""
        if self._watch.changed() and self._verified():
            if self.experts is not None:
                self.experts.forget()
            if after:
                raise FileError(self.artifact.path, "weights", "were written to during a pass")

    def _verified(self) -> bool:
        with self._lock:
            return self._watch.verify()

    def unmap(self) -> None:
        """Give everything back. Raises a LifecycleRefused that names what still lives."""
        with self._lock:
            if not self._mapped:
                return
            for kind, error in _LIVE.items():
                if count := self._live[kind]:
                    raise error(f"the model has {count} live {kind}")
            self._mapped = False
        self._watch.close()
        if self.experts is not None:
            self.experts.close()


class TokenStream:
    """Text of token ids, a token at a time; a character that is cut over several is held until it is whole."""

    def __init__(self, model: Model, skip_special: bool) -> None:
        self._model = model
        self._stream = model.tokenizer.stream(skip_special=skip_special, continues=True)

    def push(self, token: int) -> str:
        """The text that a token completes. Raises InvalidArgumentError, TokenRangeError, NoTokenTextError."""
        model = self._model
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InvalidArgumentError(f"token {token!r:.60} is no whole number")
        token = int(token)
        if not 0 <= token < model.vocab_size:
            raise TokenRangeError(f"token {token} is not in the vocabulary of {model.vocab_size}")
        if not (model.tokenizer.token_bytes(token) or model.tokenizer.is_special(token)):
            raise NoTokenTextError(f"the tokenizer has no text for token {token}")
        return self._stream.push(token)

    def flush(self) -> str:
        """What is still held."""
        return self._stream.flush()


def _opened(path: Path | str) -> Artifact:
    if not isinstance(path, str | PathLike):
        raise InvalidArgumentError(f"the artifact is of type {type(path).__name__}, no path")
    try:
        return open_artifact(Path(path))
    except HeadraceError as error:
        raise ArtifactRejectedError(error.message, hint=error.hint) from error
