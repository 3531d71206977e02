"""Writes the tables of fields in docs/api.md, and docs/api-objects.md, from the wire types:
`PYTHONPATH=tests python -m serve.fields`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.serve.dialects import (
    anthropic_wire,
    gateway_wire,
    ollama_wire,
    openai_chat_wire,
    openai_responses_wire,
)
from headrace.serve.validation import Wire

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, OBJECTS = DOCS / "api.md", DOCS / "api-objects.md"
NO_EFFECT = "No effect"
MODULES = {
    "openai_chat": openai_chat_wire,
    "openai_responses": openai_responses_wire,
    "anthropic": anthropic_wire,
    "ollama": ollama_wire,
    "gateway": gateway_wire,
}
# Fields of a base class, which are told once for all its objects.
COMMON: dict[str, type[Wire]] = {
    "openai_chat": openai_chat_wire.Message,
    "openai_responses": openai_responses_wire._Item,
    "gateway": gateway_wire.Optioned,
}
# Of every dialect: the title of its part, its bodies, and the objects that docs/api.md has tables of.
PARTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "openai_chat": ("OpenAI Chat Completions", ("ChatBody",), ()),
    "openai_responses": ("OpenAI Responses", ("Body",), ()),
    "anthropic": ("Anthropic Messages", ("Body",), ()),
    "ollama": ("Ollama", ("ChatBody", "GenerateBody", "ShowBody"), ("Options",)),
    "gateway": ("AI SDK gateway", ("Body",), ("Own",)),
}
HEAD = """# Objects of the HTTP API

What the tables of [the API](api.md) call by name, from the code's own types. A question mark stands behind what may be left out.
"""
_MARKED = re.compile(r"(<!-- fields (\w+)\.(\w+) -->\n).*?(<!-- end -->)", re.S)

Schema = Mapping[str, Any]


def page(text: str) -> str:
    """docs/api.md with fresh tables."""
    return _MARKED.sub(lambda m: f"{m[1]}{table(kind(m[2], m[3]))}\n{m[4]}", text)


def kind(dialect: str, name: str) -> type[Wire]:
    found: type[Wire] = getattr(MODULES[dialect], name)
    return found


def table(wire: type[Wire]) -> str:
    """The fields of a body: what may stand in each; then those without an effect."""
    schema = wire.model_json_schema()
    rows, unused = [], []
    for name, field in schema["properties"].items():
        said = about(field)
        if said.startswith(NO_EFFECT):
            unused.append(f"`{name}`")
            continue
        needed = " (needed)" if name in schema.get("required", ()) else ""
        rows.append(f"| `{name}`{needed} | {values(field)} | {said} |")
    lines = ["| field | value | |", "|---|---|---|", *rows]
    if unused:
        lines += ["", f"Accepted without an effect: {', '.join(unused)}."]
    return "\n".join(lines)


def objects() -> str:
    """docs/api-objects.md: what the bodies hold."""
    out = [HEAD]
    for dialect, (title, bodies, shown) in PARTS.items():
        out.append(f"## {title}\n")
        if common := _common(dialect):
            listed = ", ".join(f"`{name}`?" for name in common)
            out.append(f"*Common* fields, all without an effect: {listed}.\n")
        out.append("| object | fields | |\n|---|---|---|")
        out.append("\n".join(_objects(dialect, bodies, shown)) + "\n")
    return "\n".join(out)


def _objects(dialect: str, bodies: tuple[str, ...], shown: tuple[str, ...]) -> Iterator[str]:
    schemas: dict[str, Schema] = {}
    for body in bodies:
        schemas |= kind(dialect, body).model_json_schema().get("$defs", {})
    for name in sorted(set(schemas) - set(shown) - set(bodies)):
        about_it = kind(dialect, name).__dict__.get("__doc__") or ""
        yield f"| `{name}` | {_inline(schemas[name], _common(dialect))} | {_escaped(about_it)} |"


def _common(dialect: str) -> list[str]:
    base = COMMON.get(dialect)
    return [] if base is None else list(base.model_json_schema()["properties"])


def _inline(schema: Schema, common: list[str]) -> str:
    """The fields of an object in one cell."""
    told, unused = [], []
    for name, field in schema["properties"].items():
        mark = "" if name in schema.get("required", ()) else "?"
        said = about(field)
        if said.startswith(NO_EFFECT):
            unused.append(f"`{name}`{mark}")
        else:
            behind = f" ({said.rstrip('.')})" if said else ""
            told.append(f"`{name}`{mark}: {values(field)}{behind}")
    if common and {f"`{name}`?" for name in common} <= set(unused):
        unused = [text for text in unused if text.strip("`?") not in common] + ["*common*"]
    if unused:
        told.append(f"without an effect: {', '.join(unused)}")
    return "; ".join(told)


def about(field: Schema) -> str:
    """What a field's description says."""
    return _escaped(next(_described(field), ""))


def _described(field: Schema) -> Iterator[str]:
    if "description" in field:
        yield field["description"]
    for branch in field.get("anyOf", ()):
        yield from _described(branch)


def values(field: Schema) -> str:
    """What may stand in a field, in words. null may always, in place of what may be left out."""
    told = dict.fromkeys(_value(branch) for branch in _branches(field))
    rest = [text for text in told if text != "null"]
    return " or ".join(rest or told)


def _branches(field: Schema) -> Iterator[Schema]:
    unions = field.get("anyOf") or field.get("oneOf")
    if unions is None:
        yield field
        return
    for branch in unions:
        yield from _branches(branch)


def _value(schema: Schema) -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "const" in schema:
        return _literal(schema["const"])
    if "enum" in schema:
        return ", ".join(map(_literal, schema["enum"]))
    match schema.get("type"):
        case "string":
            return _text(schema)
        case "array":
            if schema.get("maxItems") == 0:
                return "empty list"
            items = schema["items"]
            return f"list of {', '.join(map(_value, _branches(items)))}" if items else "list"
        case "object":
            return "empty object" if schema.get("maxProperties") == 0 else "object"
        case "integer" | "number" as name:
            return _number(name, schema)
        case None:
            return "anything"
        case name:
            return str(name)


def _number(name: str, schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and low == high:
        return f"{low:g}"
    return name if low is None else f"{name}, at least {low:g}"


def _text(schema: Schema) -> str:
    low, high = schema.get("minLength"), schema.get("maxLength")
    if high is not None:
        return f"text of {low or 0} to {high} characters" if high else "empty text"
    return "text that is not empty" if low else "text"


def _literal(value: object) -> str:
    return f"`{json.dumps(value)}`"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    OBJECTS.write_text(objects(), "utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
