"""Conversations as the plain data that a template sees, and the same with its content masked.

Owns what counts as content: every text that is not a known role and every key that is not a known
field. Knows nothing of templates or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import InputError
from headrace.values import Message

Messages = Sequence[Message | Mapping[str, object]]
Tools = Sequence[Mapping[str, object]]

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_FIELDS = frozenset(
    ("role", "content", "name", "type", "text", "function", "description", "parameters",
     "properties", "required", "enum", "items", "arguments", "tool_calls", "tool_call_id", "id",
     "strict", "reasoning_content", "thinking")
)  # fmt: skip
_MAX_DEPTH = 100


def variables(
    messages: Messages,
    add_generation_prompt: bool,
    tools: Tools | None,
    extra: Mapping[str, object] | None,
) -> dict[str, Any]:
    """What a template is given besides the special tokens. InputError if it is not plain data."""
    return {
        **{key: _plain(value) for key, value in (extra or {}).items()},
        "messages": [_message(m) for m in messages],
        "tools": None if tools is None else _plain(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }


def _message(message: Message | Mapping[str, object]) -> Any:
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping):
        raise InputError(f"a message is of type {type(message).__name__}, not a mapping")
    return _plain(message)


def _plain(value: object, depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise InputError(f"a message is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, depth + 1) for item in value]
    raise InputError(f"a message holds a value of type {type(value).__name__}, not plain data")


def masked_variables(values: dict[str, Any], mask: Callable[[str], str]) -> dict[str, Any]:
    """The same variables with `mask` applied to all content."""
    return {name: _masked(value, mask, name) for name, value in values.items()}


def _masked(values: Any, mask: Callable[[str], str], key: str = "") -> Any:
    if isinstance(values, dict):
        return {_key(k, mask): _masked(v, mask, k) for k, v in values.items()}
    if isinstance(values, list):
        return [_masked(v, mask, key) for v in values]
    if not isinstance(values, str) or (key == "role" and values in _ROLES):
        return values
    return mask(values)


def _key(key: str, mask: Callable[[str], str]) -> str:
    return key if key in _FIELDS else mask(key)
