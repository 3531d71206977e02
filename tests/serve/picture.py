"""A small whole picture."""

from __future__ import annotations

import io

from PIL import Image as Pillow


def picture() -> bytes:
    out = io.BytesIO()
    Pillow.new("RGB", (2, 3), (1, 2, 3)).save(out, "PNG")
    return out.getvalue()


PNG = picture()
