"""Interrupts a call at a chosen moment, as a signal would."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th moment that counts in the files of `PLACES`."""

    PLACES: tuple[str, ...]
    OPCODES = False  # whether moments are between instructions rather than lines

    def __init__(self, at: int) -> None:
        self.left = at

    def counts(self, frame: FrameType) -> bool:
        """Whether a signal could come here."""
        return True

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        if not any(place in frame.f_code.co_filename for place in self.PLACES):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.OPCODES, not self.OPCODES
        if event == ("opcode" if self.OPCODES else "line") and self.counts(frame):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace
