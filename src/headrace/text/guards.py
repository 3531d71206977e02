"""What a template's operators, filters and string methods must show before they run.

A guard takes the meter and the operands and raises LimitError when the result could be far too
large; the exact size is paid for afterwards. Knows jinja2's names of filters, nothing of messages.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.text.meter import LimitError, Meter

STRING_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
    "isprintable", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
    "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
))  # fmt: skip
SEQUENCE_METHODS = frozenset({"count", "index", "copy"})
MAPPING_METHODS = frozenset({"get", "items", "keys", "values", "copy"})

# These look at a value's own items only, or at none until they are asked for.
SHALLOW_FILTERS = frozenset((
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject",
    "rejectattr", "reverse", "safe", "select", "selectattr",
))  # fmt: skip
# These write a text from a value that is not one.
TEXT_FILTERS = frozenset((
    "capitalize", "e", "escape", "format", "indent", "lower", "replace", "string", "title",
    "trim", "upper", "wordcount",
))  # fmt: skip
DEEP_FILTERS = TEXT_FILTERS | frozenset((
    "abs", "dictsort", "float", "groupby", "int", "join", "max", "min", "round", "sort", "sum",
    "truncate", "unique", "urlencode",
))  # fmt: skip

_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")
_HTML = 5  # characters that escaping makes of one, at most


def operator(meter: Meter, name: str, left: Any, right: Any) -> None:
    """A binary operator."""
    meter.step()
    if isinstance(left, int) and isinstance(right, int):
        _integers(meter, name, left, right)
    elif name == "*":
        _repeat(meter, left, right)
    elif name == "%" and isinstance(left, str):
        percent(meter, left, right)
    elif isinstance(left, str) and isinstance(right, str):
        meter.room(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        meter.items(len(left) + len(right))


def _integers(meter: Meter, name: str, left: int, right: int) -> None:
    bits, others = left.bit_length(), right.bit_length()
    meter.integer(max(bits, others))
    if name == "*":
        meter.integer(bits + others)
    elif name == "**":
        meter.integer(bits * abs(right))


def _repeat(meter: Meter, left: Any, right: Any) -> None:
    value, count = (left, right) if isinstance(right, int) else (right, left)
    if not isinstance(count, int) or not isinstance(value, str | list | tuple):
        return
    length = len(value) * max(count, 0)
    (meter.room if isinstance(value, str) else meter.items)(length)


def percent(meter: Meter, pattern: str, values: Any) -> None:
    """printf-style formatting, by the operator or the filter."""
    if _WIDE.search(pattern):
        raise LimitError("it formats with a width or precision that is not below 1000")
    meter.room(len(pattern) + pattern.count("%") * (meter.deep(values) + 1000))


def braces(pattern: str) -> None:
    """str.format: plain fields only."""
    for _, _, spec, conversion in string.Formatter().parse(pattern):
        if spec or conversion:
            raise LimitError("it uses str.format with a format specification")


def method(
    meter: Meter, owner: str, name: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """A method of a string."""
    largest = max((meter.deep(a) for a in (*args, *options.values())), default=0)
    meter.room(len(owner) * 3)
    meter.step(1 + len(owner) // 64)
    if name == "join" and args:
        joined(meter, owner, args[0])
    elif name == "replace" and len(args) >= 2:
        replaced(meter, owner, args[0], args[1])
    elif name == "format":
        meter.room(len(owner) + owner.count("{") * largest)


def joined(meter: Meter, separator: object, values: object) -> None:
    """Joining. `values` is not lazy (see `materialised`)."""
    if isinstance(values, list | tuple | dict | str | range | set):
        total = meter.deep(separator) * len(values)
        meter.room(total + sum(meter.deep(v) for v in values))


def replaced(meter: Meter, text: object, old: object, new: object) -> None:
    source, growth = str(text), meter.deep(new) - len(str(old))
    meter.room(len(source) + (source.count(str(old)) * growth if growth > 0 else 0))


def _replace(meter: Meter, text: object, old: object = "", new: object = "", *_: object) -> None:
    meter.deep(old)
    replaced(meter, text, old, new)


def _join(meter: Meter, values: object, d: object = "", attribute: object = None) -> None:
    if attribute is not None:
        raise LimitError("it joins by attribute; use map(attribute=...) | join")
    joined(meter, d, values)


def _format(meter: Meter, pattern: object, *args: object, **options: object) -> None:
    percent(meter, str(pattern), options or args)


def _indent(meter: Meter, text: object, width: object = 4, *_: object, **__: object) -> None:
    size = len(width) if isinstance(width, str) else width
    if not isinstance(size, int) or size > 256:
        raise LimitError("it indents by more than 256 characters")
    meter.room(meter.deep(text) + (str(text).count("\n") + 1) * max(size, 0))


def _int(meter: Meter, value: object, *_: object, **__: object) -> None:
    if isinstance(value, str) and len(value) > 1000:
        raise LimitError("it makes an integer of more than 1000 characters")


def _round(meter: Meter, value: object, precision: object = 0, *_: object, **__: object) -> None:
    if not isinstance(precision, int) or abs(precision) > 20:
        raise LimitError("it rounds to more than 20 digits")
    meter.integer(value.bit_length() if isinstance(value, int) else 0)


def _sum(meter: Meter, values: object, attribute: object = None, start: object = 0) -> None:
    if not isinstance(start, int | float):
        raise LimitError("it sums something other than numbers")


def _expand(factor: int) -> Callable[..., None]:
    def guard(meter: Meter, text: object, *_: object, **__: object) -> None:
        meter.room(meter.deep(text) * factor)

    return guard


FILTERS: Mapping[str, Callable[..., None]] = {
    "indent": _indent, "int": _int, "round": _round, "sum": _sum,
    "replace": _replace, "join": _join, "format": _format,
    "e": _expand(_HTML), "escape": _expand(_HTML), "urlencode": _expand(12),
    "upper": _expand(3), "title": _expand(3), "capitalize": _expand(3), "lower": _expand(3),
}  # fmt: skip


def materialised(meter: Meter, value: object) -> object:
    """A lazy iterable as a list, each item paid for; any other value unchanged."""
    return list(meter.ticking(value)) if isinstance(value, Iterator) else value
