"""Pictures that come inline."""

from __future__ import annotations

import base64
import binascii

from headrace.serve.failure import RequestError
from headrace.serve.request import Image


def inline(text: str, media_type: str | None = None) -> Image:
    """The picture in base64. Raises RequestError."""
    try:
        return Image(base64.b64decode(text, validate=True), media_type or "image/png")
    except binascii.Error:
        raise RequestError("the image is not base64") from None


def data_url(url: str) -> Image:
    """The picture in a data: URL. Raises RequestError for every other URL."""
    head, comma, text = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise RequestError("only inline images are accepted")
    return inline(text, head.removeprefix("data:").removesuffix(";base64"))
