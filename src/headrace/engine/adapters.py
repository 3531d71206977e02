"""The adapters of an engine, and under which of them a sequence was computed.

What a sequence's keys and values depend on besides the model and the tokens is its salt: the identity of its
adapter's content, or of its history where the adapter was changed on the way. Names are not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.adapter import Adapter
from headrace.errors import InputError
from headrace.kernels.program import Runner


@dataclass(frozen=True)
class History:
    """Under which adapters the positions of a sequence were, and will be, computed.

    spans: first position and salt of each, in order, the first at 0; an empty salt is the plain model.
    """

    spans: tuple[tuple[int, bytes], ...] = ((0, b""),)

    @property
    def current(self) -> bytes:
        """The salt of the adapter that the next position gets."""
        return self.spans[-1][1]

    @property
    def salt(self) -> bytes:
        """That of the only adapter; of several a hash of all and where each begins."""
        if len(self.spans) == 1:
            return self.current
        parts = (
            at.to_bytes(8, "little") + len(s).to_bytes(4, "little") + s for at, s in self.spans
        )
        return hashlib.sha256(b"adapters" + b"".join(parts)).digest()

    def cut(self, length: int) -> History:
        """What is left of it after a rewind to `length` positions; the current adapter stays."""
        return self._before(length).then(length, self.current)

    def then(self, length: int, salt: bytes) -> History:
        """Another adapter from position `length` on, where the sequence ends."""
        before = self._before(length)
        if not before.spans:
            return History(((0, salt),))
        return (
            before
            if before.current == salt
            else replace(before, spans=(*before.spans, (length, salt)))
        )

    def _before(self, length: int) -> History:
        return History(tuple(span for span in self.spans if span[0] < length))


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that an engine has loaded: what `Engine.load_adapter` gives and the others take."""

    identity: str
    nbytes: int

    @property
    def salt(self) -> bytes:
        return bytes.fromhex(self.identity)


class Adapters:
    """Which adapters a runner has, by the salt of their content. One that is loaded twice is there once."""

    def __init__(self, runner: Runner, identity: str) -> None:
        """identity: of the base."""
        self._runner = runner
        self._base = identity
        self._numbers: dict[bytes, int] = {}
        self._loads: dict[bytes, int] = {}
        self._nbytes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def nbytes(self) -> int:
        """Of the weights of all that are loaded."""
        return sum(self._nbytes.values())

    def load(self, adapter: Adapter) -> LoadedAdapter:
        """Raises InputError for one of another base, or that fits no place of the program."""
        if adapter.manifest.base != self._base:
            raise InputError(f"{adapter.path}: the adapter was opened for another model")
        salt = adapter.salt
        if salt not in self._numbers:
            self._numbers[salt] = self._runner.load_adapter(adapter.pairs)
            self._nbytes[salt] = adapter.nbytes
        self._loads[salt] = self._loads.get(salt, 0) + 1
        return LoadedAdapter(adapter.identity, adapter.nbytes)

    def unload(self, adapter: LoadedAdapter) -> None:
        """Forget it, once for each time that it was loaded. Sequences under it can go on when it is loaded again."""
        salt = adapter.salt
        if salt not in self._numbers:
            raise InputError(f"the adapter {adapter.identity[:16]} is not loaded")
        self._loads[salt] -= 1
        if not self._loads[salt]:
            self._runner.unload_adapter(self._numbers.pop(salt))
            del self._loads[salt], self._nbytes[salt]

    def check(self, adapter: LoadedAdapter | None) -> bytes:
        """The salt of one that is loaded, empty for none. Raises InputError for another one."""
        if adapter is None:
            return b""
        if adapter.salt not in self._numbers:
            raise InputError(f"the adapter {adapter.identity[:16]} is not loaded")
        return adapter.salt

    def of(self, salts: Iterable[bytes]) -> NDArray[np.int32] | None:
        """The runner's number for the adapter of each sequence, -1 for none; None where no sequence has one.

        Raises InputError where an adapter is not loaded: no sequence goes on without the one that it was begun with.
        """
        wanted = list(salts)
        if not any(wanted):
            return None
        for salt in wanted:
            if salt and salt not in self._numbers:
                raise InputError(f"the adapter {salt.hex()[:16]} of a sequence is not loaded")
        return np.array([self._numbers[s] if s else -1 for s in wanted], np.int32)
