"""The gateway over HTTP, byte for byte: paths, headers, frames, and errors before and after the first event."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from headrace.serve.app import create_app
from headrace.serve.dialects import gateway
from headrace.serve.events import Failed, Failure, Finished, Started, TextDelta, Usage
from serve.dialects.gateway_calls import MODEL, USER
from serve.scripted import ScriptedBackend
from serve.served import served

PATHS = ("/v4/ai/language-model", "/v3/ai/language-model", "/v1/ai/language-model")
HEADERS = {
    "ai-gateway-protocol-version": "0.0.1",
    "ai-language-model-specification-version": "4",
    "ai-language-model-id": MODEL,
}
SCRIPT = [Started(3, 0), TextDelta("Hi"), Finished("stop", Usage(3, 0, 1))]


class Server:
    """A server that follows `script`, and a client of it."""

    def __init__(self, url: str, backend: ScriptedBackend) -> None:
        self.backend = backend
        self._client = httpx.Client(base_url=url, timeout=20)

    def post(self, path: str = PATHS[0], *, stream: bool = True, **body: object) -> httpx.Response:
        headers = HEADERS | {"ai-language-model-streaming": str(stream).lower()}
        return self._client.post(path, headers=headers, json={"prompt": [USER], **body})


@pytest.fixture
def server() -> Iterator[Server]:
    backend = ScriptedBackend(SCRIPT)
    with served(create_app(backend, [gateway])) as url:
        yield Server(url, backend)


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_byte_for_byte(server: Server, path: str) -> None:
    response = server.post(path)
    assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream")
    start, metadata, rest = response.text.split("\n\n", 2)
    assert start == 'data: {"type":"stream-start","warnings":[]}'
    told = json.loads(metadata.removeprefix("data: "))
    assert sorted(told) == ["id", "modelId", "timestamp", "type"]
    assert rest == (
        'data: {"type":"text-start","id":"text-0"}\n\n'
        'data: {"type":"text-delta","id":"text-0","delta":"Hi"}\n\n'
        'data: {"type":"text-end","id":"text-0"}\n\n'
        'data: {"type":"finish","finishReason":{"unified":"stop","raw":"stop"},'
        '"usage":{"inputTokens":{"total":3,"noCache":3,"cacheRead":0},'
        '"outputTokens":{"total":1,"text":1,"reasoning":0}}}\n\n'
        "data: [DONE]\n\n"
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_whole_answer(server: Server, path: str) -> None:
    response = server.post(path, stream=False)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.json()["content"] == [{"type": "text", "text": "Hi"}]


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_reaches_no_model(server: Server, stream: bool) -> None:
    response = server.post(stream=stream, logprobs=True)
    assert response.status_code == 400
    assert response.json() == {
        "error": {
            "message": "unknown field logprobs",
            "type": "invalid_request_error",
            "param": "logprobs",
            "code": "unsupported_field",
        }
    }
    assert server.backend.requests == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "code"), [(400, "context_length_exceeded"), (503, "prefill_deadline_exceeded")]
)
def test_a_failure_before_the_first_event_is_a_status(
    server: Server, stream: bool, status: int, code: str
) -> None:
    server.backend.script = [Failed(Failure(status, code, "why"))]
    response = server.post(stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


def test_a_failure_after_it_is_the_last_frame(server: Server) -> None:
    failure = Failure(500, "inference_error", "it broke")
    server.backend.script = [Started(3, 0), TextDelta("Hi"), Failed(failure)]
    response = server.post()
    assert response.status_code == 200
    *_, last, nothing = response.text.split("\n\n")
    assert nothing == ""
    assert json.loads(last.removeprefix("data: ")) == {
        "type": "error",
        "error": {
            "message": "it broke",
            "type": "internal_server_error",
            "param": None,
            "code": "inference_error",
            "statusCode": 500,
        },
    }


def test_a_failure_in_the_middle_of_a_whole_answer_is_a_status(server: Server) -> None:
    failure = Failure(500, "inference_error", "it broke")
    server.backend.script = [Started(3, 0), TextDelta("Hi"), Failed(failure)]
    response = server.post(stream=False)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "it broke"


def test_many_provider_tools_cost_no_quadratic_time(server: Server) -> None:
    tools = [
        {"type": "provider", "id": f"a.{i}", "name": f"t{i}", "args": {}} for i in range(10_000)
    ]
    response = server.post(stream=False, tools=tools)
    assert len(response.json()["warnings"]) == 10_000
