"""headrace: exact inference of language models. `from headrace import LLM` is the API.

Importing the package imports nothing heavy: names are loaded when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = (
    False  # typing itself is imported by nothing here: the console script starts with this file
)
if TYPE_CHECKING:
    from typing import Any

    from headrace.completion import Completion as Completion
    from headrace.llm import LLM as LLM
    from headrace.values import Message as Message
    from headrace.values import SamplingParams as SamplingParams

    __version__: str

_HOMES = {
    "LLM": "headrace.llm",
    "Completion": "headrace.completion",
    "Message": "headrace.values",
    "SamplingParams": "headrace.values",
}

__all__ = ["LLM", "Completion", "Message", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("headrace")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"
