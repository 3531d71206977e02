"""Checks SentencePiece's precompiled normalisation table, whose reader trusts it. A trust boundary.

The table is a little-endian byte count, a double-array trie of that size (32-bit units, as Darts
lays them out), and the texts that it refers to, each ended by a zero byte. Knows nothing of
vocabularies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_UNIT = 4  # bytes
_HAS_LEAF, _LEAF_VALUE = 1 << 8, (1 << 31) - 1


def fault(data: bytes) -> str | None:
    """What is wrong with a table, so that looking something up could leave it; None if nothing."""
    size = int.from_bytes(data[:_UNIT], "little")
    if len(data) < _UNIT or size == 0 or size % _UNIT or size > len(data) - _UNIT:
        return f"it is {len(data)} bytes long and says that {size} of them are its trie"
    units = np.frombuffer(data, "<u4", size // _UNIT, _UNIT).astype(np.int64)
    texts = data[_UNIT + size :]
    if not _is_utf8(texts):
        return "its texts are not UTF-8"
    return _trie_fault(units, np.frombuffer(texts, np.uint8))


def _is_utf8(texts: bytes) -> bool:
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    return True


def _trie_fault(units: npt.NDArray[np.int64], texts: npt.NDArray[np.uint8]) -> str | None:
    inner = np.flatnonzero(units <= _LEAF_VALUE)
    offsets = (units[inner] >> 10) << ((units[inner] & (1 << 9)) >> 6)
    children = inner ^ offsets  # the child for byte c is at children ^ c
    if units[0] > _LEAF_VALUE or np.any((children | 0xFF) >= len(units)):
        return "its trie points outside itself"
    values = units[children[(units[inner] & _HAS_LEAF) != 0]] & _LEAF_VALUE
    if np.any(values >= len(texts)) or np.any(texts[values] & 0xC0 == 0x80):
        return "its trie points outside its texts"
    return None
