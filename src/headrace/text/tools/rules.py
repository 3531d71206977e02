"""A grammar as it is written: rules by name, terms that quote, and what tools of every format share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import GrammarError
from headrace.text.grammar import GrammarCompiler
from headrace.text.tools.formats import Format
from headrace.values import Tool

ANY_DEPTH = 24  # of JSON that no schema describes
_SCALARS = ["null", "boolean", "number", "string"]


class Rules:
    """Collects rules in Lark's notation. TEXT: any text; GAP: what may stand between parts, at most two line ends."""

    def __init__(self, compiler: GrammarCompiler, form: Format) -> None:
        self.compiler = compiler
        self.form = form
        self._lines = ["TEXT: /(?s:.*)/", r"GAP: /\n{0,2}/"]
        self._named: dict[str, str] = {}

    def add(self, name: str, body: str, options: str = "") -> str:
        """A rule; returns its name."""
        self._lines.append(f"{name}{options}: {body}")
        return name

    def shared(self, name: str, body: str, options: str = "") -> str:
        """A rule that is there once, whoever asks."""
        if name not in self._named:
            self._named[name] = self.add(name, body, options)
        return name

    def tag(self, tag: str) -> str:
        """A tag of the format: a control token, or its text."""
        control = self.compiler.control(tag) if self.form.is_control(tag) else None
        return control or quoted(tag)

    def up_to(self, name: str, tag: str) -> str:
        """Any text and the tag behind it, at its first occurrence."""
        if self.form.is_control(tag):
            return self.shared(name, f"TEXT {self.tag(tag)}")
        return self.shared(name, f"TEXT {quoted(tag)}", "[lazy]")

    def any_value(self, kind: str) -> str:
        """Any JSON object, or any value of a type."""
        return self.shared(f"any_{kind}", self.compiler.embedded(any_schema(kind)))

    def text(self) -> str:
        return "\n".join(reversed(self._lines))


def quoted(text: str) -> str:
    """A text as a term."""
    return json.dumps(text, ensure_ascii=False)


def any_schema(kind: str) -> dict[str, Any]:
    """A schema of any value of a type, nested as deep as replies may be."""
    if kind in _SCALARS:
        return {"type": kind}
    levels: dict[str, Any] = {"v0": {"type": _SCALARS}}
    for level in range(1, ANY_DEPTH):
        below = {"$ref": f"#/$defs/v{level - 1}"}
        whole = {"type": [*_SCALARS, "array", "object"]}
        levels[f"v{level}"] = {**whole, "items": below, "additionalProperties": below}
    top = {"$ref": f"#/$defs/v{ANY_DEPTH - 1}"}
    inside = {"items": top} if kind == "array" else {"additionalProperties": top}
    return {"type": kind, **inside, "$defs": levels}


def parameters(tool: Tool) -> dict[str, Any]:
    """A strict tool's schema, of objects alone. Without any keyword nothing is declared, and so nothing is taken."""
    schema: dict[str, Any] = dict(tool.parameters)
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise refusal(tool, "/type", "type: arguments are an object")
    if not schema:
        schema["additionalProperties"] = False
    return {**schema, "type": "object"}


def refusal(tool: Tool, place: str, cause: str) -> GrammarError:
    """Why a tool can't be followed exactly."""
    return GrammarError(f"tool {tool.name[:80]!r}", place, cause)


def check(compiler: GrammarCompiler, tools: list[Tool]) -> None:
    """Raises GrammarError for the first strict tool whose schema can't be followed on its own."""
    for tool in tools:
        if tool.strict:
            try:
                compiler.schema(parameters(tool))
            except GrammarError as error:
                raise refusal(tool, error.place, error.cause) from None


def declared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of an object's schema."""
    found = schema.get("properties")
    return dict(found) if isinstance(found, Mapping) else {}
