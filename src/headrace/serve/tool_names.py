"""What every dialect asks of the names of tools, in one wording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.serve.failure import RequestError
from headrace.serve.request import ToolChoice
from headrace.values import Tool


def check_unique(names: Iterable[tuple[str, str]]) -> None:
    """Refuse a name that two tools have. names: places in the body, each with the name that stands there."""
    seen: set[str] = set()
    for place, name in names:
        if name in seen:
            raise RequestError(f"{place}: two tools are called {name!r:.100}", place=place)
        seen.add(name)


def required(tools: Sequence[Tool], place: str) -> ToolChoice:
    """That some tool is called. place: of the choice in the body. Raises RequestError where there is no tool."""
    if not tools:
        raise RequestError(f"{place}: a call is required, but there are no tools", place=place)
    return ToolChoice("required")


def named(name: str, tools: Sequence[Tool], place: str) -> ToolChoice:
    """That this tool is called. place: of the name in the body. Raises RequestError where it is none of the tools."""
    if all(name != tool.name for tool in tools):
        raise RequestError(f"{place}: {name!r:.100} is not among the tools", place=place)
    return ToolChoice("required", name)
