"""Lines of the log."""

from __future__ import annotations

import io
import json
import logging
import os
import time
import warnings

import pytest

from headrace.serve.telemetry import log
from headrace.serve.telemetry.log import line, logging_to

AT = 1_700_000_000.25


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, ""),
        ({"id": "ab12", "seconds": 0.125, "status": 200}, " id=ab12 seconds=0.125 status=200"),
        ({"endpoint": "/v1/models/{model:path}", "model": "a:b+c@d"}, " endpoint=/v1/models/{model:path} model=a:b+c@d"),
        ({"model": "two words"}, ' model="two words"'),
        ({"model": "x\nforged id=1"}, ' model="x\\nforged id=1"'),
        ({"model": 'q"\u2028\x1b[31m'}, ' model="q\\"\\u2028\\u001b[31m"'),
        ({"model": ""}, ' model=""'),
    ],
)  # fmt: skip
def test_a_line(fields: dict[str, str | int | float], shown: str) -> None:
    assert (
        line(AT, "INFO", "request", fields, json=False)
        == f"2023-11-14T22:13:20.250Z request{shown}"
    )


def test_a_message_is_one_line_of_ascii() -> None:
    assert line(AT, "WARNING", "a\nb\x1b[31m\u2028c", {}, json=False) == (
        "2023-11-14T22:13:20.250Z warning a b\\x1b[31m c"
    )


def test_a_line_of_json() -> None:
    text = line(AT, "INFO", "request", {"model": "x\ny", "seconds": 0.5}, json=True)
    assert "\n" not in text
    assert json.loads(text) == {
        "time": "2023-11-14T22:13:20.250Z", "level": "info", "message": "request", "model": "x\ny", "seconds": 0.5,
    }  # fmt: skip


def test_an_exception_shows_its_place_and_not_what_it_says() -> None:
    stream = io.StringIO()
    with logging_to(stream, json=True):
        try:
            raise KeyError("the prompt's text")
        except KeyError:
            logging.getLogger("headrace.serve.app").exception("a request failed")
    told = json.loads(stream.getvalue())
    assert (told["level"], told["message"], told["exception"]) == (
        "error",
        "a request failed",
        "KeyError",
    )
    assert told["trace"].startswith(__file__)
    assert "prompt" not in stream.getvalue()


def test_warnings_are_lines_too_and_all_is_as_it_was_behind_it() -> None:
    stream, logger = io.StringIO(), logging.getLogger("headrace")
    before = (logger.handlers, logger.level, logger.propagate, warnings.showwarning)
    with logging_to(stream, json=False):
        warnings.warn("the disk is full", stacklevel=1)
        logging.getLogger("uvicorn.error").info("Started server process")
    assert (logger.handlers, logger.level, logger.propagate, warnings.showwarning) == before
    assert [text.partition(" ")[2] for text in stream.getvalue().splitlines()] == [
        "warning the disk is full"
    ]


def test_a_reader_that_stalls_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_LINES", 50)
    reading, writing = os.pipe()
    with open(writing, "w") as stream, open(reading, "rb") as reader:
        with logging_to(stream, json=False):
            logger = logging.getLogger("headrace.test")
            for _ in range(5000):
                logger.info(
                    "x" * 100
                )  # the pipe holds 64 KiB: without a line of its own this never ends
            os.set_blocking(reading, False)
            lines = 0
            end = time.monotonic() + 20
            while time.monotonic() < end and (data := reader.read()) is not None:
                lines += data.count(b"\n")
                time.sleep(0.02)
        assert 50 <= lines < 5000


def test_a_reader_that_left_costs_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w", buffering=1)
    with logging_to(stream, json=False):
        for _ in range(10):
            logging.getLogger("headrace.test").info("x")
    with pytest.raises(BrokenPipeError):
        stream.close()
