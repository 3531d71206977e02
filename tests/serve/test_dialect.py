"""What dialects share."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from headrace.serve.dialect import one_line, sse
from serve.scripted import CARD


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
