"""What is told of a request."""

from __future__ import annotations

from dataclasses import replace

from headrace.serve.events import Failed, Failure, Finished, Started, TextDelta, Usage
from headrace.serve.telemetry.account import GONE, Account

USAGE = Usage(
    prompt_tokens=20, cached_tokens=8, new_tokens=5, reasoning_tokens=2, decode_seconds=0.5
)


def generated(**given: object) -> Account:
    account = Account(100.0, id="ab", dialect="ollama", endpoint="/api/chat", **given)  # type: ignore[arg-type]
    account.model, account.submitted, account.status = "painted:1m", 100.0, 200
    return account


def test_a_whole_generation() -> None:
    account = generated()
    account.heard(Started(20, 8), 101.0)
    account.heard(TextDelta("secret"), 103.5)
    account.heard(Finished("stop", USAGE), 104.0)
    account.end(104.25)
    assert account.fields() == {
        "id": "ab", "dialect": "ollama", "endpoint": "/api/chat", "model": "painted:1m", "status": 200,
        "seconds": 4.25, "queued": 1.0, "prefill": 2.5, "decode": 0.75, "prompt_tokens": 20,
        "cached_tokens": 8, "new_tokens": 5, "reasoning_tokens": 2, "finish": "stop",
    }  # fmt: skip
    assert account.first_token_seconds == 3.5
    assert account.decode_rate == 8.0


def test_seconds_of_the_prompt_are_those_that_were_measured() -> None:
    """Where the backend says so; a generation may tell that it started only when its prompt has been read."""
    account = generated()
    account.heard(Started(20, 8), 103.0)
    account.heard(TextDelta("x"), 103.0)
    account.heard(Finished("stop", replace(USAGE, prefill_seconds=2.0)), 104.0)
    account.end(104.0)
    told = account.fields()
    assert (told["queued"], told["prefill"], told["decode"]) == (1.0, 2.0, 1.0)


def test_one_that_never_left_the_line() -> None:
    account = generated(status=None)
    account.status = None
    account.end(130.0)
    assert account.fields() == {
        "id": "ab", "dialect": "ollama", "endpoint": "/api/chat", "model": "painted:1m", "seconds": 30.0,
        "queued": 30.0, "error": GONE,
    }  # fmt: skip


def test_one_whose_client_left_during_prefill() -> None:
    account = generated()
    account.heard(Started(20, 8), 101.0)
    account.end(103.0)
    told = account.fields()
    assert (told["prefill"], told["error"]) == (2.0, GONE)
    assert "decode" not in told
    assert told["new_tokens"] == 0


def test_one_that_failed_is_told_by_its_code_alone() -> None:
    account = generated()
    account.heard(Started(20, 8), 101.0)
    account.heard(Failed(Failure(500, "inference_error", "about secret text")), 102.0)
    account.end(102.0)
    told = account.fields()
    assert told["error"] == "inference_error"
    assert "finish" not in told
    assert "secret" not in str(told)
    assert account.first_token_seconds is None


def test_a_request_that_generates_nothing() -> None:
    account = Account(1.0, id="cd", endpoint="/api/tags", status=200)
    account.end(1.5)
    assert account.fields() == {
        "id": "cd", "dialect": "server", "endpoint": "/api/tags", "status": 200, "seconds": 0.5,
    }  # fmt: skip


def test_an_answer_of_one_token_has_no_rate() -> None:
    account = generated()
    account.heard(Finished("length", Usage(new_tokens=1, decode_seconds=0.1)), 101.0)
    assert account.decode_rate is None
