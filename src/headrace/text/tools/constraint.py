"""What an answer may be, as one grammar: reasoning, then text, calls of the tools that are offered, or JSON.

Every call that it allows is one that the parser of the same format takes, and arguments of strict tools follow their
schemas; those of demanded calls do where they can. Knows how formats write calls, and no tokens: control tokens are
named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from headrace.errors import GrammarError, InputError
from headrace.text.grammar import Grammar, GrammarCompiler
from headrace.text.schema import Schema
from headrace.text.tools import element_rules
from headrace.text.tools.calls import FUNCTION
from headrace.text.tools.element_rules import WRITABLE
from headrace.text.tools.formats import (
    ARGS,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    START,
    Format,
)  # fmt: skip
from headrace.text.tools.rules import Rules, any_schema, check, parameters, quoted
from headrace.values import Tool

MOST_CALLS = 8  # of an answer that may be nothing else: a small model sees no reason to end it

Answer = Schema | Literal["json"] | None

# Keywords by which an object may have properties that are not named beside them.
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")


def answer_grammar(
    compiler: GrammarCompiler,
    form: Format,
    *,
    tools: Sequence[Tool] = (),
    choice: str = "auto",
    parallel: bool = True,
    answer: Answer = None,
    reasoning_open: bool | None = None,
) -> Grammar | None:
    """The grammar of an answer, or None where any text will do.

    choice: "auto", "none", "required", or a tool's name. parallel: whether more than one call may come; where nothing
    but calls may, at most MOST_CALLS. answer: a
    schema, or "json" for any object; with tools to choose from, calls may come in its place. reasoning_open: the prompt
    ends within reasoning; False: the model may begin some itself; None: it does not reason.

    Raises GrammarError, which names the tool and the keyword, for what can't be followed exactly, and InputError for a
    choice that no tool is there for.
    """
    offered = _offered(form, tools, choice)
    if not offered and answer is None:
        return None
    plain = form.shape != "channels" and (reasoning_open is None or form.think is None)
    if not offered and plain and answer is not None:
        return compiler.schema(_schema(answer))

    def composed(among: list[Tool]) -> Grammar:
        text = _Composer(compiler, form, among, parallel, reasoning_open).text(choice, answer)
        return compiler.composed(text)

    all_held = choice not in ("auto", "none") or answer is not None
    held = [_held(tool) if all_held or tool.strict else tool for tool in offered]
    try:
        return _closest(offered, held, composed)
    except GrammarError:
        check(compiler, offered)
        if answer is not None:
            compiler.schema(_schema(answer))
        raise


def _schema(answer: Schema | Literal["json"]) -> Schema:
    return any_schema("object") if answer == "json" else answer


def _offered(form: Format, tools: Sequence[Tool], choice: str) -> list[Tool]:
    """The tools that may be called: those that the format can name."""
    if choice == "none":
        return []
    named = choice not in ("auto", "required")
    wanted = [tool for tool in tools if not named or tool.name == choice]
    if named and not wanted:
        raise InputError(f"the tool {choice[:80]!r} that is to be called is not declared")
    if choice == "required" and not wanted:
        raise InputError("a tool is to be called, and none is declared")
    if form.shape in ("xml", "named", "channels"):
        wanted = [tool for tool in wanted if WRITABLE.fullmatch(tool.name)]
    if choice != "auto" and not wanted:
        raise InputError(f"the model's format can't name the tool {tools[0].name[:80]!r}")
    return wanted


def _closest(
    tools: list[Tool], held: list[Tool], composed: Callable[[list[Tool]], Grammar]
) -> Grammar:
    """Calls of the tools as they are `held`, where that can be followed, else as they are."""
    if held == tools:
        return composed(tools)
    try:
        return composed(held)
    except GrammarError:
        pass

    def follows(tool: Tool) -> bool:
        try:
            composed([tool])
        except GrammarError:
            return False
        return True

    some = [h if h is not t and follows(h) else t for h, t in zip(held, tools, strict=True)]
    try:
        return composed(some)
    except GrammarError:
        return composed(tools)


def _held(tool: Tool) -> Tool:
    """A tool whose schema names its properties, and leaves open only whether there are others: as a strict one that
    has none. So a model that sees no end does not go on inventing some."""
    schema = tool.parameters
    open_ended = (
        any(key in schema for key in _ELSEWHERE) or schema.get("type", "object") != "object"
    )
    if open_ended or not isinstance(schema.get("properties"), Mapping):
        return tool
    if "additionalProperties" in schema:
        return replace(tool, strict=True)
    needed = schema.get("required")
    names = [n for n in needed if isinstance(n, str)] if isinstance(needed, list | tuple) else []
    properties = {**{key: {} for key in names}, **schema["properties"]}  # unnamed ones: anything
    closed = {**schema, "properties": properties, "additionalProperties": False}
    return replace(tool, parameters=closed, strict=True)


class _Composer:
    """Writes the rules of one answer."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        form: Format,
        tools: list[Tool],
        parallel: bool,
        reasoning_open: bool | None,
    ) -> None:
        self._rules = Rules(compiler, form)
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._open = reasoning_open
        self._again = "*"  # how often a call may follow another

    def text(self, choice: str, answer: Answer) -> str:
        rules = self._rules
        if choice != "auto" or answer is not None:  # no text is there to go on with
            self._again = f"{{0,{MOST_CALLS - 1}}}"
        said = None if answer is None else rules.compiler.embedded(_schema(answer))
        if self._form.shape == "channels":
            body = self._channels(choice, said)
        else:
            body = f"{self._reasoning()} {self._body(choice, said)}"
        rules.add("start", body)
        return rules.text()

    def _body(self, choice: str, said: str | None) -> str:
        rules = self._rules
        if said is None:
            return self._among_text() if choice == "auto" else self._only_calls()
        if not self._tools:
            return rules.add("said", said)
        calls = self._only_calls()
        return f"({calls} | {rules.add('said', said)})" if choice == "auto" else calls

    # Reasoning

    def _reasoning(self) -> str:
        """The block in front, with what may follow it before the answer."""
        pair = self._form.think
        if pair is None or self._open is None:
            return ""
        rest = f"{self._rules.up_to('thought', pair[1])} GAP"
        if self._open:
            return rest
        return f"({self._rules.tag(pair[0])} {rest})?"

    # Calls

    def _only_calls(self) -> str:
        """Nothing but calls."""
        form, rules = self._form, self._rules
        if form.shape == "list":
            return self._listed(rules.tag(form.open))
        if form.shape == "bare":
            opening = f"({rules.tag(form.open)})? " if form.is_control(form.open) else ""
            return f"{opening}{self._several(self._one(), quoted('; '))}"
        call = rules.shared("call", f"{rules.tag(form.open)} {self._one()} {self._close()}")
        return self._several(call, "GAP")

    def _several(self, call: str, between: str) -> str:
        return f"{call} ({between} {call}){self._again}" if self._parallel else call

    def _listed(self, opening: str) -> str:
        one = self._one()
        return f'{opening} " "? "[" {self._several(one, quoted(", "))} "]"'

    def _among_text(self) -> str:
        """Any text, in which what begins like a call is one."""
        form, rules = self._form, self._rules
        if form.shape == "bare":
            return self._bare_or_text()
        head = rules.up_to("head", form.open)
        if form.shape == "list":
            return f"({self._listed(head)} | TEXT)"
        call = f"{head} {self._one()} {self._close()}"
        if form.shape == "xml":  # the parser takes a function without the tag around it, too
            call = f"{call} | {rules.up_to('bare_head', FUNCTION)} one"
        return f"({call})* TEXT" if self._parallel else f"({call} GAP | TEXT)"

    def _bare_or_text(self) -> str:
        """Calls, or text that does not begin as one does."""
        rules, form = self._rules, self._form
        keys = "name|parameters|arguments|type|id"
        prose = rf'/(?s:.*)/ & ~/\s*\{{\s*"({keys})"(?s:.*)/'
        calls = self._several(self._one(), quoted("; "))
        if form.is_control(form.open):
            rules.add("PROSE", prose)
            return f"(PROSE ({rules.tag(form.open)} {calls})? | {calls})"
        # Text up to an ordinary tag would be one lexeme with the calls, which then could not end the answer.
        rules.add("PROSE", rf"{prose} & ~/(?s:.*){re.escape(form.open)}(?s:.*)/")
        return f"(PROSE | {calls})"

    def _close(self) -> str:
        """The end of a call, line ends around it included."""
        return f"GAP {self._rules.tag(self._form.close)}" if self._form.close else ""

    def _one(self) -> str:
        """The rule of one call, of any tool, without its tags."""
        write: dict[str, Callable[[int, Tool], str]] = {
            "xml": lambda i, tool: element_rules.function(self._rules, i, tool),
            "named": self._named,
        }
        terms = [write.get(self._form.shape, self._object)(i, t) for i, t in enumerate(self._tools)]
        gap = {"object": "GAP ", "xml": f"GAP {quoted(FUNCTION)} "}.get(self._form.shape, "")
        return gap + self._rules.shared("one", "\n  | ".join(terms))

    def _object(self, index: int, tool: Tool) -> str:
        key = self._form.arguments
        head = f'{{"name": {quoted(tool.name)}, "{key}": '
        return f'{quoted(head)} {self._arguments(index, tool)} "}}"'

    def _named(self, index: int, tool: Tool) -> str:
        return f"{quoted(tool.name)} {self._rules.tag(ARGS)} {self._arguments(index, tool)}"

    def _arguments(self, index: int, tool: Tool) -> str:
        if not tool.strict:
            return self._rules.any_value("object")
        schema = parameters(tool)
        return self._rules.shared(f"a_{index}", self._rules.compiler.embedded(schema))

    # Channels

    def _channels(self, choice: str, said: str | None) -> str:
        """Messages with headers; the last one is the answer, or a call."""
        rules = self._rules
        channel, message = rules.tag(CHANNEL), rules.tag(MESSAGE)
        again = f'{rules.tag(START)} "assistant"'
        ended = self._ended()
        thought = f'{channel} "analysis" {message} {ended} {again}'
        before = f"{ended} {again} ({thought})*" if self._open else f"({thought})*"
        last = []
        if choice in ("auto", "none"):
            last.append(f'{channel} "final" {message} {self._final(said)}')
        if self._tools:
            last.append(self._channel_call(channel, message))
        if choice == "auto" and self._tools and said is None:
            before += f' ({channel} "commentary" {message} {ended} {again})?'
        return f"{before} ({' | '.join(last)})"

    def _final(self, said: str | None) -> str:
        if said is not None:
            return self._rules.add("said", said)
        return "TEXT" if self._form.is_control(END) else "PLAIN"

    def _ended(self) -> str:
        """The text of a message and its end; where tags are ordinary text, it spells none."""
        rules = self._rules
        if self._form.is_control(END):
            return rules.up_to("ended", END)
        rules.add("PLAIN", r"/([^<]|<+[^<|])*/")
        return rules.shared("ended", f"PLAIN {rules.tag(END)}", "[lazy]")

    def _channel_call(self, channel: str, message: str) -> str:
        rules = self._rules
        json = f'(" " {rules.tag(CONSTRAIN)} "json" | {rules.tag(CONSTRAIN)} "json" | " json")?'
        terms = [
            f"{quoted(tool.name)} {json} {message} {self._arguments(i, tool)}"
            for i, tool in enumerate(self._tools)
        ]
        one = rules.add("one", "\n  | ".join(terms))
        return f'{channel} "commentary to=functions." {one}'
