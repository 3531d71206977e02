"""A server process over a script: `python scripted_server.py JSON`, with the fields of `Site`, the seconds of `loading` and `closing`,
and whether SIGINT is ignored on entry (`ignoring`)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.serve.backend import Progress
from headrace.serve.events import Event, Failed, Failure, Finished, Started, TextDelta, Usage
from headrace.serve.process.run import Opened, Site, run
from headrace.serve.request import Request
from serve.http.plain import plain
from serve.scripted import CARD

USAGE = Usage(prompt_tokens=10, cached_tokens=4, new_tokens=5, decode_seconds=0.5)
DONE = Finished("stop", USAGE)
SCRIPTS: dict[str, list[Event | float]] = {
    "quick": [Started(10, 4), TextDelta("answer"), DONE],
    "slow": [Started(10, 4), TextDelta("answer"), 60.0, DONE],
    "queued": [60.0, DONE],
    "flood": [Started(10, 4), *[TextDelta("x" * 65536)] * 500, DONE],
    "failing": [Started(10, 4), Failed(Failure(500, "inference_error", "it broke"))],
}


class Slow:
    """Follows a script; what is cancelled ends at once."""

    progress = Progress(6, 1)

    def __init__(self, events: list[Event | float]) -> None:
        self._events = events
        self._gone = asyncio.Event()

    async def next(self) -> Event | None:
        while self._events and not self._gone.is_set():
            head = self._events.pop(0)
            if not isinstance(head, int | float):
                return head
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), head)
        return None

    def cancel(self) -> None:
        self._gone.set()


class Backend:
    """Answers by the script that the first word of what is asked names."""

    card = replace(CARD, version="1.2.3")

    def submit(self, request: Request, *, request_id: str, arrived: float) -> Slow:
        return Slow(list(SCRIPTS[request.turns[-1].text.split()[0]]))

    async def count(self, request: Request) -> int:
        return 7


def main() -> int:
    given = json.loads(sys.argv[1])
    loading, closing = given.pop("loading", 0.0), given.pop("closing", 0.0)
    if given.pop("ignoring", False):
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextmanager
    def opening() -> Iterator[Opened]:
        print("opening", flush=True)
        time.sleep(loading)
        try:
            yield Opened(
                Backend(), [plain()], counts=lambda: (2, 1), cache_bytes={"memory": lambda: 64}
            )
        finally:
            if closing:
                print("closing", flush=True)
            time.sleep(closing)
            print("closed", flush=True)

    try:
        return run(Site(**{**given, "home": Path(given["home"])}), opening)
    except HeadraceError as error:
        print(f"error: {error.message} ({error.hint})", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
