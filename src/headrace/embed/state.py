"""A sequence as bytes: all that its next token depends on, and its counts, bound to the model whose it is.

Layout, little-endian: a header (`_HEADER`); the name of the schema, token ids i32[n], their marks u8[n], history of the
adapters and clips i64[sites]; X of the last or the pending position and the hidden state that a prefill left, each
i32[hidden], where they are there; the KV blocks u8[blocks, block bytes], zero where no position is. Each of the four
parts is followed by the SHA-256 of the digest before it and the part, so that parts of different blobs do not go
together. What follows the last is ignored. A digest finds damage; it is no signature.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.arith.numbers import ARITHMETIC_VERSION
from headrace.embed.errors import (
    RestoreDamagedError,
    RestoreModelError,
    RestoreShapeError,
    RestoreTruncatedError,
    RestoreVersionError,
)
from headrace.embed.memory import typed
from headrace.embed.model import Model
from headrace.engine.adapters import History
from headrace.engine.pages import PAGE_TOKENS, pages_for
from headrace.kernels.program import SITES

STATE_VERSION = 1
_MAGIC = b"HR-EMB\r\n"
# magic, versions, sites; model; KV shape, hidden, vocabulary; length, depth, flags, spans of adapters, bytes of the
# schema's name; forced tokens, layers; the schema's digest, zero where none is.
_HEADER = struct.Struct("<8sIII32s6I5IQQ32s")
_SPAN = struct.Struct("<I32s")
_DIGEST = 32
_PENDING, _READY, _HIDDEN, _SCHEMA = 1, 2, 4, 8
_NONE = bytes(32)
MAX_NAME = 64  # bytes of a schema's name


@dataclass(frozen=True, eq=False)
class Saved:
    """What a blob holds. length, depth, pending, ready: see timeline.py; tokens with the pending one.

    schema: name and digest. history: of the adapters. residual, hidden: i32[hidden] or None.
    """

    length: int
    depth: int
    pending: bool
    ready: bool
    forced_tokens: int
    total_layers: int
    tokens: NDArray[np.int32]
    marks: NDArray[np.uint8]
    schema: tuple[str, str] | None
    history: History
    clips: NDArray[np.int64]
    residual: NDArray[np.int32] | None
    hidden: NDArray[np.int32] | None
    pages: NDArray[np.uint8]

    @property
    def adapter(self) -> str:
        """Identity of the adapter that the next token gets; "" for none."""
        return self.history.current.hex()


def seq_state_size(model: Model) -> int:
    """Bytes that a saved sequence of the model has at most, whatever its state."""
    typed(model, Model, "the model")
    tokens = model.context + 1
    facts = MAX_NAME + tokens * (4 + 1 + _SPAN.size) + 8 * len(SITES)
    rows = 2 * 4 * model.hidden_size
    pages = pages_for(model.context) * model.program.shape.page_bytes
    return _HEADER.size + facts + rows + pages + 4 * _DIGEST


def pack(model: Model, saved: Saved) -> bytes:
    name, digest = saved.schema or ("", _NONE.hex())
    flags = _PENDING * saved.pending | _READY * saved.ready
    flags |= _HIDDEN * (saved.hidden is not None) | _SCHEMA * (saved.schema is not None)
    header = _HEADER.pack(
        _MAGIC, STATE_VERSION, ARITHMETIC_VERSION, len(SITES), bytes.fromhex(model.identity),
        *_shape(model), saved.length, saved.depth, flags, len(saved.history.spans),
        len(name.encode()), saved.forced_tokens, saved.total_layers, bytes.fromhex(digest),
    )  # fmt: skip
    spans = [_SPAN.pack(at, salt or _NONE) for at, salt in saved.history.spans]
    tokens, clips = saved.tokens.astype("<i4").tobytes(), saved.clips.astype("<i8").tobytes()
    facts = [name.encode(), tokens, saved.marks.tobytes(), *spans, clips]
    rows = [
        row.astype("<i4").tobytes() for row in (saved.residual, saved.hidden) if row is not None
    ]
    parts, chain = [], b""
    for part in (header, b"".join(facts), b"".join(rows), saved.pages.tobytes()):
        chain = hashlib.sha256(chain + part).digest()
        parts += [part, chain]
    return b"".join(parts)


def unpack(blob: memoryview, model: Model) -> Saved:
    """What a blob holds, as views of it. Raises a ContentRefused by its cause."""
    reader = _Reader(blob)
    magic, version, arithmetic, sites, identity, *rest = _HEADER.unpack(
        reader.peek(_HEADER.size + _DIGEST)[: _HEADER.size]
    )
    if magic != _MAGIC:
        raise RestoreDamagedError("these bytes are no saved sequence")
    if version != STATE_VERSION:
        raise RestoreVersionError(
            f"the saved sequence has format version {version}; this headrace reads {STATE_VERSION}"
        )
    reader.part(_HEADER.size, "header")
    if (arithmetic, sites) != (ARITHMETIC_VERSION, len(SITES)):
        raise RestoreVersionError(
            f"the saved sequence has arithmetic version {arithmetic} and {sites} sites; "
            f"this headrace computes {ARITHMETIC_VERSION} with {len(SITES)}"
        )
    if identity != bytes.fromhex(model.identity):
        raise RestoreModelError("the saved sequence is of another model")
    if tuple(rest[:6]) != _shape(model):
        raise RestoreShapeError(
            f"the saved sequence has KV shape {tuple(rest[:6])}, the model {_shape(model)}"
        )
    return _body(reader, model, rest[6:])


def _body(reader: _Reader, model: Model, fields: list[int | bytes]) -> Saved:
    length, depth, flags, num_spans, num_name, forced, layers = map(_number, fields[:7])
    schema = fields[7]
    assert isinstance(schema, bytes)
    pending, ready = bool(flags & _PENDING), bool(flags & _READY)
    if flags >= 2 * _SCHEMA or (not flags & _SCHEMA and (num_name or schema != _NONE)):
        raise RestoreDamagedError("the saved sequence contradicts itself")
    count = length + pending
    sizes = [num_name, 4 * count, count, num_spans * _SPAN.size, 8 * len(SITES)]
    name, tokens, marks, spans, clips = _cut(reader.part(sum(sizes), "tokens"), sizes)
    with_residual, with_hidden = ready or depth > 0, bool(flags & _HIDDEN)
    width = 4 * model.hidden_size
    rows = _cut(reader.part(width * (with_residual + with_hidden), "residual"), [width] * 2)
    block = model.program.shape.page_bytes
    held = pages_for(length + (depth > 0))
    pages = np.frombuffer(reader.part(held * block, "keys and values"), np.uint8)
    found = [np.frombuffer(row, "<i4").astype(np.int32) for row in rows if len(row)]
    saved = Saved(
        length, depth, pending, ready, forced, layers,
        tokens=np.frombuffer(tokens, "<i4").astype(np.int32),
        marks=np.frombuffer(marks, np.uint8),
        schema=(_text(name), schema.hex()) if flags & _SCHEMA else None,
        history=History(
            tuple((at, b"" if salt == _NONE else salt) for at, salt in _SPAN.iter_unpack(spans))
        ),
        clips=np.frombuffer(clips, "<i8").astype(np.int64),
        residual=found[0] if with_residual else None,
        hidden=found[-1] if with_hidden else None,
        pages=pages.reshape(held, block),
    )  # fmt: skip
    _check(saved, model)
    return saved


def _check(saved: Saved, model: Model) -> None:
    """A blob that was made on purpose can have whole digests and still be no sequence's."""
    if saved.length > model.context:
        raise RestoreShapeError(
            f"the saved sequence has {saved.length} positions, the context {model.context}"
        )
    positions = [at for at, _ in saved.history.spans]
    forced = np.count_nonzero(saved.marks[: saved.length] == 3)  # generated, of a schema, and read
    whole = (
        saved.depth < model.num_layers
        and (saved.pending or not saved.depth)
        and saved.ready == (saved.length > 0 and not saved.pending)
        and (not len(saved.tokens) or 0 <= saved.tokens.min() <= saved.tokens.max() < model.vocab_size)
        and (not len(saved.marks) or saved.marks.max() <= 3)
        and positions[:1] == [0]
        and positions == sorted(set(positions))
        and positions[-1] <= saved.length
        and saved.forced_tokens <= forced
        and saved.total_layers <= saved.length * model.num_layers + saved.depth
        and (saved.hidden is None or saved.length > 0)
        and saved.clips.min() >= 0
    )  # fmt: skip
    if not whole:
        raise RestoreDamagedError("the saved sequence contradicts itself")


def _shape(model: Model) -> tuple[int, ...]:
    s = model.program.shape
    return (s.num_layers, s.num_kv_heads, s.head_dim, PAGE_TOKENS, s.hidden, s.vocab)


def _number(field: int | bytes) -> int:
    assert isinstance(field, int)
    return field


def _text(name: memoryview) -> str:
    try:
        return bytes(name).decode()
    except UnicodeDecodeError:
        raise RestoreDamagedError("the name of the saved sequence's schema is no text") from None


def _cut(part: memoryview, sizes: list[int]) -> list[memoryview]:
    """Consecutive pieces; empty ones behind the end."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [part[ends[i] : ends[i + 1]] for i in range(len(sizes))]


class _Reader:
    """Parts with their digests, from the front."""

    def __init__(self, blob: memoryview) -> None:
        self._blob = blob
        self._at = 0
        self._chain = b""

    def peek(self, size: int) -> memoryview:
        """Raises RestoreTruncatedError."""
        if len(self._blob) - self._at < size:
            needed, found = self._at + size, len(self._blob)
            raise RestoreTruncatedError(f"the saved sequence has {found:,} of {needed:,} bytes")
        return self._blob[self._at : self._at + size]

    def part(self, size: int, what: str) -> memoryview:
        """The next part. Raises RestoreTruncatedError, RestoreDamagedError."""
        both = self.peek(size + _DIGEST)
        hashed = hashlib.sha256(self._chain)
        hashed.update(both[:size])
        self._chain = hashed.digest()
        if self._chain != both[size:]:
            raise RestoreDamagedError(f"the {what} of the saved sequence are damaged")
        self._at += size + _DIGEST
        return both[:size]
