"""Opens a source checkpoint as a `Source`: configuration, tokenizer, template and readable tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.manifest import TokenizerInfo
from headrace.artifact.naming import Names
from headrace.artifact.parts import Part
from headrace.errors import FileError, InputError, UnsupportedError
from headrace.models.config import DecoderConfig

Float = NDArray[np.float64]


@dataclass(frozen=True)
class ConvertOptions:
    """How float weights are quantised; sources that are quantised keep their codes."""

    bits: int = 4
    group: int = 32
    embed_bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.embed_bits not in (4, 8) or self.group not in (32, 64):
            raise UnsupportedError("bits must be 4 or 8, the group 32 or 64")

    def bits_of(self, name: str, names: Names) -> int:
        return self.embed_bits if name in (names.embed, names.head) else self.bits


class Tensors(Protocol):
    """The tensors of a source. A `name` lacks the suffix `.weight`; a `full_name` does not."""

    def names(self) -> set[str]:
        """Every tensor's full name."""

    def part(self, name: str, options: ConvertOptions) -> Part:
        """A two-dimensional weight."""

    def stack(self, full_name: str, count: int, options: ConvertOptions) -> list[Part]:
        """A three-dimensional tensor [count, n, k]: a weight an expert."""

    def matrix(self, full_name: str) -> Float:
        """A small two-dimensional tensor, dequantised; a vector is one row."""

    def vector(self, full_name: str) -> Float:
        """A one-dimensional tensor."""

    def forget(self) -> None:
        """Give back the memory of what was read so far."""


@dataclass(frozen=True, eq=False)
class Source:
    """A checkpoint, opened and understood."""

    path: Path
    kind: str
    family: str
    config: DecoderConfig
    names: Names
    tensors: Tensors
    interleaved: bool
    tokenizer_json: bytes
    template: str | None
    tokenizer: TokenizerInfo
    files: tuple[Path, ...]  # everything that was read, in a fixed order
    extra_names: frozenset[str] = field(default_factory=frozenset)  # consumed by the configuration
    unread: tuple[str, ...] = ()  # files of tensors beside it that are no part of the model
    head: Tensors | None = None  # of a head that drafts, in one of these files


def open_source(path: Path) -> Source:
    """A GGUF file or a directory with config.json. Raises FileError or UnsupportedError."""
    from headrace.artifact.gguf_source import open_gguf
    from headrace.artifact.hf_source import open_hugging_face

    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileError(path, "config.json", "is missing: this is no model directory")
        opener, path = open_hugging_face, path
    elif path.suffix == ".safetensors":
        opener, path = open_hugging_face, path.parent
    else:
        opener = open_gguf
    try:
        return opener(path)
    except FileError:
        raise
    except UnsupportedError as error:
        if str(path) in error.message:
            raise
        raise UnsupportedError(f"{path}: {error.message}", hint=error.hint) from None
    except InputError as error:  # a configuration that is not possible
        raise FileError(path, "config", error.message) from None


class Consumed(dict[str, Any]):
    """A mapping that remembers what was asked for, so that what nobody asked for can be refused."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def unasked(self) -> list[str]:
        return sorted(set(self) - self.asked)


def natural(path: Path, data: Consumed, key: str, default: int | None = None) -> int:
    """A positive integer of a configuration. Raises FileError that names the key."""
    value = data.get(key, default)
    if type(value) is not int or value < 1:
        raise FileError(path, f"key {key!r}", f"{value!r:.60} is not a positive integer")
    return value


def number_text(path: Path, data: Consumed, key: str, default: object = None) -> str:
    """A positive finite number of a configuration as decimal text."""
    value = data.get(key, default)
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise FileError(path, f"key {key!r}", f"{value!r:.60} is not a positive number")
    return str(value)
