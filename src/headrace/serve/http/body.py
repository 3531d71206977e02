"""A request's body: what may be in it, read with a limit, and parsed where it blocks nobody."""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import AsyncIterable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.serve.failure import RequestError
from headrace.serve.http.head import MAX_BODY, too_large
from headrace.serve.validation import decoded

INLINE = 16 << 10  # bytes; parsing more than that is a thread's
MAX_BODIES = 256 << 20  # bytes of all that are being read
MAX_VALUES = 1 << 17  # C code that makes more of them holds the interpreter for too long

# Browsers and `curl -d` name the last three for text that is JSON.
_JSON = re.compile(
    r"application/json|text/json|application/[\w.+-]+\+json|"
    r"application/x-www-form-urlencoded|text/plain"
)

T = TypeVar("T")


def check_type(headers: Mapping[str, str]) -> None:
    """Raises RequestError where a body's header says that it is no JSON in UTF-8."""
    kind, *parameters = headers.get("content-type", "application/json").lower().split(";")
    charsets = [p.partition("=")[2].strip(' "') for p in parameters if "charset" in p]
    coding = headers.get("content-encoding", "identity").lower()
    wrong = not _JSON.fullmatch(kind.strip()) or any(c not in ("utf-8", "utf8") for c in charsets)
    if wrong or coding != "identity":
        raise RequestError(
            "the body has to be application/json in UTF-8, without Content-Encoding",
            status=415,
            code="unsupported_media_type",
        )


class Room:
    """Bytes of bodies that may be in memory at a time, of all requests together."""

    def __init__(self, size: int = MAX_BODIES) -> None:
        self.free = size

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One request's part, given back behind the block."""
        share = Share(self)
        try:
            yield share
        finally:
            share.drop()

    def take(self, size: int) -> bool:
        """Whether there was room for so much more."""
        if size > self.free:
            return False
        self.free -= size
        return True


@dataclass
class Share:
    """What one request holds of a room."""

    room: Room
    held: int = 0

    def take(self, size: int) -> bool:
        """Whether there was room for so much more."""
        taken = self.room.take(size)
        self.held += size if taken else 0
        return taken

    def drop(self) -> None:
        """Give it back."""
        self.room.free += self.held
        self.held = 0


async def received(parts: AsyncIterable[bytes], share: Share) -> bytes:
    """The whole body. Raises RequestError for one over the limit, or over what all may have, which is read to its end
    all the same, for many clients read no answer before they have sent everything."""
    out: list[bytes] = []
    size, full = 0, False
    async for part in parts:
        size += len(part)
        if size > MAX_BODY:
            raise too_large()
        full = full or not share.take(len(part))
        if full:
            out.clear()
            share.drop()
        else:
            out.append(part)
    if full:
        raise RequestError(
            "too many large bodies are being sent", status=503, code="too_many_bodies"
        )
    return b"".join(out)


def parsed(body: bytes) -> dict[str, Any]:
    """A body's JSON object; a byte order mark in front is skipped. Raises RequestError."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip(b" \t\r\n"):
        raise RequestError("the body is empty; it has to be a JSON object")
    if _crowded(body):
        raise RequestError(
            f"the body has more than {MAX_VALUES:,} values", status=413, code="request_too_large"
        )
    return decoded(body)


def _crowded(body: bytes) -> bool:
    """Whether a body has more commas outside of its strings than there may be values, or far more strings."""
    if body.count(b",") <= MAX_VALUES:
        return False
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * MAX_VALUES:
        return True
    return sum(part.count(b",") for part in plain.split(b'"')[::2]) > MAX_VALUES


async def apart(work: Callable[[], T], size: int) -> T:
    """What `work` returns, run in a thread if `size` bytes make it long."""
    return work() if size <= INLINE else await asyncio.to_thread(work)
