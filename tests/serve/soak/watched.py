"""The real command line, which writes on SIGUSR1 what lives in it: `python watched.py FILE serve ...`.

Its sockets hold little, as over a slow network, so a client that stops reading is felt soon.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from headrace.entry import main

UNSENT_BYTES = 8192
REPORT = Path(sys.argv.pop(1))


def told() -> dict[str, Any]:
    """pages: of the KV cache, `lent` to sequences of generations and `kept` as prefixes. objects: of headrace, by class."""
    gc.collect()
    objects, pages = Counter[str](), {}
    for thing in gc.get_objects():
        kind = type(thing)
        if getattr(kind, "__module__", "").startswith("headrace."):
            objects[kind.__name__] += 1
            if kind.__name__ == "Engine":
                lent = thing.prefixes.held_elsewhere({})
                pages = {
                    "all": thing.pages.num_pages,
                    "lent": lent,
                    "kept": thing.prefixes.num_pages,
                    "used": thing.pages.num_used,
                }
    threads = sorted(thread.name for thread in threading.enumerate())
    return {"pages": pages, "objects": dict(objects), "threads": threads}


def write(_number: int, _frame: object) -> None:
    new = REPORT.with_suffix(".new")
    new.write_text(json.dumps(told()))
    os.replace(new, REPORT)


def listen(self: socket.socket, *given: int) -> None:
    self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT_BYTES)
    _listen(self, *given)


_listen = socket.socket.listen
socket.socket.listen = listen  # type: ignore[method-assign]
signal.signal(signal.SIGUSR1, write)
main()
