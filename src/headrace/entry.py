"""The console script: what holds from its first instruction on, before anything that takes time is imported."""

from __future__ import annotations

import os
import sys

from headrace import signals


def main() -> None:
    """Run the command line of this process."""
    signals.exit_on_interrupt()
    _occupy_standard_streams()
    try:
        from headrace.cli.main import execute

        code = execute(sys.argv[1:])
    except KeyboardInterrupt:  # a second one, while the first was being answered
        code = signals.INTERRUPTED
    signals.ignore_interrupt()
    sys.exit(code)


def _occupy_standard_streams() -> None:
    """Open the null device for each of the descriptors 0 to 2 that is closed, so that no file gets its number."""
    number = 0
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
