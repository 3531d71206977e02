"""The server's log on standard error: a line for every request and for what happens beside them; JSON if wanted.

Nothing in it is of a prompt or an answer: an unexpected error shows its type and its place, and not what it says. A
reader that stalls costs lines, and never holds the server.
"""

from __future__ import annotations

import json as json_text
import logging
import queue
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO

from headrace.serve.telemetry.account import Fields

LOGGERS = ("headrace", "uvicorn")
MAX_LINES = 10_000  # that wait to be written

_UNPRINTABLE = re.compile(r"[^ -~]")
_PLAIN = re.compile(r"[\w.:/{}+@-]+", re.ASCII)


def line(at: float, level: str, message: str, fields: Fields, *, json: bool) -> str:
    """One line without its end. at: Unix seconds."""
    time = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    time = time.replace("+00:00", "Z")
    if json:
        whole = {"time": time, "level": level.lower(), "message": message, **fields}
        return json_text.dumps(whole)
    shown = [f"{name}={_shown(value)}" for name, value in fields.items()]
    text = _UNPRINTABLE.sub(_escaped, " ".join(message.split()))
    return " ".join([time, *([] if level == "INFO" else [level.lower()]), text, *shown])


@contextmanager
def logging_to(stream: TextIO, *, json: bool) -> Iterator[None]:
    """Everything that the server and its libraries log goes to `stream` inside the block, warnings too."""
    waiting: queue.Queue[Any] = queue.Queue(MAX_LINES)
    writer = _Writer(stream)
    writer.setFormatter(_Lines(json))
    entrance, listener = _Entrance(waiting), QueueListener(waiting, writer)
    before = []
    for name in LOGGERS:
        logger = logging.getLogger(name)
        before.append((logger, logger.handlers, logger.level, logger.propagate))
        logger.handlers, logger.propagate = [entrance], False
        logger.setLevel(logging.INFO if name == "headrace" else logging.WARNING)
    listener.start()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn  # type: ignore[assignment]
            yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        listener.stop()


class _Entrance(QueueHandler):
    """Puts records in line, or drops them where the line is full."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # with its exception, for `_Lines`

    def handleError(self, record: logging.LogRecord) -> None:
        pass


class _Writer(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Nobody reads any more."""


class _Lines(logging.Formatter):
    def __init__(self, json: bool) -> None:
        super().__init__()
        self._json = json

    def format(self, record: logging.LogRecord) -> str:
        fields: Fields = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            kind, _, trace = record.exc_info
            fields["exception"] = kind.__name__
            fields["trace"] = " < ".join(
                f"{frame.filename}:{frame.lineno}"
                for frame in reversed(traceback.extract_tb(trace))
            )
        return line(record.created, record.levelname, record.getMessage(), fields, json=self._json)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _shown(value: str | int | float) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json_text.dumps(text)


def _warn(message: Warning | str, *_: object) -> None:
    logging.getLogger(__name__).warning("%s", message)
