"""What one request may ask of the server, and that nothing is prepared for nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import CancelledError
from headrace.llm import LLM
from headrace.serve.validation import MAX_STOP, MAX_STOPS
from headrace.text.tokenizer import PART
from serve.model.asking import NAME, Json, Server, user
from serve.model.test_beside import body, idle, open_request, until

STOPPED: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", lambda stop: {"messages": user("x"), "stop": stop}),
    "messages": (
        "/v1/messages",
        lambda stop: {"messages": user("x"), "max_tokens": 4, "stop_sequences": stop},
    ),
    "ollama": ("/api/chat", lambda stop: {"messages": user("x"), "options": {"stop": stop}}),
    "generate": ("/api/generate", lambda stop: {"prompt": "x", "options": {"stop": stop}}),
}
GATEWAY = "/v3/ai/language-model"
COUNT: Json = {"model": NAME, "messages": user("x")}


def gateway(server: Server, stop: list[str]) -> tuple[int, str]:
    value = {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "stopSequences": stop,
        "maxOutputTokens": 4,
    }
    headers = {"ai-language-model-id": NAME, "ai-model-id": NAME}
    answer = server.http.post(GATEWAY, json=value, headers=headers)
    return answer.status_code, answer.text


def told(server: Server, dialect: str, stop: list[str]) -> tuple[int, str]:
    if dialect == "gateway":
        return gateway(server, stop)
    path, made = STOPPED[dialect]
    answer = server.http.post(path, json={"model": NAME, "stream": False, **made(stop)})
    return answer.status_code, answer.text


@pytest.mark.parametrize("dialect", [*STOPPED, "gateway"])
def test_stop_strings_have_bounds(wild_server: Server, dialect: str) -> None:
    most = [f"{i:04}" + "é" * (MAX_STOP - 4) for i in range(MAX_STOPS)]
    assert told(wild_server, dialect, most)[0] == 200
    status, text = told(wild_server, dialect, [*most, "x"])
    assert status == 400
    assert "there are 65 stop strings; at most 64 may be" in text
    status, text = told(wild_server, dialect, ["x", "y" * (MAX_STOP + 1)])
    assert status == 400
    assert "a stop string has 1,001 characters; at most 1,000 may be" in text
    idle(wild_server)


def test_more_messages_than_tokens(wild_server: Server) -> None:
    """They are refused unread, where they are counted too."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(2049)
    ]  # the window has 2,048 tokens
    for path, more in (
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"max_tokens": 4}),
        ("/v1/messages/count_tokens", {}),
        ("/api/chat", {}),
    ):
        answer = wild_server.http.post(path, json={"model": NAME, "messages": messages, **more})
        assert answer.status_code == 400, path
        said = ("2,049 messages, the context holds 2048", "more than 2048 tokens > 2048 maximum")
        assert said[path.startswith("/v1/messages")] in answer.text


def test_more_tools_than_tokens(wild_server: Server) -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(2048)]
    answer = wild_server.http.post("/v1/chat/completions", json=body("x", tools=tools))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "2,049 messages and tools" in answer.text


def test_more_control_tokens_than_the_window(wild_server: Server) -> None:
    """Every message has some of its own: what is rendered is refused before its tokens are counted."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": ""} for i in range(1999)]
    answer = wild_server.http.post(
        "/v1/chat/completions", json={"model": NAME, "messages": messages}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


class Endless:
    """A rendering that goes on until it is not wanted any more."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.begun = threading.Event()
        self.ended: list[str] = []

    def __enter__(self) -> Endless:
        def chat_ids(*_: Any, look: Callable[[], None], **__: Any) -> list[int]:
            self.begun.set()
            end = time.monotonic() + 60
            try:
                while time.monotonic() < end:
                    look()
                    time.sleep(0.005)
            except Exception as error:
                self.ended.append(type(error).__name__)
                raise
            return []

        self._llm.chat_ids = chat_ids  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._llm.chat_ids  # type: ignore[method-assign]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_who_left_is_not_prepared_for(wild: LLM, wild_server: Server, path: str) -> None:
    with Endless(wild) as endless:
        with open_request(wild_server, {"model": NAME, "messages": user("x")}, path):
            assert endless.begun.wait(60)
        until(lambda: bool(endless.ended), "it is still being prepared")
        assert endless.ended == ["CancelledError"]
        idle(wild_server)
    assert wild_server.http.post("/v1/messages/count_tokens", json=COUNT).status_code == 200


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v1/chat/completions", {"messages": user("é" * 900_000)}),
        ("/v1/messages/count_tokens", {"messages": user("é" * 900_000)}),
        ("/api/generate", {"prompt": "é" * 900_000, "raw": True}),
    ],
)
def test_the_tokens_of_a_text_that_cannot_fit_are_not_all_counted(
    wild: LLM, wild_server: Server, monkeypatch: pytest.MonkeyPatch, path: str, text: Json
) -> None:
    parts: list[int] = []
    encoded = type(wild.tokenizer)._encoded

    def counting(tokenizer: Any, part: str) -> list[int]:
        parts.append(len(part))
        return encoded(tokenizer, part)

    monkeypatch.setattr(type(wild.tokenizer), "_encoded", counting)
    answer = wild_server.http.post(path, json={"model": NAME, **text})
    assert answer.status_code == 400
    assert "2048 tokens" in answer.text or "2048 maximum" in answer.text
    assert max(parts) <= PART
    assert sum(parts) < 3 * PART


def test_what_is_looked_at_ends_a_rendering(wild: LLM) -> None:
    """Within the template too, which can hide no such end."""
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise CancelledError("enough")

    with pytest.raises(CancelledError, match="enough"):
        wild.chat_ids([{"role": "user", "content": "x"}] * 3, look=look)
    assert looks == 2
