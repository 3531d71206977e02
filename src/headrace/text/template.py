"""Chat templates: messages to text, and to ids in which every control token is the template's own.

Owns rendering within bounds and the rule that message content, whatever it spells and however the
template cuts it, stays ordinary text. Knows a tokenizer by its marks; knows nothing of models.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import jinja2

from headrace.errors import HeadraceError, TemplateError
from headrace.text.conversation import Messages, Tools, masked_variables, variables
from headrace.text.marks import Marks
from headrace.text.meter import LimitError, Limits, Look, Meter, size_of
from headrace.text.sandbox import ChatEnvironment
from headrace.text.tokenizer import Check, Tokenizer

T = TypeVar("T")
Clock = Callable[[], datetime]

MAX_SOURCE = 1 << 18  # characters
_PRIVATE = range(0xF0000, 0xFFFFE)  # where masked content moves to


class ChatTemplate:
    """A Jinja chat template as Hugging Face's `apply_chat_template` understands it.

    TemplateError when it is not valid, when it raises, or when rendering it takes more than
    `limits` (scaled by the size of the messages). `clock` is what `strftime_now` reads.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        clock: Clock = datetime.now,
        limits: Limits | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"chat template: it is longer than {MAX_SOURCE:,} characters")
        self._source = source
        self._bos, self._eos = bos, eos
        self._clock = clock
        self._limits = limits or Limits()
        self._programs: dict[Marks | None, _Program] = {}
        self._program(None)

    def _program(self, marks: Marks | None) -> _Program:
        found = self._programs.get(marks)
        if found is None:
            mark = marks.mark if marks else _unchanged
            found = _Program(self._source, self._limits, self._clock, mark)
            self._programs[marks] = found
        return found

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a conversation. `extra` are further variables, such as enable_thinking."""
        values = variables(messages, add_generation_prompt, tools, extra)
        return self._render(None, values)

    def render_marked(
        self,
        marks: Marks,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        extra: Mapping[str, object] | None = None,
        look: Look | None = None,
    ) -> str:
        """As `render`, with a mark in place of each control token of the template's own text.

        look: is called now and then; what it raises ends the rendering.
        """
        values = variables(messages, add_generation_prompt, tools, extra)
        text = self._render(marks, values, look)
        spans = marks.names_in(text)
        return self._composed(marks, values, text, spans, look) if spans else text

    def _composed(
        self,
        marks: Marks,
        values: dict[str, Any],
        text: str,
        spans: list[tuple[int, int]],
        look: Look | None,
    ) -> str:
        """Marks names that the template put together from pieces ('<|' + role + '|>').

        A second rendering with the content's characters moved to a private-use plane shows which
        characters are the template's. If the two renderings differ otherwise (the template looked
        into the content), every name that is left counts as content.
        """
        letters = sorted(c for c in marks.alphabet if _maskable(c))
        mask = dict(zip(map(ord, letters), _absent(text), strict=False))
        try:
            own = self._render(marks, masked_variables(values, lambda s: s.translate(mask)), look)
        except TemplateError:
            return text
        if own.translate({v: k for k, v in mask.items()}) != text:
            return text
        trusted = [s for s in spans if own[slice(*s)] == text[slice(*s)] and _covers(mask, text, s)]
        return _marked(marks, text, trusted)

    def _render(self, marks: Marks | None, values: dict[str, Any], look: Look | None = None) -> str:
        mark = marks.mark if marks else _unchanged
        special = {"bos_token": mark(self._bos), "eos_token": mark(self._eos)}
        return self._program(marks).render(special | values, look)


class _Program:
    """A compiled template with its environment. Renders one conversation at a time."""

    def __init__(
        self, source: str, limits: Limits, clock: Clock, mark: Callable[[str], str]
    ) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._environment = ChatEnvironment(Meter(limits), clock, mark)
        self._template = _refusing(lambda: self._environment.from_string(source))

    def render(self, values: dict[str, Any], look: Look | None) -> str:
        limits = self._limits.scaled(*size_of(values))
        with self._lock:
            self._environment.meter = Meter(limits, look)
            try:
                return _refusing(lambda: self._gather(values))
            finally:  # what a look knows of is not kept
                self._environment.meter = Meter(self._limits)

    def _gather(self, values: dict[str, Any]) -> str:
        parts, length, meter = [], 0, self._environment.meter
        for part in self._template.generate(values):
            meter.step()
            length += len(part)
            meter.output(length)
            parts.append(part)
        return "".join(parts)


def _refusing(act: Callable[[], T]) -> T:
    """Any failure of a template as one TemplateError; what a look raises stays what it is."""
    try:
        return act()
    except HeadraceError:
        raise
    except LimitError as error:
        raise TemplateError(f"chat template: {error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template: line {error.lineno}: {_cause(error)}") from None
    except jinja2.TemplateError as error:
        raise TemplateError(f"chat template: {_cause(error)}") from None
    except Exception as error:
        raise TemplateError(f"chat template: {type(error).__name__}: {_cause(error)}") from None


def _cause(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = error.message if isinstance(error, jinja2.TemplateError) else str(error)
    return (text or "no reason given")[:400]


def _unchanged(text: str) -> str:
    return text


def _maskable(char: str) -> bool:
    """Characters that no template's own trimming or quoting treats differently."""
    return char.isprintable() and char not in " \"'\\"


def _absent(text: str) -> Iterator[int]:
    """Private-use characters that `text` does not hold."""
    used = set(map(ord, text))
    return (code for code in _PRIVATE if code not in used)


def _covers(mask: Mapping[int, int], text: str, span: tuple[int, int]) -> bool:
    return all(ord(c) in mask for c in text[slice(*span)])


def _marked(marks: Marks, text: str, spans: list[tuple[int, int]]) -> str:
    out, at = [], 0
    for start, stop in spans:
        out += [text[at:start], marks.mark(text[start:stop])]
        at = stop
    return "".join([*out, text[at:]])


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    tools: Tools | None = None,
    extra: Mapping[str, object] | None = None,
    look: Look | None = None,
    check: Check | None = None,
) -> list[int]:
    """Ids of a conversation: those of `apply_chat_template` if content names no control token.

    Nothing is put in front of what the template says: a BOS comes from the template or not at all.
    look: see `render_marked`. check: see `Tokenizer.encode_marked`.
    """
    text = template.render_marked(
        tokenizer.marks,
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        extra=extra,
        look=look,
    )
    if check is not None:
        check(tokenizer.marks.count(text))
    if look is not None:
        look()
    return tokenizer.encode_marked(text, look=look, check=check)
