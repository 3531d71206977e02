"""What the containers of pictures say of themselves: kind, size, and that the file is whole. Decodes no pixels.

Formats by their first bytes: JPEG (ITU T.81), PNG (RFC 2083), GIF89a, WebP (RFC 9649). Every file is walked to its own
end mark, not searched for one: a thumbnail inside a JPEG has an end mark too.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from headrace.serve.failure import RequestError

MAX_BLOCKS = (
    1 << 18
)  # segments, chunks and blocks of one file; a legal picture at the size limit has fewer
MAX_SCANS = 200  # of a progressive JPEG: each costs a pass over all pixels, however few its bytes

_SCAN_END = re.compile(
    rb"\xff+[^\x00\xd0-\xd7\xff]"
)  # a marker that is neither stuffing nor a restart
_DEPTHS = {
    0: (1, 2, 4, 8, 16),
    2: (8, 16),
    3: (1, 2, 4, 8),
    4: (8, 16),
    6: (8, 16),
}  # PNG, by kind of colour
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class Header:
    """media_type: by content. Sizes in pixels as stored, before any orientation."""

    media_type: str
    width: int
    height: int


class _CutError(Exception):
    """The file ends before its own end mark."""


def header(data: bytes) -> Header:
    """Raises RequestError for another kind of file, a damaged one, and one that was cut anywhere."""
    found = next((row for row in _KINDS if re.match(row[1], data, re.DOTALL)), None)
    if found is None:
        raise RequestError("the image is none of JPEG, PNG, GIF and WebP")
    kind, _, walk = found
    try:
        width, height = walk(data)
    except (_CutError, struct.error, IndexError):
        raise RequestError(f"the image is cut off: {kind} data without its end") from None
    return Header(f"image/{kind.lower()}", width, height)


def _unpack(layout: str, data: bytes, at: int) -> tuple[int, ...]:
    return struct.unpack_from(layout, data, at)


def _damaged(kind: str, what: str) -> RequestError:
    return RequestError(f"the image is damaged: {kind}: {what}")


def _counted(kind: str, blocks: int) -> int:
    if blocks >= MAX_BLOCKS:
        raise _damaged(kind, f"more than {MAX_BLOCKS:,} blocks")
    return blocks + 1


def _jpeg(data: bytes) -> tuple[int, int]:
    at, size, scans, blocks = 2, None, 0, 0
    while True:
        blocks = _counted("JPEG", blocks)
        if data[at] != 0xFF:
            raise _damaged("JPEG", f"no marker at byte {at}")
        while data[at] == 0xFF:
            at += 1
        marker, at = data[at], at + 1
        if marker == 0xD9:
            break
        if marker in _NO_LENGTH:
            continue
        (length,) = _unpack(">H", data, at)
        if marker in _FRAMES and size is None:
            height, width = _unpack(">HH", data, at + 3)
            size = width, height
        at += max(length, 2)
        if marker == 0xDA:
            scans += 1
            if scans > MAX_SCANS:
                raise _damaged("JPEG", f"more than {MAX_SCANS} scans")
            found = _SCAN_END.search(data, at)
            if found is None:
                raise _CutError
            at = found.start()
    if size is None or not scans:
        raise _damaged("JPEG", "no picture in it")
    return size


def _png(data: bytes) -> tuple[int, int]:
    at, blocks, pixels = 8, 0, False
    if data[12:16] != b"IHDR":
        raise _damaged("PNG", "it does not begin with IHDR")
    while True:
        blocks = _counted("PNG", blocks)
        (length,) = _unpack(">I", data, at)
        name, begin, at = data[at + 4 : at + 8], at + 4, at + 12 + length
        if at > len(data):
            raise _CutError
        if zlib.crc32(data[begin : at - 4]) != _unpack(">I", data, at - 4)[0]:
            raise _damaged("PNG", f"the checksum of its chunk at byte {begin - 4} is wrong")
        pixels = pixels or name == b"IDAT"
        if name == b"IEND":
            break
    width, height, depth, colour = _unpack(">IIBB", data, 16)
    if depth not in _DEPTHS.get(colour, ()):
        raise _damaged("PNG", f"it has no colours of type {colour} with {depth} bits")
    if not pixels:
        raise _damaged("PNG", "no picture in it")
    return width, height


def _gif(data: bytes) -> tuple[int, int]:
    width, height, flags = _unpack("<HHB", data, 6)
    at, blocks = 13 + _palette(flags), 0
    frames = 0
    while (kind := data[at]) != 0x3B:
        if kind == 0x2C:
            frames += 1
            at += 11 + _palette(data[at + 9])
        elif kind == 0x21:
            at += 2
        else:
            raise _damaged("GIF", f"no block at byte {at}")
        while data[at]:
            blocks = _counted("GIF", blocks)
            at += 1 + data[at]
        at += 1
        blocks = _counted("GIF", blocks)
    if not frames:
        raise _damaged("GIF", "no picture in it")
    return width, height


def _palette(flags: int) -> int:
    """Bytes of a colour table."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _webp(data: bytes) -> tuple[int, int]:
    (size,) = _unpack("<I", data, 4)
    if size + 8 > len(data):
        raise _CutError
    match data[12:16]:
        case b"VP8X":
            packed = int.from_bytes(data[24:30], "little")
            return 1 + (packed & 0xFFFFFF), 1 + (packed >> 24)
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = _unpack("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
        case b"VP8L" if data[20:21] == b"\x2f":
            (packed,) = _unpack("<I", data, 21)
            return 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF)
    if len(data) < 30:
        raise _CutError
    raise _damaged("WebP", "no picture in it")


_KINDS: tuple[tuple[str, bytes, Callable[[bytes], tuple[int, int]]], ...] = (
    ("JPEG", rb"\xff\xd8\xff", _jpeg),
    ("PNG", rb"\x89PNG\r\n\x1a\n", _png),
    ("GIF", rb"GIF8[79]a", _gif),
    ("WebP", rb"RIFF....WEBP", _webp),
)
