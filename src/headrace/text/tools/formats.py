"""The ways in which model families write reasoning and tool calls, as rows of a table.

A row is data: the parser, the prompt and the grammar read the same one. Knows no tokenizer; which of a row's tags are
control tokens is told by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

# object: JSON objects with a name and arguments. xml: elements for a function and its parameters. bare: such objects
# without tags. named: a name, a tag, the arguments. channels: messages with a header each.
Shape = Literal["object", "xml", "bare", "list", "named", "channels"]

THINK = ("<think>", "</think>")
MISTRAL_THINK = ("[THINK]", "[/THINK]")


@dataclass(frozen=True)
class Format:
    """One row.

    open, close: tags around a call; close is empty where the call's own end is its end. think: tags around reasoning,
    None for a model that does not write any. arguments: their key. native: the chat template renders tools, calls and
    results itself. single: it takes one call a message. alternating: it wants user and assistant to take turns.
    ids: the letters of a call's id that the template demands, 0 for any. controls: those tags that are control tokens,
    which text never spells; the others are ordinary text.
    """

    name: str
    shape: Shape
    open: str = ""
    close: str = ""
    think: tuple[str, str] | None = None
    arguments: str = "arguments"
    native: bool = True
    single: bool = False
    alternating: bool = False
    ids: int = 0
    controls: frozenset[str] = frozenset()

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag of the row, controls included."""
        own = CHANNEL_TAGS if self.shape == "channels" else NAMED_TAGS if self._mistral else ()
        return (*filter(None, (self.open, self.close)), *(self.think or ()), *own)

    @property
    def _mistral(self) -> bool:
        return self.shape in ("named", "list")

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a prompt, or its end with its control tokens, ends within reasoning."""
        end = prompt.rstrip()
        if self.shape == "channels":
            return end.endswith(f"{CHANNEL}analysis{MESSAGE}")
        return self.think is not None and end.endswith(self.think[0])

    def is_control(self, tag: str) -> bool:
        """Whether a tag is a control token of the vocabulary."""
        return tag in self.controls


CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
CHANNEL_TAGS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"
NAMED_TAGS = (CALL_ID, ARGS)

HERMES = Format("hermes", "object", "<tool_call>", "</tool_call>")
QWEN_XML = Format("qwen-xml", "xml", "<tool_call>", "</tool_call>")
LLAMA = Format("llama", "bare", "<|python_tag|>", arguments="parameters", single=True)
MISTRAL = Format("mistral", "list", "[TOOL_CALLS]", alternating=True, ids=9)
MISTRAL_ARGS = Format("mistral-args", "named", "[TOOL_CALLS]", alternating=True, ids=9)
HARMONY = Format("harmony", "channels", single=True)
FORMATS = (HERMES, QWEN_XML, LLAMA, MISTRAL, MISTRAL_ARGS, HARMONY)

_TOOLS = re.compile(r"\btools\b")


def detect(template: str | None, control_names: Iterable[str] = ()) -> Format:
    """The row of a model, by its chat template's source and the names of its vocabulary's control tokens.

    A template that renders no tools, or in a way that is not in the table, gets `HERMES` with `native` False: tools
    are described in the system message.
    """
    source = template or ""
    names = frozenset(control_names)
    row = _row(source)
    row = replace(row, think=_think(source, names) if row is not HARMONY else None)
    # What a message spells is never a control token, and so tags that messages describe are none.
    marked = row.tags if row.native else row.think or ()
    return replace(row, controls=names & frozenset(marked))


def _row(source: str) -> Format:
    if CHANNEL in source and MESSAGE in source:
        return HARMONY
    if not _TOOLS.search(source):
        return replace(HERMES, native=False)
    if "<function=" in source and "<parameter=" in source:
        return QWEN_XML
    if "<tool_call>" in source and "<arg_key>" not in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL_ARGS if ARGS in source else MISTRAL
    if "<|python_tag|>" in source or ("<|start_header_id|>" in source and "parameters" in source):
        return LLAMA
    return replace(HERMES, native=False)


def _think(source: str, names: frozenset[str]) -> tuple[str, str] | None:
    for pair in (THINK, MISTRAL_THINK):
        if pair[0] in source or pair[1] in source or set(pair) <= names:
            return pair
    return None
