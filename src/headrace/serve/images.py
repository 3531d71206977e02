"""Pictures that come inline: base64 or data: URLs as checked bytes, and those bytes as pixels.

Nothing is fetched: URLs of any other scheme are refused. `inline` and `data_url` read headers only, so that a request
is accepted or refused at once; `decoded` needs Pillow, which is imported when the first picture is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headrace.serve.failure import RequestError
from headrace.serve.image_files import header
from headrace.serve.request import Image

if TYPE_CHECKING:
    from PIL import Image as Pillow

MAX_BYTES = 24 << 20  # of a picture's file
MAX_PIXELS = 1 << 26  # 192 MiB as RGB
MAX_ASPECT = 200

_ORIENTATION = 0x0112  # EXIF 2.32, 4.6.4 A
_MAX_HEAD = 256  # characters of a data: URL before its comma
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,15}):")
_WRONG_FILE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)


def data_url(url: str) -> Image:
    """The picture in a `data:` URL. Raises RequestError for every other URL and what `inline` refuses."""
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1].lower() != "data":
        said = "a URL without a scheme" if scheme is None else f"a {scheme[1].lower()}: URL"
        raise RequestError(
            f"the image is {said}; only inline images are accepted",
            hint="send data:image/...;base64, and the file",
        )
    comma = url.find(",", 0, _MAX_HEAD)
    media_type, *parameters = url[len("data:") : max(comma, 0)].lower().split(";")
    if "base64" not in parameters:
        raise RequestError("the image's data: URL is not base64")
    return _checked(url[comma + 1 :], media_type or None)


def inline(text: str, media_type: str | None = None) -> Image:
    """The picture in base64, or in a `data:` URL.

    media_type: what the client calls it; the content decides which of the four kinds it is. Raises RequestError
    for what is no whole JPEG, PNG, GIF or WebP file, and for one over the limits.
    """
    return data_url(text) if _SCHEME.match(text) else _checked(text, media_type)


def _checked(text: str, media_type: str | None) -> Image:
    if media_type is not None and not media_type.lower().startswith("image/"):
        raise RequestError(f"{media_type!r:.60} is not a media type of images")
    data = _bytes(text)
    found = header(data)
    width, height = found.width, found.height
    size = f"the image has {width:,} x {height:,} pixels"
    if not width or not height:
        raise RequestError(size)
    if width * height > MAX_PIXELS:
        raise RequestError(f"{size}; at most {MAX_PIXELS:,} are decoded")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RequestError(f"{size}; its aspect ratio is over {MAX_ASPECT}:1")
    return Image(data, found.media_type)


def _bytes(text: str) -> bytes:
    if not text:
        raise RequestError("the image is empty")
    if len(text) * 3 // 4 > MAX_BYTES + 3 + text.count("\n") * 2:
        raise RequestError(f"the image is larger than {MAX_BYTES:,} bytes")
    try:
        # Line breaks are what encoders insert; anything else is damage.
        data = base64.b64decode(text.replace("\r", "").replace("\n", ""), validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the image is not base64") from None
    if len(data) > MAX_BYTES:
        raise RequestError(f"the image is larger than {MAX_BYTES:,} bytes")
    return data


def decoded(image: Image) -> NDArray[np.uint8]:
    """Its pixels as a viewer shows them, u8[height, width, RGB]: turned as EXIF says, and transparency on white.

    Of an animation, the first picture. Raises RequestError where the data does not give the whole picture.
    """
    from PIL import Image as Pillow

    kind = image.media_type.removeprefix("image/").upper()
    try:
        with Pillow.open(io.BytesIO(image.data), formats=[kind]) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise RequestError(f"the image has {opened.width:,} x {opened.height:,} pixels")
            opened.load()
            return np.asarray(_opaque(_upright(opened)), np.uint8)
    except _WRONG_FILE as error:
        raise RequestError(f"the image is damaged: {error!s:.200}") from None


def _upright(image: Pillow.Image) -> Pillow.Image:
    from PIL.Image import Transpose as To

    try:
        orientation = image.getexif().get(_ORIENTATION)
    except _WRONG_FILE:  # EXIF that cannot be read turns nothing
        return image
    turns = {
        2: To.FLIP_LEFT_RIGHT,
        3: To.ROTATE_180,
        4: To.FLIP_TOP_BOTTOM,
        5: To.TRANSPOSE,
        6: To.ROTATE_270,
        7: To.TRANSVERSE,
        8: To.ROTATE_90,
    }
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _opaque(image: Pillow.Image) -> Pillow.Image:
    from PIL import Image as Pillow

    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow would clip them instead of scaling
        return Pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    ground = Pillow.new("RGB", image.size, "white")
    ground.paste(clear.convert("RGB"), mask=clear.getchannel("A"))
    return ground
