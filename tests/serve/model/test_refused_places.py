"""What the model's side refuses, as clients read where it is."""

from __future__ import annotations

from typing import Any

import pytest

from serve.model.asking import NAME, Json, Server

WRONG: Json = {"type": "object", "propertyNames": {"pattern": "(?<=a)b"}}
TOOL: Json = {"name": "f", "parameters": WRONG, "strict": True}
HI: Json = [{"role": "user", "content": "Hi"}]
LONG: Json = [{"role": "user", "content": "x" * 5000}]
CHAT, RESPONSES, GATEWAY = "/v1/chat/completions", "/v1/responses", "/v4/ai/language-model"
ASKED: dict[str, Json] = {
    CHAT: {"model": NAME, "messages": HI},
    RESPONSES: {"model": NAME, "input": "Hi"},
    GATEWAY: {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "/v1/messages": {"model": NAME, "messages": HI, "max_tokens": 4},
    "/api/chat": {"model": NAME, "messages": HI},
}
HEADERS = {"ai-language-model-id": NAME}


def refused(server: Server, path: str, fields: Json) -> Any:
    answer = server.http.post(path, json={**ASKED[path], **fields}, headers=HEADERS)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": WRONG}}}, "schema_unsupported", "response_format"),
        (CHAT, {"tools": [{"type": "function", "function": TOOL}]}, "schema_unsupported", "tools"),
        (CHAT, {"messages": LONG}, "context_length_exceeded", "messages"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "n", "schema": WRONG}}}, "schema_unsupported", "text.format"),
        (RESPONSES, {"tools": [{"type": "function", **TOOL}]}, "schema_unsupported", "tools"),
        (RESPONSES, {"input": "x" * 5000}, "context_length_exceeded", "input"),
        (GATEWAY, {"responseFormat": {"type": "json", "schema": WRONG}}, "schema_unsupported", "responseFormat"),
    ],
)  # fmt: skip
def test_param_names_it(
    wild_server: Server, path: str, fields: Json, code: str, param: str, stream: bool
) -> None:
    more = {} if path == GATEWAY else {"stream": stream}
    error = refused(wild_server, path, fields | more)
    assert (error["code"], error["param"]) == (code, param)


def test_the_message_begins_with_it_where_there_is_no_param(wild_server: Server) -> None:
    config = {"format": {"type": "json_schema", "schema": WRONG}}
    error = refused(wild_server, "/v1/messages", {"output_config": config})
    assert error["message"].startswith("output_config.format: schema at /propertyNames")
    assert refused(wild_server, "/api/chat", {"format": WRONG}).startswith("format: schema at /")
