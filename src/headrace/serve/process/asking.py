"""Asks who answers on a port: another headrace server, something else, or nobody."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from headrace.serve.process import lock
from headrace.serve.telemetry.status import SERVER, STATUS

SECONDS = 1.0
MAX_BYTES = 1 << 16
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def described(home: Path, host: str, port: int) -> str | None:
    """The headrace server on a port in words, also one that is still starting; None if there is none."""
    if (found := lock.holder(home)) is not None and found.port == port:
        return str(found)
    told = status(host, port)
    if told is None:
        return None
    return f"the headrace server of {told.get('model')!s:.200} (pid {told.get('pid')!s:.20})"


def status(host: str, port: int) -> dict[str, Any] | None:
    """What a headrace server on a port tells of itself; None if none answers, or it wants a key.

    It gets no key: who listens there is what is asked.
    """
    name = host.strip("[]")
    asked = http.client.HTTPConnection(_ANY.get(name, name), port, timeout=SECONDS)
    try:
        asked.request("GET", STATUS)
        told = json.loads(asked.getresponse().read(MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    finally:
        asked.close()
    return told if isinstance(told, dict) and told.get("server") == SERVER else None
