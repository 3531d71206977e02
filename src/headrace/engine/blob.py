"""A sequence as bytes: its tokens and pages, bound to the model whose they are. Knows no engine and no files.

Layout, little-endian: a header (`_HEADER`) and its digest; the token ids i32[n] and a digest; the pages
u8[ceil(n / 64), page_bytes], zero beyond the last position, and a digest. Each digest is the SHA-256 of the one
before and its part, so that parts of different blobs do not go together. What follows is ignored. A digest finds
damage; it is no signature.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.engine.pages import PAGE_TOKENS, pages_for
from headrace.errors import InputError
from headrace.kernels.program import ModelShape

BLOB_VERSION = 1
_MAGIC = b"HR-SEQ\r\n"
_HEADER = struct.Struct("<8sII32s32sIIIIQ")
_DIGEST = 32


class BlobError(InputError):
    """A saved sequence cannot be restored; nothing has changed."""

    code = "bad_sequence"


class BlobVersionError(BlobError):
    """It was written by another version of the format or of the arithmetic."""

    code = "bad_sequence_version"


class BlobModelError(BlobError):
    """It is of another model, adapter or KV shape."""

    code = "bad_sequence_model"


class BlobTruncatedError(BlobError):
    """Its end is missing."""

    code = "bad_sequence_truncated"


class BlobDamagedError(BlobError):
    """Its bytes are not those that were written."""

    code = "bad_sequence_damaged"


@dataclass(frozen=True)
class Binding:
    """What the keys and values of a sequence depend on besides its tokens."""

    identity: str  # of the artifact, SHA-256 in hexadecimal
    salt: bytes
    shape: ModelShape

    def fields(self) -> tuple[bytes, bytes, int, int, int, int]:
        """As in the header."""
        s = self.shape
        salt = hashlib.sha256(self.salt).digest()
        sizes = (s.num_layers, s.num_kv_heads, s.head_dim, PAGE_TOKENS)
        return (bytes.fromhex(self.identity), salt, *sizes)


def pack(binding: Binding, tokens: tuple[int, ...], pages: NDArray[np.uint8]) -> bytes:
    """The blob of a sequence; pages u8[pages, page_bytes], zero where no position is."""
    fields = binding.fields()
    header = _HEADER.pack(_MAGIC, BLOB_VERSION, ARITHMETIC_VERSION, *fields, len(tokens))
    parts, digest = [], b""
    for part in (header, np.array(tokens, "<i4").tobytes(), pages.tobytes()):
        digest = hashlib.sha256(digest + part).digest()
        parts += [part, digest]
    return b"".join(parts)


def unpack(blob: bytes, binding: Binding) -> tuple[list[int], NDArray[np.uint8]]:
    """Tokens and pages (a view) of a blob. Raises BlobError by its cause."""
    view = memoryview(blob)
    if len(view) < _HEADER.size + _DIGEST:
        _short(len(view), _HEADER.size + _DIGEST)
    magic, version, arithmetic, *fields, num_tokens = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise BlobDamagedError("these bytes are no saved sequence")
    if version != BLOB_VERSION:
        raise BlobVersionError(
            f"the saved sequence has format version {version}; this headrace reads {BLOB_VERSION}"
        )
    digest = _checked(view, 0, _HEADER.size, b"", "header")
    _compare(arithmetic, tuple(fields), binding)
    tokens_at = _HEADER.size + _DIGEST
    pages_at = tokens_at + 4 * num_tokens + _DIGEST
    page_bytes = binding.shape.page_bytes
    end = pages_at + pages_for(num_tokens) * page_bytes
    if len(view) < end + _DIGEST:
        _short(len(view), end + _DIGEST)
    digest = _checked(view, tokens_at, pages_at - _DIGEST, digest, "tokens")
    _checked(view, pages_at, end, digest, "keys and values")
    tokens = np.frombuffer(view[tokens_at : pages_at - _DIGEST], "<i4").tolist()
    return tokens, np.frombuffer(view[pages_at:end], np.uint8).reshape(-1, page_bytes)


def _short(found: int, needed: int) -> NoReturn:
    raise BlobTruncatedError(f"the saved sequence has {found:,} of {needed:,} bytes")


def _checked(view: memoryview, begin: int, end: int, before: bytes, what: str) -> bytes:
    """The digest of a part, which has to be the one that follows it."""
    hashed = hashlib.sha256(before)
    hashed.update(view[begin:end])
    if hashed.digest() != view[end : end + _DIGEST]:
        raise BlobDamagedError(f"the {what} of the saved sequence are damaged")
    return hashed.digest()


def _compare(arithmetic: int, fields: tuple[object, ...], binding: Binding) -> None:
    if arithmetic != ARITHMETIC_VERSION:
        raise BlobVersionError(
            f"the saved sequence has arithmetic version {arithmetic}; this headrace computes"
            f" {ARITHMETIC_VERSION}"
        )
    identity, salt, *shape = binding.fields()
    if fields[0] != identity:
        raise BlobModelError("the saved sequence is of another model")
    if fields[1] != salt:
        raise BlobModelError("the saved sequence is of another adapter")
    if list(fields[2:]) != shape:
        raise BlobModelError(f"the saved sequence has KV shape {fields[2:]}, the model {shape}")
