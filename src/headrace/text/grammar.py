"""Grammars over a vocabulary: a schema, a regular expression or EBNF, and which tokens may come next.

Owns the library (llguidance) that turns texts into masks: its options, its limits, its messages. A `Grammar` is
compiled once and shared; a `Walk` is one generation's way through it. Knows no engine and no logits.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from headrace.errors import ConstraintError, GrammarError, InputError
from headrace.text import schema as schemas
from headrace.text.tokenizer import Tokenizer

Kind = Literal["schema", "regex", "grammar", "answer"]
Words = NDArray[np.uint32]
Find = Callable[[str], tuple[str, str]]  # of a message of the library: the place and the cause
T = TypeVar("T")

KEPT = 64  # compiled grammars of one model
KEPT_CHARACTERS = 512 << 10  # of their texts in all: one takes about a hundred times its text
MAX_BYTES = 512 << 10
MAX_GBNF_BYTES = 64 << 10
STACK_BYTES = 1 << 30  # of the thread that compiles
_STACK_SIZE = threading.Lock()  # one setting for all threads of a process
# A space after a comma or a colon is a choice; there is no other whitespace between the parts of a document.
_JSON: Any = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": False,
}
_CAUSES = {
    "oneOf constraints are not supported": "oneOf: its options could hold together; "
    "they must differ in type, or in a constant of a required property",
    "contains no integer values": "minimum, maximum: there is no integer between its bounds",
    "NoExtension": "no text satisfies it",
    "missing special token prefix": "it names a token that the vocabulary does not have",
}
_REQUIRED = re.compile(r"required property '(.*)' is unsatisfiable")
_ENDS = ("<backtrace>", "<non-verbose/>")


@dataclass(frozen=True)
class _Ends:
    """The tokens that end a text, as the library knows them; it wants one where a vocabulary has none."""

    ids: tuple[int, ...]
    exist: bool


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar of one vocabulary. Immutable; safe to use from several threads."""

    kind: Kind
    text: str  # canonical: the same for schemas that differ in spacing alone
    vocabulary: object = field(repr=False)  # one object for all grammars of a tokenizer
    _matcher: llguidance.LLMatcher = field(repr=False)
    _ends: _Ends = field(repr=False)

    @property
    def digest(self) -> str:
        """What the grammar says, as 64 hex digits."""
        return _digest(self.kind, self.text)

    def start(self) -> Walk:
        """A generation's state at the first token."""
        return Walk(self._matcher.deep_copy(), self._ends)


class Walk:
    """A generation's way through a grammar: engine/constraint.py's `Constraint`. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, ends: _Ends, *, over: bool = False) -> None:
        self._matcher = matcher
        self._ends = ends
        self._over = over  # an end token was taken

    @property
    def can_end(self) -> bool:
        """Whether the text so far satisfies the grammar."""
        return self._over or self._checked(self._matcher.is_accepting())

    @property
    def ended(self) -> bool:
        """Whether it does and nothing can follow."""
        return self._over or self._checked(self._matcher.is_stopped())

    def mask(self) -> Words:
        """u32[ceil(vocab / 32)], bit i % 32 of word i // 32 for token i. End tokens only where it can end."""
        packed = self._checked(self._matcher.compute_bitmask())
        words = np.frombuffer(packed, np.uint32).copy()
        if not (self._ends.exist and self.can_end):
            for token in self._ends.ids:
                words[token // 32] &= ~np.uint32(1 << token % 32)
        return words

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about: `mask` would have one bit at each of them."""
        tokens = self._checked(self._matcher.compute_ff_tokens())
        ends = (i for i, token in enumerate(tokens) if token in self._ends.ids)
        return list(tokens[: next(ends, None)])

    def advance(self, token: int) -> None:
        """Take a token that the mask allows. Raises ConstraintError for another."""
        if token in self._ends.ids:
            if not self.can_end:
                raise ConstraintError("the end came too early", dead_end=True)
            self._over = True
        elif self._over or not self._matcher.consume_token(token):
            self._checked(None)
            raise ConstraintError(f"token {token} is not allowed here", dead_end=True)

    def fork(self) -> Self:
        """An independent copy."""
        return type(self)(self._matcher.deep_copy(), self._ends, over=self._over)

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens."""
        if count and self._over:
            self._over = False
            count -= 1
        if count:
            self._matcher.rollback(count)
            self._checked(None)

    def _checked(self, value: T) -> T:
        """The library stays in an error once it had one, and then answers as if the text had ended."""
        if self._matcher.is_error():
            raise ConstraintError(_cause(self._matcher.get_error()), dead_end=self._is_dead())
        return value

    def _is_dead(self) -> bool:
        return "NoExtension" in self._matcher.get_error()


class GrammarCompiler:
    """Compiles for one vocabulary, and keeps what it compiled lately. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """tokenizer: its `eos` are the tokens that end a text."""
        eos = tuple(tokenizer.eos)
        self._ends = _Ends(eos or (tokenizer.vocab_size,), bool(eos))
        self._tokenizer = tokenizer
        self._library: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def schema(self, schema: schemas.Schema) -> Grammar:
        """A JSON Schema as a value or as JSON text. Raises GrammarError, which names keyword and place."""
        root = schemas.read(schema)
        root.pop("x-guidance", None)  # a library's own options are not the schema's to set
        text = json.dumps(root, ensure_ascii=False)

        def lower() -> str:
            return llguidance.LLMatcher.grammar_from_json_schema(
                schemas.exact(text), overrides=_JSON
            )

        return self._compiled("schema", text, lower, lambda cause: self._place(root, cause))

    def regex(self, pattern: str) -> Grammar:
        """A regular expression that the whole text matches. Raises GrammarError."""
        _check_text("regex", pattern)
        lower = llguidance.LLMatcher.grammar_from_regex
        return self._compiled("regex", pattern, lambda: lower(pattern), _unplaced)

    def ebnf(self, text: str) -> Grammar:
        """EBNF in Lark's notation, or in GBNF. Raises GrammarError."""
        _check_text("grammar", text)
        if "::=" in text and len(text) > MAX_GBNF_BYTES:  # converting takes time with its square
            cause = f"has {len(text):,} characters; at most {MAX_GBNF_BYTES:,} in GBNF"
            raise GrammarError("grammar", "", cause)
        try:
            lark = any_to_lark(text)
        except RecursionError:
            raise GrammarError("grammar", "", "is nested too deeply") from None
        except Exception as error:  # the converter raises no class of its own
            raise GrammarError("grammar", "", _cause(str(error))) from None
        lower = llguidance.LLMatcher.grammar_from_lark
        return self._compiled("grammar", text, lambda: lower(lark), _unplaced)

    def embedded(self, schema: schemas.Schema) -> str:
        """A schema as a term of a text for `composed`. Raises GrammarError."""
        root = schemas.read(schema)
        root["x-guidance"] = _JSON
        return f"%json {schemas.exact(json.dumps(root, ensure_ascii=False))}"

    def control(self, name: str) -> str | None:
        """A control token as such a term; None where the vocabulary has none of this name."""
        ids = self._tokenizer.encode(name, allow_special=True)
        return f"<[{ids[0]}]>" if len(ids) == 1 and self._tokenizer.is_special(ids[0]) else None

    def composed(self, text: str) -> Grammar:
        """A grammar in Lark's notation that headrace itself wrote: of `embedded`, `control` and its own rules.

        Raises GrammarError.
        """
        _check_text("answer", text)
        lower = llguidance.LLMatcher.grammar_from_lark
        return self._compiled("answer", text, lambda: lower(text), _unplaced)

    def _compiled(self, kind: Kind, text: str, lower: Callable[[], str], find: Find) -> Grammar:
        key = _digest(kind, text)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            grammar = _on_a_deep_stack(kind, lambda: self._compile(kind, text, lower, find))
            self._kept[key] = grammar
            self._drop_oldest()
            return grammar

    def _drop_oldest(self) -> None:
        """Keep no more than may be kept; the newest stays in any case."""
        size = sum(len(grammar.text) for grammar in self._kept.values())
        while len(self._kept) > 1 and (len(self._kept) > KEPT or size > KEPT_CHARACTERS):
            size -= len(self._kept.popitem(last=False)[1].text)

    def _compile(self, kind: Kind, text: str, lower: Callable[[], str], find: Find) -> Grammar:
        """Compile, and take a first look, which shows grammars that no text satisfies or that are too large."""
        if self._library is None:
            self._library = _library(self._tokenizer, self._ends.ids)
        try:
            matcher = llguidance.LLMatcher(self._library, lower(), log_level=0, limits=_limits())
        except ValueError as error:
            raise GrammarError(kind, "", _cause(str(error))) from None
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_ff_tokens()
            first.compute_bitmask()
            if not first.is_error():
                return Grammar(kind, text, self._tokenizer, matcher, self._ends)
            matcher = first
        raise GrammarError(kind, *find(matcher.get_error()))

    def _place(self, root: schemas.Json, cause: str) -> tuple[str, str]:
        """Where a schema is at fault, and why: what cannot be satisfied is looked for below what requires it."""
        shared = {key: root[key] for key in ("$schema", "$defs", "definitions") if key in root}
        node: schemas.Json = root
        above = ""
        while (found := _REQUIRED.search(cause)) and self._library is not None:
            below = node.get("properties", {}).get(found[1])
            if not isinstance(below, dict):
                break
            text = json.dumps({**shared, **below})
            lowered = llguidance.LLMatcher.grammar_from_json_schema(
                schemas.exact(text), overrides=_JSON
            )
            matcher = llguidance.LLMatcher(self._library, lowered, log_level=0, limits=_limits())
            if not matcher.is_error():
                break
            node, cause = below, matcher.get_error()
            above += schemas.pointer((((), "properties"), found[1]))
        return above + schemas.pointer(schemas.find(node, cause)), _cause(cause)


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=1_000_000,  # less than a tenth of a second
        step_max_items=100_000,
        max_items_in_row=10_000,
        max_lexer_states=50_000,  # about 2 kB each
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def _on_a_deep_stack(kind: Kind, compile_: Callable[[], T]) -> T:
    """The library recurses along references, as deep as a text within the bounds can nest them.

    Its thread's stack is address space; memory is taken as it is used. Raises GrammarError where there is none.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(compile_())
        except BaseException as error:
            done.set_exception(error)

    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
        except (RuntimeError, MemoryError):
            raise GrammarError(kind, "", "there is no memory to compile it") from None
        finally:
            threading.stack_size(before)
    thread.join()
    return done.result()


def _check_text(kind: Kind, text: str) -> None:
    if not isinstance(text, str):
        raise InputError(f"the {kind} is of type {type(text).__name__}, not text")
    if not text.strip():
        raise GrammarError(kind, "", "is empty")
    if len(text) > MAX_BYTES:
        raise GrammarError(kind, "", f"has {len(text):,} characters; at most {MAX_BYTES:,}")


def _digest(kind: Kind, text: str) -> str:
    return hashlib.sha256(f"{kind}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _unplaced(message: str) -> tuple[str, str]:
    return "", _cause(message)


def _cause(message: str) -> str:
    """A message of the library as one line that says nothing of its options."""
    for end in _ENDS:
        message = message.split(end)[0]
    for sign, cause in _CAUSES.items():
        if sign in message:
            return cause
    for line in message.splitlines():
        if line.startswith("error: "):  # of a regular expression, below a drawing of it
            return line.removeprefix("error: ")
    return " ".join(message.split())[:300] or "the library gives no cause"


class _Vocabulary(llguidance.TokenizerWrapper):
    """A tokenizer as the library wants it. Its calls come from native code, which an exception would end."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, ends: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.tokens += [b""] * (max(ends) + 1 - len(self.tokens))
        self.library: llguidance.LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of `text`, as the tokenizer would cut it within a text."""
        data = text.encode()
        # A tokenizer that puts a space in front of a text does so in front of the line's end here, and is cut off.
        for lead in (b"", b"\n"):
            ids = self._ids(lead + data)
            for at in range(len(ids) + 1):
                if self._bytes(ids[at:]) == data and self._bytes(ids[:at]).strip(b" ") == lead:
                    return ids[at:]
                if at > 2:
                    break
        return [] if self.library is None else self.library.greedy_tokenize(text)

    def _ids(self, data: bytes) -> list[int]:
        try:
            return self._tokenizer.encode(data)
        except InputError:
            return []

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))


def _library(tokenizer: Tokenizer, ends: tuple[int, ...]) -> llguidance.LLTokenizer:
    vocabulary = _Vocabulary(tokenizer, ends)
    library = llguidance.LLTokenizer(vocabulary, eos_token=list(ends))
    vocabulary.library = library
    return library
