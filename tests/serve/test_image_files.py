"""Containers of pictures: cut at every byte, padded, hostile."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from headrace.serve.failure import RequestError
from headrace.serve.image_files import MAX_BLOCKS, MAX_SCANS, Header, header


def file(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    pixels = (np.arange(6 * 11 * 3) * 7 % 251).astype(np.uint8).reshape(6, 11, 3)
    out = io.BytesIO()
    Pillow.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


def thumbnail_inside() -> bytes:
    """A JPEG whose first segment holds a whole JPEG, end mark and all."""
    small = b"Exif\0\0" + file("JPEG")
    outer = file("JPEG")
    return outer[:2] + b"\xff\xe1" + struct.pack(">H", len(small) + 2) + small + outer[2:]


def animated() -> bytes:
    out = io.BytesIO()
    frames = [Pillow.new("RGB", (11, 6), colour) for colour in ("red", "lime", "blue")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], comment=b"a;b;c")
    return out.getvalue()


FILES = {
    "jpeg": file("JPEG"),
    "jpeg-progressive": file("JPEG", progressive=True),
    "jpeg-grey": file("JPEG", "L"),
    "jpeg-restarts": file("JPEG", restart_marker_blocks=1),
    "jpeg-thumbnail": thumbnail_inside(),
    "png": file("PNG"),
    "png-palette": file("PNG", "P"),
    "gif": file("GIF"),
    "gif-interlaced": file("GIF", interlace=1),
    "gif-animated": animated(),
    "webp-lossy": file("WEBP"),
    "webp-lossless": file("WEBP", lossless=True),
    "webp-extended": file("WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0"),
    "webp-alpha": file("WEBP", "RGBA"),
}


@pytest.mark.parametrize("name", FILES)
def test_kind_and_size_are_read(name: str) -> None:
    assert header(FILES[name]) == Header(f"image/{name.split('-')[0]}", 11, 6)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_at_every_length_but_its_own(name: str) -> None:
    data = FILES[name]
    for length in range(len(data)):
        with pytest.raises(RequestError, match=r"cut off|none of|damaged"):
            header(data[:length])


@pytest.mark.parametrize("name", FILES)
def test_what_editors_append_is_left_alone(name: str) -> None:
    assert header(FILES[name] + b"\0trailing \xff\xd9;IEND") == header(FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_read_or_refused(name: str) -> None:
    for place in range(len(FILES[name])):
        data = bytearray(FILES[name])
        data[place] ^= 0xFF
        try:
            found = header(bytes(data))
        except RequestError as error:
            assert error.status == 400
        else:
            assert found.media_type.startswith("image/")


def png(*chunks: tuple[bytes, bytes], colour: int = 2) -> bytes:
    """A PNG of 2 x 3 pixels, of a header and these chunks."""
    head = (b"IHDR", struct.pack(">IIBBBBB", 2, 3, 8, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in (head, *chunks)
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xd8\xff\xd9", "JPEG: no picture"),
        (b"\xff\xd8\xff\xe0\x00\x02ab", "JPEG: no marker at byte 6"),
        (
            b"\xff\xd8" + b"\xff\xda\x00\x02\xff\xda\x00\x02" * MAX_SCANS,
            "JPEG: more than 200 scans",
        ),
        (b"\xff\xd8" + b"\xff\x01" * MAX_BLOCKS, "JPEG: more than 262,144 blocks"),
        (b"\x89PNG\r\n\x1a\n" + bytes(24), "PNG: it does not begin with IHDR"),
        (png(*[(b"tEXt", b"")] * MAX_BLOCKS), "PNG: more than 262,144 blocks"),
        (png((b"IEND", b"")), "PNG: no picture"),
        (png((b"IDAT", b"x"), (b"IEND", b""), colour=9), "PNG: it has no colours of type 9"),
        (
            png((b"IDAT", b"x"), (b"IEND", b"")).replace(b"IDATx", b"IDATy"),
            "PNG: the checksum of its chunk at byte 33 is wrong",
        ),
        (b"GIF89a" + bytes(7) + b";", "GIF: no picture"),
        (b"GIF89a" + bytes(7) + b"x", "GIF: no block at byte 13"),
        (
            b"GIF89a" + bytes(7) + b"!\xfe" + b"\x01a" * (MAX_BLOCKS + 1),
            "GIF: more than 262,144 blocks",
        ),
        (b"GIF89a" + bytes(7) + b"!\xfe\0" * (MAX_BLOCKS + 1), "GIF: more than 262,144 blocks"),
        (b"RIFF\x20\0\0\0WEBPJUNK" + bytes(40), "WebP: no picture"),
    ],
)
def test_hostile_containers_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        header(data)
