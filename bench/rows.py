"""The recorded row: one measurement of one system, with everything needed to judge it.

A results file is JSON lines. A row is checked when it is read, so a page is never made of something else.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

KINDS = (
    "speed",
    "bandwidth",
    "load",
    "quality",
    "profile",
    "routes",
    "stream",
    "ablation",
    "constrain",
    "speculate",
    "adapters",
    "drafters",
    "reuse",
    "batch",
    "serve",
)


class RowError(Exception):
    """A row that is not one."""


@dataclass(frozen=True)
class Run:
    """What the rows of one run share. `machine` is `machine.facts()`."""

    date: str  # ISO 8601, UTC
    command: str
    commit: str  # of headrace; ends in "+changes" when the tree differs from it
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """`samples` of `measure`, in `unit`; threads 0 where they do not matter."""

    kind: str
    measure: str
    system: str
    threads: int
    unit: str
    samples: tuple[float, ...]
    run: Run
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RowError(f"kind is {self.kind!r}; known: {', '.join(KINDS)}")
        if not self.samples:
            raise RowError(f"{self.system}, {self.measure}: no samples")
        if not all(math.isfinite(s) for s in self.samples):
            raise RowError(f"{self.system}, {self.measure}: a sample is not finite")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "median": self.median}, sort_keys=True)


def from_json(line: str) -> Row:
    """The row of one line. Raises RowError for a missing or unknown key, or a median that is not one."""
    value = json.loads(line)
    wanted = {f.name for f in fields(Row)} | {"median"}
    if not isinstance(value, dict) or set(value) != wanted:
        raise RowError(f"a row has the keys {sorted(wanted)}, not {sorted(value)}")
    median = value.pop("median")
    value["samples"] = tuple(float(s) for s in value["samples"])
    row = Row(**{**value, "run": Run(**value["run"])})
    if row.median != median:
        raise RowError(f"{row.system}, {row.measure}: median {median} is not that of the samples")
    return row


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows at the end of a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(row.to_json() + "\n" for row in rows)


def read(path: Path) -> list[Row]:
    """Every row of a results file; none where there is no file. Raises RowError with the line's number."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(from_json(line))
        except (RowError, ValueError, TypeError) as error:
            raise RowError(f"{path.name}, line {number}: {error}") from error
    return rows


def latest(rows: Iterable[Row]) -> list[Row]:
    """The rows of the newest run that had each number of threads: a run may be of some of them alone."""
    kept = list(rows)
    newest: dict[int, str] = {}
    for row in kept:
        newest[row.threads] = max(newest.get(row.threads, ""), row.run.date)
    return [row for row in kept if row.run.date == newest[row.threads]]
