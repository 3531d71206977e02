"""The manifest of an artifact: what it is, what it holds, and the hash of every byte of it."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.artifact.jsontext import read_object
from headrace.errors import FileError, UnsupportedError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
ADAPTER_KIND = "adapter"  # the kind that an adapter's manifest names; a model's names none
WEIGHT_FORMATS = ("q4", "q4m", "q8", "q8m")

_KEYS = {
    "format", "arithmetic", "family", "config", "tensors", "tokenizer", "source", "files", "identity",
}  # fmt: skip
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """Size and hash of one file of the artifact."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerInfo:
    """Special tokens: ids, and whether a raw prompt gets a BOS."""

    bos: int | None
    add_bos: bool
    end: tuple[int, ...]


class Identified(ABC):
    """A manifest whose identity is what it says."""

    @property
    def identity(self) -> str:
        """SHA-256 of everything that the manifest says, and with its hashes of every byte it names."""
        return hashlib.sha256(canonical(self._body())).hexdigest()

    def to_bytes(self) -> bytes:
        body = {**self._body(), "identity": self.identity}
        return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"

    @abstractmethod
    def _body(self) -> dict[str, Any]:
        """All of it but the identity."""


@dataclass(frozen=True)
class Manifest(Identified):
    """A manifest; `tensors` has format, shape [n, k] and group of every packed weight."""

    family: str
    fraction_bits: int
    config: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Any]]
    tokenizer: TokenizerInfo
    source: Mapping[str, Any]
    files: Mapping[str, FileEntry]

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return self.tokenizer.end

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "arithmetic": {"version": ARITHMETIC_VERSION, "fraction_bits": self.fraction_bits},
            "family": self.family,
            "config": dict(self.config),
            "tensors": {k: dict(v) for k, v in self.tensors.items()},
            "tokenizer": {
                "bos": self.tokenizer.bos,
                "add_bos": self.tokenizer.add_bos,
                "end": list(self.tokenizer.end),
            },
            "source": dict(self.source),
            "files": {k: {"bytes": v.nbytes, "sha256": v.sha256} for k, v in self.files.items()},
        }


def canonical(body: Mapping[str, Any]) -> bytes:
    """What an identity is the hash of."""
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _is_group(value: object) -> bool:
    return type(value) is int and value in (32, 64)


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises FileError, UnsupportedError for another version."""
    return _Reader(path, read_object(path)).manifest()


class _Reader:
    """Checks a manifest key by key; every refusal names the key."""

    def __init__(self, path: Path, body: dict[str, Any]) -> None:
        self._path = path
        self._body = body

    def manifest(self) -> Manifest:
        if self._body.get("kind") == ADAPTER_KIND:
            raise UnsupportedError(
                f"{self._path.parent}: this is an adapter, not a model",
                hint="give its base as the model, and it with --adapter",
            )
        self._versions()
        if set(self._body) != _KEYS:
            odd = sorted(set(self._body) ^ _KEYS)[0]
            raise self._fail(odd, "is missing" if odd in _KEYS else "is not known")
        manifest = Manifest(
            family=self._typed(self._body, "family", str),
            fraction_bits=self._body["arithmetic"]["fraction_bits"],
            config=self._typed(self._body, "config", dict),
            tensors=self._tensors(),
            tokenizer=self._tokenizer(),
            source=self._typed(self._body, "source", dict),
            files=self._files(),
        )
        if manifest.identity != self._body["identity"]:
            raise self._fail("identity", "does not match what the manifest says")
        return manifest

    def _fail(self, place: str, cause: str) -> FileError:
        return FileError(self._path, place, cause)

    def _typed(self, where: Mapping[str, Any], key: str, kind: type) -> Any:
        if type(where.get(key)) is not kind:
            raise self._fail(key, f"{where.get(key)!r:.60} is not of type {kind.__name__}")
        return where[key]

    def _versions(self) -> None:
        if self._body.get("format") != FORMAT_VERSION:
            raise UnsupportedError(
                f"{self._path}: artifact format {self._body.get('format')!r:.20}; this headrace reads"
                f" format {FORMAT_VERSION}",
                hint="convert the source again",
            )
        arithmetic = self._typed(self._body, "arithmetic", dict)
        if arithmetic.get("version") != ARITHMETIC_VERSION:
            raise UnsupportedError(
                f"{self._path}: arithmetic version {arithmetic.get('version')!r:.20}; this headrace"
                f" computes version {ARITHMETIC_VERSION}",
                hint="convert the source again",
            )
        bits = arithmetic.get("fraction_bits")
        if type(bits) is not int or not 8 <= bits <= 24:
            raise self._fail("fraction_bits", f"{bits!r:.20} is not between 8 and 24")

    def _tensors(self) -> dict[str, dict[str, Any]]:
        tensors: dict[str, dict[str, Any]] = self._typed(self._body, "tensors", dict)
        for name, entry in tensors.items():
            if not isinstance(entry, dict) or set(entry) != {"format", "shape", "group"}:
                raise self._fail(f"tensor {name!r}", "needs exactly format, shape and group")
            shape = entry["shape"]
            if entry["format"] not in WEIGHT_FORMATS or not _is_group(entry["group"]):
                raise self._fail(f"tensor {name!r}", "format or group is not known")
            if (
                not isinstance(shape, list)
                or len(shape) != 2
                or not all(type(v) is int for v in shape)
            ):
                raise self._fail(f"tensor {name!r}", f"shape {shape!r:.60} is not [n, k]")
            if not (
                0 < shape[0] <= 2**24 and 0 < shape[1] <= 2**18 and shape[1] % entry["group"] == 0
            ):
                raise self._fail(f"tensor {name!r}", f"shape {shape} is not possible")
        return tensors

    def _tokenizer(self) -> TokenizerInfo:
        body = self._typed(self._body, "tokenizer", dict)
        end = self._typed(body, "end", list)
        bos = body.get("bos")
        if not all(type(v) is int and v >= 0 for v in end) or not (
            bos is None or (type(bos) is int and bos >= 0)
        ):
            raise self._fail("tokenizer", "bos and end are not token ids")
        return TokenizerInfo(bos, self._typed(body, "add_bos", bool), tuple(end))

    def _files(self) -> dict[str, FileEntry]:
        out = {}
        for name, entry in self._typed(self._body, "files", dict).items():
            if _FILE_NAME.fullmatch(name) is None or name == MANIFEST_NAME:
                raise self._fail(f"file {name!r:.60}", "is not a plain file name")
            size = self._typed(entry, "bytes", int) if isinstance(entry, dict) else -1
            if size < 0 or _SHA256.fullmatch(str(entry.get("sha256"))) is None:
                raise self._fail(f"file {name!r}", "needs bytes and sha256")
            out[name] = FileEntry(size, entry["sha256"])
        return out
