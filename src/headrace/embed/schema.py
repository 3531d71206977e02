"""Schemas of a model by name, and the way of one sequence through one of them.

Knows token ids and masks; what a schema means is `text/grammar`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.container import Artifact
from headrace.artifact.schemas import read_schemas
from headrace.embed.errors import (
    ArtifactRejectedError,
    InvalidArgumentError,
    RestoreSchemaError,
    SchemaUnsatisfiableError,
    UnknownSchemaError,
)
from headrace.embed.outcome import DeadEnd
from headrace.errors import ConstraintError, FileError, GrammarError, InputError
from headrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from headrace.text.grammar import Grammar, GrammarCompiler


@dataclass(frozen=True, eq=False)
class Schema:
    """A compiled schema of one model. name: in the artifact, empty for one that was compiled by the caller."""

    name: str
    digest: str  # of its content, 64 hex digits
    grammar: Grammar
    vocab_size: int
    ends: tuple[int, ...]  # the tokens that end a text

    def same(self, other: Schema | None) -> bool:
        """Whether both ask for the same, of one model."""
        return (
            other is not None
            and self.digest == other.digest
            and self.grammar.vocabulary is other.grammar.vocabulary
        )

    def of(self, tokenizer: Tokenizer) -> bool:
        """Whether it was compiled by the model whose tokenizer this is."""
        return self.grammar.vocabulary is tokenizer


class SchemaSet:
    """The schemas that an artifact carries, compiled when they are asked for. Safe to use from several threads."""

    def __init__(self, artifact: Artifact, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Raises ArtifactRejectedError for a file that is damaged."""
        try:
            self._texts = read_schemas(artifact)
        except FileError as error:
            raise ArtifactRejectedError(error.message) from error
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._made: dict[str, Schema] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._texts)

    def find(self, name: str) -> Schema:
        """Raises InvalidArgumentError, UnknownSchemaError, SchemaUnsatisfiableError."""
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the schema's name is of type {type(name).__name__}")
        if name not in self._texts:
            known = ", ".join(self._texts) or "none"
            raise UnknownSchemaError(f"the model has no schema {name!r:.80}; it has: {known}")
        with self._lock:
            if name not in self._made:
                self._made[name] = self._compile("schema", self._texts[name], name)
            return self._made[name]

    def compile(self, kind: str, text: Any) -> Schema:
        """kind: "schema", "regex" or "grammar". Raises SchemaUnsatisfiableError."""
        with self._lock:
            return self._compile(kind, text, "")

    def saved(self, name: str, digest: str, given: Schema | None) -> Schema:
        """The schema that a saved sequence had, by its name or as it was given. Raises RestoreSchemaError."""
        if given is not None:
            if not given.of(self._tokenizer):
                raise RestoreSchemaError("the given schema was compiled by another model")
            if given.digest == digest:
                return given
            raise RestoreSchemaError("the saved sequence has another schema than the given one")
        if not name:
            raise RestoreSchemaError("the saved sequence has a schema without a name; give it")
        if name not in self._texts:
            raise RestoreSchemaError(f"the saved sequence has schema {name!r:.80}, the model not")
        found = self.find(name)
        if found.digest != digest:
            raise RestoreSchemaError(f"schema {name!r:.80} is another than the saved sequence's")
        return found

    def _compile(self, kind: str, text: Any, name: str) -> Schema:
        if self._compiler is None:
            from headrace.text.grammar import GrammarCompiler  # its library takes time to import

            self._compiler = GrammarCompiler(self._tokenizer)
        make = {
            "schema": self._compiler.schema,
            "regex": self._compiler.regex,
            "grammar": self._compiler.ebnf,
        }[kind]
        try:
            grammar = make(text)
        except GrammarError as error:
            raise SchemaUnsatisfiableError(error.message) from error
        except (InputError, UnicodeError) as error:
            raise InvalidArgumentError(f"{kind}: {error}") from error
        ends = tuple(self._tokenizer.eos)
        return Schema(name, grammar.digest, grammar, self._vocab_size, ends)


class SchemaWalk:
    """Where one sequence is in its schema. Used by one thread at a time."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.taken = 0  # tokens; -1 while one is taken: what was cut off there is good for nothing
        self._walk = schema.grammar.start()
        self._over = False  # an end token was taken
        self._dead: DeadEnd | None = None

    @classmethod
    def along(cls, schema: Schema, tokens: Tokens[int]) -> SchemaWalk:
        """The way over tokens that it was on once."""
        walk = cls(schema)
        for token in tokens:
            walk.take(token)
        walk.taken = len(tokens)
        return walk

    def fork(self) -> SchemaWalk:
        """An independent copy."""
        other = SchemaWalk.__new__(SchemaWalk)
        other.schema, other._walk = self.schema, self._walk.fork()
        other._over, other._dead, other.taken = self._over, self._dead, self.taken
        return other

    @property
    def accepting(self) -> bool:
        """Whether what was generated satisfies the schema."""
        if self._dead is not None:
            return self._dead.accepting
        return self._over or self._walk.can_end

    def allowed(self) -> NDArray[np.bool_] | DeadEnd:
        """bool[vocab], what may come next, at least one token; or why nothing may."""
        if self._dead is not None:
            return self._dead
        if self._over:
            return DeadEnd(True, "the text has ended")
        mask = np.zeros(self.schema.vocab_size, np.bool_)
        try:
            if self._walk.ended:
                mask[list(self.schema.ends)] = True
            else:
                bits = np.unpackbits(self._walk.mask().view(np.uint8), bitorder="little")
                size = min(len(bits), len(mask))
                mask[:size] = bits[:size]
            if mask.any():
                return mask
            return DeadEnd(self._walk.can_end, "no token of the vocabulary can follow")
        except ConstraintError as error:
            self._dead = DeadEnd(False, error.cause)
            return self._dead

    def reach(self, tokens: Tokens[int]) -> int:
        """How many of `tokens` the schema allows from here on, one after the other."""
        ahead = self.fork()
        return next((i for i, token in enumerate(tokens) if not ahead.take(token)), len(tokens))

    def take(self, token: int) -> bool:
        """Go over a token; False, and no further walking, where the schema does not allow it."""
        if self._dead is not None or self._over:
            return False
        accepting, before = False, self.taken
        self.taken = -1
        try:
            accepting = self._walk.can_end
            self._walk.advance(token)
        except ConstraintError as error:
            self._dead = DeadEnd(accepting, error.cause)
            self.taken = before
            return False
        self._over = token in self.schema.ends
        self.taken = before + 1
        return True

    def forced(self) -> list[int]:
        """The tokens that the schema leaves no choice about, from here on."""
        ahead, span = self.fork(), list[int]()
        while not ahead._over and isinstance(mask := ahead.allowed(), np.ndarray):
            if np.count_nonzero(mask) > 1:
                break
            more = [] if ahead._walk.ended else ahead._walk.forced()
            more = more or [int(mask.argmax())]
            if not all(map(ahead.take, more)):
                break
            span += more
        return span
