"""Damped greedy decoding of one sequence: its parameters, and the generated history that it is damped by."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.arith import damping
from headrace.engine.blob import (
    BlobDamagedError,
    BlobModelError,
    BlobTruncatedError,
    BlobVersionError,
)
from headrace.errors import InputError, SettingError
from headrace.values import SamplingParams

DEFAULT_TOP_K = 6
STATE_VERSION = 1
_MAGIC = b"HRDG"
_STATE = struct.Struct("<4sI5IQ")  # magic, version, parameters, vocabulary, fraction bits, tokens
_SUM = struct.Struct("<I")
_FIRST = 64  # tokens that the buffer has room for at first
_WHAT = "the state of damped decoding"


@dataclass(frozen=True)
class DampedParams:
    """How greedy decoding is damped by what it repeats (R17). Raises SettingError when a value is out of range.

    alpha_q15: how much, Q15, below 2^20; 0 is plain greedy. max_order: longest n-grams of the generated history that
    count, at least 1. top_k: candidates a step, at least 1 and at most the vocabulary.
    """

    alpha_q15: int = 65536
    max_order: int = 2
    top_k: int = DEFAULT_TOP_K

    def __post_init__(self) -> None:
        for name, low, high in (
            ("alpha_q15", 0, damping.MAX_ALPHA - 1),
            ("max_order", 1, 2**31 - 1),
            ("top_k", 1, 2**31 - 1),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise SettingError(
                    f"{name} is {value!r:.60}; it must be a whole number in {low} to {high}"
                )

    @classmethod
    def for_vocab(cls, vocab_size: int) -> DampedParams:
        """The defaults."""
        return cls(top_k=min(DEFAULT_TOP_K, vocab_size))


def check_greedy(params: SamplingParams) -> None:
    """Raises SettingError where tokens are drawn: damped decoding picks the best score."""
    if not params.greedy:
        raise SettingError(
            f"damped decoding is greedy, but temperature is {params.temperature}",
            hint="use it with temperature 0",
        )


class Damped:
    """Picks the tokens of one sequence. What it picks is a function of the logits and the tokens that were noted.

    Retains four bytes a noted token, in a buffer that doubles, and nothing else that grows.
    """

    def __init__(self, params: DampedParams, vocab: int, fraction_bits: int) -> None:
        """Raises SettingError where there are more candidates than tokens."""
        if params.top_k > vocab:
            raise SettingError(f"top_k is {params.top_k}; the vocabulary has {vocab} tokens")
        self.params = params
        self._vocab = vocab
        self._how = damping.Damping(params.alpha_q15, params.max_order, params.top_k, fraction_bits)
        self._buffer = np.zeros(_FIRST, np.int32)
        self._count = 0

    @property
    def history(self) -> NDArray[np.int32]:
        """The noted tokens, i32[count] (a view)."""
        return self._buffer[: self._count]

    @property
    def retained_bytes(self) -> int:
        """Bytes of the buffer of the history."""
        return self._buffer.nbytes

    def pick(
        self,
        logits: NDArray[np.int32] | NDArray[np.int64],
        allowed: NDArray[np.bool_] | None = None,
    ) -> int:
        """The next token from logits [vocab], which `note` has to take then. allowed: see `Sampler.pick`."""
        return damping.choose(logits, self.history, self._how, allowed)

    def note(self, token: int) -> None:
        """A generated token, picked or forced. Raises InputError for one that is not in the vocabulary."""
        if not 0 <= token < self._vocab:
            raise InputError(f"token {token} is not in the vocabulary of {self._vocab}")
        if self._count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros_like(self._buffer)])
        self._buffer[self._count] = token
        self._count += 1

    def state(self) -> bytes:
        """All of it as bytes: a header, the history i32[count] and a CRC-32, little-endian."""
        header = _STATE.pack(_MAGIC, STATE_VERSION, *self._fields(), self._count)
        body = header + self.history.astype("<i4").tobytes()
        return body + _SUM.pack(zlib.crc32(body))

    def restore(self, state: bytes) -> None:
        """Become what gave `state`, of equal parameters. Raises BlobError by its cause, changing nothing."""
        if len(state) < _STATE.size + _SUM.size:
            raise BlobTruncatedError(f"{_WHAT} has {len(state)} bytes")
        magic, version, *fields, count = _STATE.unpack_from(state)
        if magic != _MAGIC:
            raise BlobDamagedError(f"these bytes are not {_WHAT}")
        if version != STATE_VERSION:
            raise BlobVersionError(f"{_WHAT} has version {version}, not {STATE_VERSION}")
        end = _STATE.size + 4 * count
        if len(state) < end + _SUM.size:
            raise BlobTruncatedError(f"{_WHAT} has {len(state)} of {end + _SUM.size} bytes")
        if len(state) > end + _SUM.size or _SUM.unpack_from(state, end)[0] != zlib.crc32(
            state[:end]
        ):
            raise BlobDamagedError(f"{_WHAT} is damaged")
        if tuple(fields) != self._fields():
            raise BlobModelError(f"{_WHAT} is of other parameters or of another model")
        history = np.frombuffer(state, "<i4", count, _STATE.size).astype(np.int32)
        if count and not 0 <= history.min() <= history.max() < self._vocab:
            raise BlobDamagedError(f"{_WHAT} holds tokens that the vocabulary lacks")
        self._buffer = np.zeros(_buffer_size(count), np.int32)
        self._buffer[:count] = history
        self._count = count

    def _fields(self) -> tuple[int, ...]:
        p = self.params
        return (p.alpha_q15, p.max_order, p.top_k, self._vocab, self._how.fraction_bits)


def _buffer_size(count: int) -> int:
    """Tokens that the buffer has room for once it holds `count`."""
    return max(_FIRST, 1 << (count - 1).bit_length()) if count else _FIRST
