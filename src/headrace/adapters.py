"""Adapters by name: what a caller of the Python API calls them. A name decides nothing but which content is meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace import locate
from headrace.artifact.adapter import Adapter, open_adapter
from headrace.artifact.container import Artifact
from headrace.engine.adapters import LoadedAdapter
from headrace.engine.engine import Engine
from headrace.errors import InputError, MemoryBudgetError
from headrace.kernels.adapters import workspace_bytes

_MOST_ROWS = 2048  # of a pass of any plan


def open_adapters(paths: Mapping[str, str | Path] | None, base: Artifact) -> dict[str, Adapter]:
    """Adapters of a model by name; PEFT folders are converted into the cache. Raises InputError, FileError."""
    out = {}
    for name, path in (paths or {}).items():
        out[_checked(name)] = open_adapter(locate.locate_adapter(path, base), base)
    return out


def needed_bytes(adapters: Mapping[str, Adapter], threads: int) -> int:
    """What adapters take in memory, for a memory plan."""
    weights = {adapter.identity: adapter.nbytes for adapter in adapters.values()}
    beside = (workspace_bytes(a.pairs, _MOST_ROWS, threads) for a in adapters.values())
    return sum(weights.values()) + max(beside, default=0)


class NamedAdapters:
    """The adapters of one engine."""

    def __init__(self, engine: Engine, opened: Mapping[str, Adapter], spare_bytes: int) -> None:
        """spare_bytes: of the memory plan, for adapters that are loaded later."""
        self._engine = engine
        self._spare = spare_bytes
        self._loaded = {name: engine.load_adapter(a) for name, a in opened.items()}
        self._planned = engine.adapters.nbytes

    def identities(self) -> dict[str, str]:
        """Of the contents, by name."""
        return {name: adapter.identity for name, adapter in self._loaded.items()}

    def load(self, name: str, adapter: Adapter) -> None:
        """Raises InputError for a name that is taken, MemoryBudgetError where the plan has no room for it."""
        if _checked(name) in self._loaded:
            raise InputError(
                f"there is an adapter {name!r:.80} already", hint="unload it, or give another name"
            )
        needed = self._engine.adapters.nbytes + adapter.nbytes - self._planned
        if needed > self._spare:
            raise MemoryBudgetError(
                f"the adapter needs {adapter.nbytes / 1e6:,.1f} MB, which the memory plan does not have",
                needed,
                self._spare,
                hint="give it when the model is loaded, so that the plan counts it",
            )
        self._loaded[name] = self._engine.load_adapter(adapter)

    def unload(self, name: str) -> None:
        """Raises InputError for a name that nothing has."""
        self._engine.unload_adapter(self._found(name))
        del self._loaded[name]

    def find(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a name, None for none. Raises InputError for a name that nothing has."""
        return None if name is None else self._found(name)

    def _found(self, name: str) -> LoadedAdapter:
        if name not in self._loaded:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise InputError(
                f"there is no adapter {name!r:.80}; loaded: {known}",
                hint="load_adapter(path) gives it one",
            )
        return self._loaded[name]


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name or len(name) > 200:
        raise InputError(f"{name!r:.80} is no name for an adapter")
    return name
