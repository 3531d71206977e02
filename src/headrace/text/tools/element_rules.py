"""Rules of calls whose arguments are elements: text without quotes where a string may be, JSON elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from headrace.text import schema as schemas
from headrace.text.tools import arguments
from headrace.text.tools.calls import END_FUNCTION, END_PARAMETER, PARAMETER, unclosed
from headrace.text.tools.rules import Rules, check, declared, parameters, quoted, refusal
from headrace.values import Tool

WRITABLE = re.compile(r"[^\s<>{}\[\]]{1,256}")  # a name that can stand in a tag
MAX_COUNTED = 60  # parameters in any order; more come in theirs

_SILENT = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "$comment", "nullable")
)
_WHOLE = ("allOf", "anyOf", "oneOf", "patternProperties", "enum", "const")  # of all arguments


def function(rules: Rules, index: int, tool: Tool) -> str:
    """The rule of one tool's element, behind `FUNCTION`. Raises GrammarError for what elements can't say exactly."""
    check(rules.compiler, [tool])
    root, node = _root(tool)
    needed = (
        [k for k in schemas.listed(node, "required") if isinstance(k, str)] if tool.strict else []
    )
    names = [key for key in declared(node) if WRITABLE.fullmatch(key)]
    missing = next((key for key in needed if key not in names), None)
    if missing is not None:
        raise refusal(
            tool, "/required", f"required: {missing[:80]!r} has no schema, or no tag can name it"
        )
    values = [
        _value(rules, tool, f"p_{index}_{i}", root, declared(node)[k]) for i, k in enumerate(names)
    ]
    terms = [f"{_line(PARAMETER, k)} {v}" for k, v in zip(names, values, strict=True)]
    inside = _in_any_order(rules, f"f_{index}_in", terms, [key in needed for key in names])
    return rules.add(f"f_{index}", f"{_line('', tool.name)} {inside} {quoted(END_FUNCTION)}")


def _line(tag: str, name: str) -> str:
    return quoted(f"{tag}{name}>\n")


def _root(tool: Tool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema that references point into, and the one that has the properties."""
    root = parameters(tool) if tool.strict else dict(tool.parameters)
    node: Any = root
    for _ in range(8):
        if not isinstance(node, Mapping) or not isinstance(node.get("$ref"), str):
            break
        node = schemas.resolve(root, node["$ref"])[1]
    if not isinstance(node, Mapping):
        node = {}
    keyword = next((k for k in (*_WHOLE, "minProperties", "maxProperties") if k in node), None)
    if tool.strict and keyword:
        raise refusal(tool, f"/{keyword}", f"{keyword}: can't be enforced of all parameters")
    return root, dict(node)


def _in_any_order(rules: Rules, name: str, terms: list[str], needed: list[bool]) -> str:
    if len(terms) > MAX_COUNTED:
        return " ".join(f"({t})" if n else f"({t})?" for t, n in zip(terms, needed, strict=True))
    if not terms:
        return ""
    branches = [f"{t} {name}::set_bit({i}) %if bit_clear({i})" for i, t in enumerate(terms)]
    end = "true"
    for bit in (i for i, n in enumerate(needed) if n):
        end = f"bit_set({bit})" if end == "true" else f"and({end}, bit_set({bit}))"
    rules.add(f"{name}::_", "\n  | ".join([*branches, f'"" %if {end}']))
    return f"{name}::0"


def _value(rules: Rules, tool: Tool, name: str, root: dict[str, Any], schema: object) -> str:
    allowed = arguments.types(root, schema)
    if allowed is None or arguments.is_text(allowed):
        words = _words(tool, root, schema) if tool.strict else None
        if words is None:
            return f'{_any_text(rules)} "\\n"'
        term = " | ".join(map(quoted, words))
        return f"{rules.add(name, term)} {_END}"
    if tool.strict and isinstance(schema, Mapping):
        shared = {k: v for k, v in root.items() if k in ("$schema", "$defs", "definitions")}
        term = rules.compiler.embedded(shared | dict(schema))
    elif len(allowed) == 1:
        return f"{rules.any_value(next(iter(allowed)))} {_END}"
    else:
        term = " | ".join(rules.any_value(kind) for kind in sorted(allowed))
    return f"{rules.add(name, term)} {_END}"


_END = quoted(f"\n{END_PARAMETER}\n")


def _any_text(rules: Rules) -> str:
    """Text up to the end of its parameter. It can't spell the ends of its function and call: those end it, too."""
    close = rules.form.close
    if rules.form.is_control(close):
        return rules.up_to("any_text", END_PARAMETER)
    spelled = unclosed(close).replace("/", r"\/")
    rules.shared("UNENDED", rf"/(?s:.*)/ & ~/(?s:.*){spelled}(?s:.*)/")
    return rules.shared("any_text", f"UNENDED {quoted(END_PARAMETER)}", "[lazy]")


def _words(tool: Tool, root: dict[str, Any], schema: object) -> list[str] | None:
    """The strings that a strict parameter may be; None for any. Raises GrammarError where text can't be held to it."""
    words: list[str] = []
    for option in _options(root, schema):
        bounds = [k for k in option if k not in _SILENT]
        if "enum" in option or "const" in option:
            values = option["enum"] if "enum" in option else [option["const"]]
            words += [v for v in values if isinstance(v, str)]
        elif (kinds := arguments.types(root, option)) is None or arguments.is_text(kinds):
            if not bounds:
                return None
            raise refusal(tool, "", f"{bounds[0]}: can't be enforced of a string without quotes")
    return words


def _options(root: dict[str, Any], schema: object) -> list[Mapping[str, Any]]:
    """A schema's alternatives, as deep as they are nested."""
    out: list[Mapping[str, Any]] = []
    stack, visits = [schema], 0
    while stack and visits < 1000:
        visits += 1
        node = stack.pop()
        if not isinstance(node, Mapping):
            continue
        below = [*schemas.listed(dict(node), "anyOf"), *schemas.listed(dict(node), "oneOf")]
        if isinstance(node.get("$ref"), str):
            below.append(schemas.resolve(root, node["$ref"])[1])
        if below and not set(node) - _SILENT - {"anyOf", "oneOf", "$ref"}:
            stack += reversed(below)
        else:
            out.append(node)
    return out
