"""Inline pictures: what is accepted and refused, and the pixels that come of it. Files are Pillow's own."""

from __future__ import annotations

import base64
import io
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from headrace.serve import images
from headrace.serve.failure import RequestError
from headrace.serve.request import Image

KINDS = {"JPEG": "image/jpeg", "PNG": "image/png", "GIF": "image/gif", "WEBP": "image/webp"}
# Corners of a picture as a viewer shows it; EXIF says how the stored rows and columns lie (EXIF 2.32, 4.6.4 A).
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def painted(height: int, width: int) -> np.ndarray:
    """u8[height, width, 3] by formula."""
    cells = np.arange(height * width * 3) * 7 % 251
    return cells.astype(np.uint8).reshape(height, width, 3)


def file(pixels: np.ndarray | Pillow.Image, kind: str = "PNG", **options: Any) -> bytes:
    picture = pixels if isinstance(pixels, Pillow.Image) else Pillow.fromarray(pixels)
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def refused(said: str, *arguments: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        images.inline(*arguments)
    assert caught.value.status == 400


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_accepted_by_its_content(kind: str) -> None:
    data = file(painted(5, 9), kind)
    expected = Image(data, KINDS[kind])
    assert images.inline(text(data)) == expected
    assert images.inline(text(data), "image/anything") == expected
    assert images.data_url(f"data:image/png;base64,{text(data)}") == expected
    assert images.inline(f"data:;base64,{text(data)}") == expected
    assert images.decoded(expected).shape == (5, 9, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_pixels_come_back(kind: str) -> None:
    data = file(painted(5, 9), kind, lossless=True)
    assert (images.decoded(images.inline(text(data))) == painted(5, 9)).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "RGBX"])
def test_every_colour_mode_becomes_three_channels(mode: str) -> None:
    kind = "JPEG" if mode in ("CMYK", "RGBX") else "PNG"
    data = file(Pillow.new("RGB", (4, 3), "white").convert(mode), kind)
    assert (images.decoded(images.inline(text(data))) == 255).all()


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    data = file(Pillow.fromarray(np.array([[0, 255, 256, 65535]], np.uint16)))
    assert images.decoded(images.inline(text(data)))[0, :, 0].tolist() == [0, 0, 1, 255]


@pytest.mark.parametrize(
    "url",
    ["http://example.com/a.png", "https://example.com/a.png", "file:///etc/passwd", "HTTP://x/"],
)
def test_a_url_is_not_fetched(url: str) -> None:
    refused(f"{url.split(':')[0].lower()}: URL", url)
    with pytest.raises(RequestError, match="only inline images"):
        images.data_url(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64", "not base64"),
        ("data:text/plain;base64,aGk=", "'text/plain' is not a media type of images"),
        ("data:image/png;base64,", "empty"),
        ("data:;base64," * 100_000, "not base64"),
        ("iVBORw0KGgo=", "without a scheme"),
    ],
)
def test_a_data_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        images.data_url(url)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "empty"),
        ("a", "not base64"),
        ("aGk", "not base64"),
        ("aGk= aGk=", "not base64"),
        ("é", "not base64"),
        ("aGk=", "none of JPEG, PNG, GIF and WebP"),
        (text(b"BM" + bytes(60)), "none of JPEG"),
        (text(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "none of JPEG"),
    ],
)
def test_what_is_no_picture_is_refused(value: str, said: str) -> None:
    refused(said, value)


def test_line_breaks_in_base64_are_read() -> None:
    data = file(painted(40, 40))
    assert images.inline(base64.encodebytes(data).decode()).data == data


def test_a_refusal_does_not_repeat_the_picture() -> None:
    with pytest.raises(RequestError) as caught:
        images.inline("x" * 100_001)
    assert len(caught.value.message) < 200


def test_the_size_limit_is_exact() -> None:
    data = file(painted(2, 2))
    most = data + bytes(images.MAX_BYTES - len(data))
    assert images.inline(text(most)).data == most
    refused("larger than 25,165,824 bytes", text(most + b"\0"))
    refused("larger than 25,165,824 bytes", "A" * (40 << 20))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_aspect_limit_is_exact(kind: str) -> None:
    for width, height in ((200, 1), (1, 200), (400, 2)):
        images.inline(text(file(painted(height, width), kind)))
    for width, height in ((201, 1), (1, 201), (401, 2)):
        refused("aspect ratio is over 200:1", text(file(painted(height, width), kind)))


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def resized(kind: str, width: int, height: int) -> bytes:
    """A small file whose header says another size."""
    data = bytearray(file(painted(2, 2), kind, lossless=True))
    if kind == "GIF":
        data[6:10] = struct.pack("<HH", width, height)
    elif kind == "WEBP":
        data[21:25] = struct.pack("<I", (width - 1) | (height - 1) << 14)
    else:
        at = data.index(b"\xff\xc0") + 5
        data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(8193, 8192, bytes(1 << 20)), "8,193 x 8,192"),
        (png(2**31 - 1, 2**31 - 1, b""), "2,147,483,647 x 2,147,483,647"),
        (resized("GIF", 65535, 65535), "65,535 x 65,535"),
        (resized("WEBP", 16384, 16384), "16,384 x 16,384"),
        (resized("JPEG", 65500, 65500), "65,500 x 65,500"),
    ],
    ids=["png", "png-most", "gif", "webp", "jpeg"],
)
def test_a_bomb_is_refused_by_its_header(data: bytes, size: str) -> None:
    refused(f"the image has {size} pixels; at most 67,108,864", text(data))


def test_the_most_pixels_are_accepted() -> None:
    assert images.inline(text(png(8192, 8192, b""))).media_type == "image/png"


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_a_picture_without_pixels_is_refused(size: tuple[int, int]) -> None:
    refused(f"{size[0]} x {size[1]} pixels", text(png(*size, b"")))


def test_rows_that_are_missing_in_a_whole_container_are_refused_when_decoded() -> None:
    data = file(painted(64, 64))
    place, length = data.index(b"IDAT") - 4, int.from_bytes(data[data.index(b"IDAT") - 4 :][:4])
    body = data[place + 4 : place + 8 + length // 2]
    cut = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    found = images.inline(text(data[:place] + cut + data[place + 12 + length :]))
    with pytest.raises(RequestError, match="the image is damaged"):
        images.decoded(found)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_damaged_pixels_are_refused_when_decoded(kind: str) -> None:
    data = bytearray(file(painted(40, 40), kind, lossless=True))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    try:
        found = images.inline(text(bytes(data)))
    except RequestError:
        return  # the container says so already
    try:
        pixels = images.decoded(found)
    except RequestError as error:
        assert error.message.startswith("the image is damaged")
    else:
        assert pixels.shape == (40, 40, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    shown = np.zeros((32, 64, 3), np.uint8)
    shown[:16, :32], shown[:16, 32:], shown[16:, :32], shown[16:, 32:] = RED, GREEN, BLUE, WHITE
    # Row 0 and column 0 of the stored picture are these sides of the shown one.
    sides = {1: "TL", 2: "TR", 3: "BR", 4: "BL", 5: "LT", 6: "RT", 7: "RB", 8: "LB"}[orientation]
    stored = shown.transpose(1, 0, 2) if sides[0] in "LR" else shown
    stored = stored[::-1] if sides[0] in "BR" else stored
    stored = stored[:, ::-1] if sides[1] in "BR" else stored
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {"lossless": True}
    data = file(np.ascontiguousarray(stored), kind, exif=exif, **options)
    pixels = images.decoded(images.inline(text(data)))
    assert pixels.shape == shown.shape
    corners = [(4, 4), (4, 59), (27, 4), (27, 59)]
    for at, colour in zip(corners, (RED, GREEN, BLUE, WHITE), strict=True):
        assert abs(pixels[at].astype(int) - colour).max() <= (2 if kind == "JPEG" else 0)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_unknown_orientation_turns_nothing(orientation: int) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    data = file(painted(5, 9), exif=exif)
    assert (images.decoded(images.inline(text(data))) == painted(5, 9)).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0" + bytes(99)]
)
def test_exif_that_cannot_be_read_turns_nothing(exif: bytes) -> None:
    data = file(painted(5, 9), exif=exif)
    assert (images.decoded(images.inline(text(data))) == painted(5, 9)).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparency_lies_on_white(kind: str) -> None:
    drawn = np.zeros((1, 3, 4), np.uint8)  # black: clear, half, opaque
    drawn[0, :, 3] = 0, 128, 255
    data = file(drawn, kind, lossless=True)
    assert images.decoded(images.inline(text(data)))[0, :, 0].tolist() == [255, 127, 0]


def test_a_clear_palette_entry_lies_on_white() -> None:
    picture = Pillow.new("P", (2, 1))
    picture.putpalette([0, 0, 0, 9, 8, 7])
    picture.putdata([0, 1])
    for kind in ("PNG", "GIF"):
        data = file(picture, kind, transparency=0)
        assert images.decoded(images.inline(text(data)))[0].tolist() == [[255] * 3, [9, 8, 7]]


def test_grey_with_alpha_lies_on_white() -> None:
    data = file(Pillow.fromarray(np.array([[[0, 0], [0, 255]]], np.uint8), "LA"))
    assert images.decoded(images.inline(text(data)))[0].tolist() == [[255] * 3, [0] * 3]


def test_the_first_picture_of_an_animation_is_shown() -> None:
    frames = [Pillow.new("RGB", (4, 4), colour) for colour in ("red", "lime")]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (images.decoded(images.inline(text(data))) == RED).all(), kind


def test_pillow_is_imported_with_the_first_picture() -> None:
    code = (
        "import sys; from headrace.serve import images; assert 'PIL' not in sys.modules;"
        f"found = images.inline({text(file(painted(2, 2)))!r}); assert 'PIL' not in sys.modules;"
        "print(images.decoded(found).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(2, 2, 3)\n"
