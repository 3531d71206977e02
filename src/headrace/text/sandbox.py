"""The environment that chat templates run in: jinja2's immutable sandbox, metered throughout.

Behaves as the environment of Hugging Face's `apply_chat_template`, less the filters that no chat
template needs and that could run long. Knows nothing of messages or tokens.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from headrace.text import guards, rewrite
from headrace.text.meter import LimitError, Meter

_COMPARING = frozenset((
    "in", "eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "gt", "greaterthan", ">",
    "le", "<=", "ge", ">=",
))  # fmt: skip
_DATE = re.compile(r"(?:[^%]|%-?[A-Za-z%])*", re.DOTALL)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Set `meter` before compiling and before each rendering; one rendering at a time."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

    def __init__(
        self, meter: Meter, clock: Callable[[], datetime], mark: Callable[[str], str]
    ) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            finalize=self._finalize,
            extensions=[rewrite.GenerationTag, loopcontrols],
        )
        self.meter = meter
        self._rewriter = rewrite.Rewriter(mark)
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters = self._filters()
        self.tests = {name: self._test(name, run) for name, run in self._plain_tests()}
        self.globals = self._globals(clock)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(self._rewriter.visit(source), *args, **kwargs)

    # What the sandbox lets a template reach.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = _methods(obj)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        run = super().wrap_str_format(value)
        return None if run is None else functools.partial(self._format, run, value.__self__)

    def _format(self, run: Callable[..., str], pattern: str, *args: Any, **kwargs: Any) -> str:
        guards.braces(pattern)
        guards.method(self.meter, pattern, "format", args, kwargs)
        return run(*args, **kwargs)

    # What each operation pays.

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        guards.operator(self.meter, operator, left, right)
        value = super().call_binop(context, operator, left, right)
        self.meter.result(value)
        return value

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = __self.meter
        if _is_string_method(__obj):
            args = tuple(guards.materialised(meter, a) for a in args)
            guards.method(meter, __obj.__self__, __obj.__name__, args, kwargs)
        else:
            pay = meter.shallow if isinstance(__obj, Macro | LoopContext) else meter.deep
            for value in (*_searched(__obj), *args, *kwargs.values()):
                pay(value)
        meter.step()
        value = super().call(__context, __obj, *args, **kwargs)
        meter.result(value)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.meter.deep(argument)  # it may be hashed
        return super().getitem(obj, argument)

    def _finalize(self, value: Any) -> Any:
        if isinstance(value, str):
            return value
        self.meter.deep(value)
        return str(value)

    def _concat(self, parts: Iterable[str]) -> str:
        found = list(parts)
        self.meter.room(sum(map(len, found)))
        text = "".join(found)
        self.meter.result(text)
        return text

    def _filters(self) -> dict[str, Callable[..., Any]]:
        known = guards.SHALLOW_FILTERS | guards.DEEP_FILTERS
        found = {n: self._filter(n, run) for n, run in self.filters.items() if n in known}
        return found | {
            "tojson": self._tojson,
            rewrite.LOOP: self._loop,
            rewrite.TICK: self._tick,
            rewrite.DEEP: self._compared,
            rewrite.SLICE: self._sliced,
            rewrite.CONCAT: self._joined,
        }

    def _filter(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        leading = 1 if hasattr(run, "jinja_pass_arg") else 0
        guard = guards.FILTERS.get(name)
        pay = self.meter_shallow if name in guards.SHALLOW_FILTERS else self.meter_deep

        @functools.wraps(run)
        def metered(*args: Any, **kwargs: Any) -> Any:
            context, operands = args[:leading], [pay(a) for a in args[leading:]]
            kwargs = {key: pay(value) for key, value in kwargs.items()}
            if name in guards.TEXT_FILTERS and operands and not isinstance(operands[0], str):
                operands[0] = str(operands[0])
            if guard is not None:
                guard(self.meter, *operands, **kwargs)
            return self._paid(run(*context, *operands, **kwargs))

        return metered

    def meter_shallow(self, value: Any) -> Any:
        """Pay for a filter's operand that is not read through."""
        self.meter.shallow(value)
        return value

    def meter_deep(self, value: Any) -> Any:
        """Pay for a filter's operand that is read through; a lazy one becomes a list."""
        value = guards.materialised(self.meter, value)
        self.meter.deep(value)
        return value

    def _paid(self, value: Any) -> Any:
        if isinstance(value, Iterator):
            return self.meter.ticking(value)
        self.meter.step()
        self.meter.result(value)
        return value

    def _plain_tests(self) -> list[tuple[str, Any]]:
        return list(self.tests.items())

    def _test(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        pay = self.meter.__class__.deep if name in _COMPARING else self.meter.__class__.shallow

        @functools.wraps(run)
        def metered(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                pay(self.meter, value)
            self.meter.step()
            return run(*args, **kwargs)

        return metered

    # What the rewritten template calls.

    def _loop(self, values: Any) -> Any:
        self.meter.shallow(values)
        lazy = isinstance(values, Iterator) and not isinstance(values, LoopContext)
        return self.meter.ticking(values) if lazy else values

    def _tick(self, weight: int) -> None:
        self.meter.step(weight)

    def _compared(self, value: Any) -> Any:
        self.meter.deep(value)
        return value

    def _sliced(self, value: Any) -> Any:
        self.meter.result(value)
        return value

    def _joined(self, values: list[Any]) -> str:
        return self._concat(str(self._finalize(value)) for value in values)

    # What Hugging Face's environment adds.

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        value = self.meter_deep(value)
        _short(indent, *(separators or ()))
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._concat(self._chunks(encoder.iterencode(value)))

    def _chunks(self, chunks: Iterable[str]) -> Iterator[str]:
        total = 0
        for chunk in chunks:
            self.meter.step()
            total += len(chunk)
            self.meter.room(total)
            yield chunk

    def _globals(self, clock: Callable[[], datetime]) -> dict[str, Any]:
        def strftime_now(format: str) -> str:
            if len(format) > 200 or not _DATE.fullmatch(format):
                raise LimitError("it uses a date format with a width or an unknown directive")
            return clock().strftime(format)

        return {
            "range": self.globals["range"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": strftime_now,
        }


class _Namespace(Namespace):
    """A namespace whose text does not spell out what it holds."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _is_string_method(obj: Any) -> bool:
    return isinstance(obj, BuiltinMethodType | MethodType) and isinstance(obj.__self__, str)


def _searched(obj: Any) -> tuple[Any, ...]:
    """The list that a method looks through, if `obj` is such a method."""
    bound = isinstance(obj, BuiltinMethodType) and obj.__name__ in ("index", "count")
    return (obj.__self__,) if bound else ()


def _methods(obj: Any) -> frozenset[str] | None:
    """The attributes of a plain value that a template may use; None for the sandbox's own rules."""
    if isinstance(obj, str):
        return guards.STRING_METHODS
    if isinstance(obj, list | tuple | range):
        return guards.SEQUENCE_METHODS
    if isinstance(obj, Mapping):
        return guards.MAPPING_METHODS
    plain = isinstance(obj, int | float | complex | bytes | set | frozenset | GeneratorType | type)
    return frozenset() if plain or obj is None else None


def _short(*options: object) -> None:
    sizes = [len(o) if isinstance(o, str) else o for o in options if o is not None]
    if any(not isinstance(s, int) or s > 16 for s in sizes):
        raise LimitError("it writes JSON with more than 16 characters between items")
