"""What dialects share."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from headrace.cli.serve import dialects
from headrace.serve.app import create_app
from headrace.serve.dialect import one_line, sse
from headrace.serve.events import Finished, Started, TextDelta, Usage
from serve.scripted import CARD, ScriptedBackend
from serve.served import served


@pytest.mark.parametrize("mark", ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029"])
def test_json_is_one_line_for_every_reader(mark: str) -> None:
    body = {"text": f"a{mark}ä", mark: [mark]}
    line = one_line(body)
    assert line.splitlines() == [line]
    assert json.loads(line) == body
    assert "ä" in line


def test_a_frame_has_its_event_first() -> None:
    assert sse("{}") == b"data: {}\n\n"
    assert sse("{}", "ping") == b"event: ping\ndata: {}\n\n"


def test_the_policy_names_windows_modes_and_the_wait() -> None:
    card = replace(CARD, context_window=4096, vision=True, max_prefill_wait=1800.0)
    assert card.context_policy == {
        "configured_window": 4096,
        "model_window": 8192,
        "modes": {"text": 4096, "image": 4096},
        "max_prefill_wait_seconds": 1800.0,
    }
    assert CARD.context_policy["modes"] == {"text": 8192}


@pytest.mark.parametrize("said", ["painted", "painted:latest", "Painted:1M", "painted:1m:latest"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic", "ollama", "gateway"])
def test_every_dialect_knows_the_model_by_its_short_names(dialect: str, said: str) -> None:
    """As clients say it that were set up for another server: without its tag, with `:latest`, in any case."""
    turn = [{"role": "user", "content": "x"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    path, body, headers = {
        "chat": ("/v1/chat/completions", {"messages": turn}, {}),
        "responses": ("/v1/responses", {"input": "x"}, {}),
        "anthropic": ("/v1/messages", {"messages": turn, "max_tokens": 4}, {}),
        "ollama": ("/api/chat", {"messages": turn, "stream": False}, {}),
        "gateway": (
            "/v3/ai/language-model",
            {"prompt": parts},
            {
                "ai-language-model-id": f"headrace/{said}",
                "ai-language-model-specification-version": "3",
            },
        ),
    }[dialect]
    backend = ScriptedBackend([Started(1, 0), TextDelta("y"), Finished("stop", Usage(1, 0, 1))])
    with served(create_app(backend, dialects())) as url:
        own = {} if dialect == "gateway" else {"model": said}
        answer = httpx.post(url + path, json={**own, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert [request.model for request in backend.requests] == [CARD.name]
    if dialect in ("chat", "responses", "anthropic"):
        assert answer.json()["model"] == CARD.name
