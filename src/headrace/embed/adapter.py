"""A mapped adapter: low-rank weights beside a model's own, which sequences are bound to."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

from headrace.embed.errors import AdapterHasSequencesError, ReleasedError
from headrace.embed.model import Model


class Adapter:
    """One adapter of one model."""

    def __init__(self, model: Model, path: Path | str) -> None:
        """Raises ArtifactRejectedError, AdapterBaseError, AdapterShapeError."""
        self.model = model
        self.identity = ""
        self._bound = 0
        self._lock = threading.Lock()
        self._mapped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def live(self) -> bool:
        return self._mapped

    def bind(self) -> None:
        """One more sequence uses it. Raises ReleasedError."""
        with self._lock:
            if not self._mapped:
                raise ReleasedError("the adapter was released")
            self._bound += 1

    def unbind(self) -> None:
        with self._lock:
            self._bound -= 1

    def release(self) -> None:
        """Raises AdapterHasSequencesError."""
        with self._lock:
            if not self._mapped:
                return
            if self._bound:
                raise AdapterHasSequencesError(f"the adapter has {self._bound} bound sequences")
            self._mapped = False
        self.model.drop("adapters")
