"""A request's body: what may be in it, read with a limit, and parsed where it blocks nobody."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any, TypeVar

from headrace.serve.failure import RequestError
from headrace.serve.head import MAX_BODY, too_large
from headrace.serve.validation import decoded

INLINE = 16 << 10  # bytes; parsing more than that is a thread's
MAX_VALUES = 500_000  # commas; C code that parses so many holds the interpreter for some 100 ms

# Browsers and `curl -d` name the last three for text that is JSON.
_JSON = re.compile(
    r"application/json|text/json|application/[\w.+-]+\+json|"
    r"application/x-www-form-urlencoded|text/plain"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

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


async def received(parts: AsyncIterable[bytes]) -> bytes:
    """The whole body. Raises RequestError for one over the limit."""
    out, size = [], 0
    async for part in parts:
        size += len(part)
        if size > MAX_BODY:
            raise too_large()
        out.append(part)
    return b"".join(out)


def parsed(body: bytes) -> dict[str, Any]:
    """A body's JSON object; a byte order mark in front is skipped. Raises RequestError."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip(b" \t\r\n"):
        raise RequestError("the body is empty; it has to be a JSON object")
    if body.count(b",") > MAX_VALUES:
        raise RequestError(f"the body has more than {MAX_VALUES:,} commas")
    value = decoded(body)
    if _SURROGATE.search(body):
        _check_text(value)
    return value


def _check_text(value: Any) -> None:
    """Half of a surrogate pair is no text: it can't be encoded again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("the body has half of a surrogate pair in a string") from None


async def apart(work: Callable[[], T], size: int) -> T:
    """What `work` returns, run in a thread if `size` bytes make it long."""
    return work() if size <= INLINE else await asyncio.to_thread(work)
