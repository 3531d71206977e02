"""A prefix: tokens that are read once, and whose blocks any number of sequences then share."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import ClassVar, Self

from headrace.embed.adapter import Adapter
from headrace.embed.errors import PrefixFrozenError
from headrace.embed.pool import KVPool
from headrace.embed.prefill import prefill
from headrace.embed.schema import Schema
from headrace.embed.timeline import Timeline
from headrace.embed.workspace import Workspace


class Prefix(Timeline):
    """A beginning under construction, until it is frozen. Sequences that adopted it may outlive it."""

    name: ClassVar[str] = "prefix"
    kind: ClassVar[str] = "prefixes"

    def __init__(self, pool: KVPool) -> None:
        """Begin an empty one. Raises PoolSequencesError, ReleasedError."""
        super().__init__(pool)
        self._frozen = False

    def __enter__(self) -> Self:
        self.check_live()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def frozen(self) -> bool:
        return self._frozen

    def prefill(self, tokens: Many[int], workspace: Workspace, *, content: bool = False) -> int:
        """As `prefill` of a sequence. Raises PrefixFrozenError as well."""
        return prefill(self, tokens, workspace, content=content)

    def freeze(self) -> None:
        """From now on it can be adopted, and not changed. A second time does nothing."""
        with self.claimed():
            self._frozen = True

    def set_schema(self, schema: Schema | None) -> None:
        """The schema of content that is read; None: it is a prompt alone. Raises PrefixFrozenError, SchemaBindError."""
        self.bind_schema(schema)

    def set_adapter(self, adapter: Adapter | None) -> None:
        """As of a sequence. Raises PrefixFrozenError as well."""
        self.bind_adapter(adapter)

    def check_open(self) -> None:
        if self._frozen:
            raise PrefixFrozenError("the prefix is frozen")
