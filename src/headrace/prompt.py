"""What a caller gives as a prompt: ids, text or messages, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headrace.errors import InputError
from headrace.values import Message


def token_ids(tokens: Sequence[int], *, empty: bool = False) -> list[int]:
    """Token ids as they are; `empty` allows none. Raises InputError."""
    ids = [] if isinstance(tokens, str | bytes) else list(tokens)
    if not ids and not (empty and not isinstance(tokens, str | bytes)):
        cause = (
            "is text: give token ids (tokenize)" if isinstance(tokens, str | bytes) else "is empty"
        )
        raise InputError(f"the sequence of tokens {cause}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InputError(f"{token!r:.60} is not a token id")
    return [int(token) for token in ids]


def num_characters(message: object) -> int:
    """Characters of a message's text. Raises InputError for what is no message."""
    if isinstance(message, Mapping):
        content = message.get("content")
        return len(content) if isinstance(content, str) else 0
    if not isinstance(message, Message) or not isinstance(message.content, str):
        raise InputError(f"{message!r:.60} is not a Message with text")
    return len(message.content)


def as_text(prompt: str | bytes) -> str:
    return prompt.decode("utf-8", "surrogateescape") if isinstance(prompt, bytes) else prompt
