"""Chat completions: whatever the body is, it is a request or a refusal of it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serve.dialects.openai_chat import opened
from headrace.serve.dialects.openai_chat_wire import ChatBody
from headrace.serve.failure import RequestError
from headrace.serve.request import Request
from headrace.serve.validation import decoded, read
from serve.dialects.chat import MODEL, TOOL, USER, called, context, result

WORDS = st.sampled_from(
    ["user", "assistant", "tool", "system", "text", "image_url", "function", "json_schema", "auto",
     "required", "a", "weather", "{}", "", "\ud800", "data:image/png;base64,AA", "high"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "tool_calls", "id", "arguments", "url",
     "image_url", "tool_call_id", "json_schema", "schema", "strict", "parameters", "num_ctx"]
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.sampled_from([USER, called("a"), called("a", "b"), result("a"), result("b")])


def outcome(body: dict[str, Any]) -> Request | RequestError:
    try:
        return opened(read(ChatBody, decoded(json.dumps(body).encode())), context()).request
    except RequestError as error:
        return error


@given(st.dictionaries(st.sampled_from(sorted(ChatBody.model_fields)), VALUES, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_fields_are_a_request_or_a_refusal(fields: dict[str, Any]) -> None:
    got = outcome({"model": MODEL, "messages": [USER], "tools": [TOOL], **fields})
    if isinstance(got, RequestError):
        assert got.status == 400
        assert got.message
    else:
        assert got.model == MODEL
        assert got.turns


@given(st.lists(MESSAGES | VALUES, max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_messages_are_a_conversation_or_a_refusal(messages: list[Any]) -> None:
    got = outcome({"model": MODEL, "messages": messages})
    if isinstance(got, RequestError):
        assert got.status == 400
    else:
        ids = [call.id for turn in got.turns for call in turn.calls]
        assert ids == [turn.call_id for turn in got.turns if turn.role == "tool"]


def test_the_body_has_a_published_description() -> None:
    described = ChatBody.model_json_schema()
    assert set(described["properties"]) == set(ChatBody.model_fields)
    assert described["required"] == ["model", "messages"]
    assert described["additionalProperties"] is False
    assert "schema" in described["$defs"]["Schema"]["properties"]
