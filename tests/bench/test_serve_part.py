"""Clients of the part serve, against a server that follows a script."""

from __future__ import annotations

import pytest

from bench import http_load
from headrace.serve.app import create_app
from headrace.serve.dialects import openai_chat
from headrace.serve.events import Failed, Failure, Finished, Started, TextDelta, Usage
from serve.scripted import CARD, ScriptedBackend
from serve.served import served


def test_every_prompt_is_asked_once_by_as_many_clients_as_wanted() -> None:
    script = [Started(9, 0), TextDelta("a"), 0.05, Finished("length", Usage(9, 0, 5))]
    backend = ScriptedBackend(script)
    with served(create_app(backend, [openai_chat])) as url:
        load = http_load.run(url, CARD.name, [f"Say {i}" for i in range(6)], 3, 5)
    assert sorted(request.turns[0].text for request in backend.requests) == [
        f"Say {i}" for i in range(6)
    ]
    assert [request.limit for request in backend.requests] == [5] * 6
    assert load.tokens == 30
    assert all(0 < answer.first < answer.whole < load.seconds for answer in load.answers)


@pytest.mark.parametrize(
    "script",
    [
        [Failed(Failure(503, "insufficient_memory", "no room"))],
        [Started(9, 0), TextDelta("a"), Failed(Failure(500, "inference_error", "it broke"))],
        [Started(9, 0), Finished("stop", Usage(9, 0, 1))],
    ],
    ids=["refused", "broken", "empty"],
)
def test_a_request_without_an_answer_is_no_sample(script: list[object]) -> None:
    app = create_app(ScriptedBackend(script), [openai_chat])  # type: ignore[arg-type]
    with served(app) as url, pytest.raises(RuntimeError, match="no whole answer"):
        http_load.run(url, CARD.name, ["Hello"], 1, 5)
