"""Token bytes to text, a token at a time. Knows nothing of vocabularies: it is given bytes.

Text is the UTF-8 decoding of the bytes so far, each maximal invalid part replaced by U+FFFD, so the
pieces concatenate to the decoding of the whole and a character appears once its last byte is there.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

from headrace.text.pieces import Lead


class Detokenizer:
    """Incremental decoding: `push` each id, `flush` at the end. Constant time a token."""

    def __init__(self, token_bytes: Callable[[int], bytes], lead: Lead = "keep") -> None:
        self._token_bytes = token_bytes
        self._lead = lead
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        data = self._token_bytes(token)
        if data and self._lead != "keep":
            data = data[1:] if self._lead == "one" and data[:1] == b" " else self._unspaced(data)
            self._lead = "keep"
        return self._decoder.decode(data)

    def _unspaced(self, data: bytes) -> bytes:
        return data.lstrip(b" ") if self._lead == "all" else data

    def flush(self) -> str:
        """What is still held: U+FFFD for a character whose last bytes never came."""
        return self._decoder.decode(b"", final=True)
