"""A real server process' HTTP side, in a thread of the test, on a free port."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.serve.http.answer import App
from headrace.serve.http.protocol import Limits
from headrace.serve.http.server import listening, server


@contextmanager
def served(app: App, limits: Limits | None = None) -> Iterator[str]:
    """The base URL of `app`, which is served inside the block."""
    with listening(port=0) as listener:
        running = server(app, limits)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive(), "the server ended while it started"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server does not end"
