"""A mapped adapter: low-rank weights beside a model's own, which sequences are bound to."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from os import PathLike
from pathlib import Path
from typing import Self

from headrace.artifact.adapter import open_adapter
from headrace.embed.errors import (
    AdapterBaseError,
    AdapterHasSequencesError,
    AdapterShapeError,
    ArtifactRejectedError,
    InvalidArgumentError,
    LifecycleRefused,
    ReleasedError,
)
from headrace.embed.memory import typed
from headrace.embed.model import Model
from headrace.errors import AdapterMismatchError, InputError
from headrace.errors import AdapterShapeError as StoredShapeError
from headrace.kernels.program import Pairs


class Adapter:
    """One adapter of one model, in memory of its own, which a workspace that used it keeps until its next call."""

    def __init__(self, model: Model, path: Path | str) -> None:
        """path: of an adapter's artifact. Raises ArtifactRejectedError, AdapterBaseError, AdapterShapeError."""
        typed(model, Model, "the model").check_mapped()
        if not isinstance(path, str | PathLike):
            raise InvalidArgumentError(f"the adapter is of type {type(path).__name__}, no path")
        try:
            stored = open_adapter(Path(path), model.artifact)
        except AdapterMismatchError as error:
            raise AdapterBaseError(error.message, hint=error.hint) from error
        except StoredShapeError as error:
            raise AdapterShapeError(error.message) from error
        except InputError as error:
            raise ArtifactRejectedError(error.message, hint=error.hint) from error
        model.hold("adapters")
        self.model = model
        self.identity = stored.identity  # of its content with its scale, 64 hex digits
        self._nbytes = stored.nbytes
        self._pairs: Pairs | None = stored.pairs
        self._bound = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        _ = self.pairs
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with suppress(LifecycleRefused) if kind is not None else nullcontext():
            self.release()

    @property
    def live(self) -> bool:
        return self._pairs is not None

    @property
    def salt(self) -> bytes:
        """Its identity, as sequences remember it."""
        return bytes.fromhex(self.identity)

    @property
    def residency(self) -> int:
        """Bytes of its weights in memory."""
        return self._nbytes if self.live else 0

    @property
    def pairs(self) -> Pairs:
        """Its weights, for a runner. Raises ReleasedError."""
        if self._pairs is None:
            raise ReleasedError("the adapter was released")
        return self._pairs

    def bind(self) -> None:
        """One more sequence uses it. Raises ReleasedError."""
        with self._lock:
            _ = self.pairs
            self._bound += 1

    def unbind(self) -> None:
        with self._lock:
            self._bound -= 1

    def release(self) -> None:
        """Give its memory back. Raises AdapterHasSequencesError."""
        with self._lock:
            if not self.live:
                return
            if self._bound:
                raise AdapterHasSequencesError(f"the adapter has {self._bound} bound sequences")
            self._pairs = None
        self.model.drop("adapters")
