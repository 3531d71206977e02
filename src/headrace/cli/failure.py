"""How a command's failure is told: lines on standard error, and one JSON object where --json asks for it."""

from __future__ import annotations

import json
import sys
from typing import TextIO


def tell(message: str, hint: str | None) -> None:
    """For people, on standard error."""
    lines = [f"error: {' '.join(message.split())}"]
    if hint:
        lines.append(f"hint: {hint}")
    print_safe("\n".join(lines), sys.stderr)


def tell_json(code: str, message: str, hint: str | None) -> None:
    """For programs, on standard output: {"error": {code, message, hint}}."""
    body = {"code": code, "message": " ".join(message.split()), "hint": hint}
    print_safe(json.dumps({"error": body}), sys.stdout)


def print_safe(text: str, stream: TextIO) -> None:
    """Print text that may hold a file name's undecodable bytes."""
    plain = text.encode("utf-8", "backslashreplace").decode("utf-8")
    print(plain, file=stream, flush=True)
