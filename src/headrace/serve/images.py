"""Pictures that come inline: base64 and data URLs as bytes, or a refusal."""

from __future__ import annotations

import base64
import binascii

from headrace.serve.failure import RequestError
from headrace.serve.request import Image


def inline(text: str, media_type: str) -> Image:
    """Base64 as a picture. Raises RequestError."""
    try:
        return Image(base64.b64decode(text, validate=True), media_type)
    except (binascii.Error, ValueError):
        raise RequestError("the image is not base64") from None


def data_url(url: str) -> Image:
    """A data: URL as a picture. Raises RequestError for any other."""
    head, comma, text = url.partition(",")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise RequestError("an image has to be a data: URL of an image with base64")
    return inline(text, head.removeprefix("data:").removesuffix(";base64"))
