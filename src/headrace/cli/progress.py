"""Progress of long work on standard error: a bar on a terminal, a line every tenth elsewhere.

Knows no kind of work: it is told what is done, how much of it, of how much.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.locate import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


@contextmanager
def shown(*, bytes_counted: bool = False) -> Iterator[Progress]:
    """A callback that shows what it is told until the block ends."""
    if sys.stderr.isatty():
        with _bars(bytes_counted) as bars:
            yield _Bar(bars)
    else:
        yield _Lines()


def _bars(bytes_counted: bool) -> Bars:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    if bytes_counted:
        columns += [DownloadColumn(), TransferSpeedColumn()]
    return Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)


class _Bar:
    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)  # type: ignore[arg-type]


class _Lines:
    def __init__(self) -> None:
        self._shown: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if tenth > self._shown.get(what, -1):
            self._shown[what] = tenth
            print(f"{what}: {10 * tenth} %", file=sys.stderr, flush=True)
