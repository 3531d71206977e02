"""Figures of the newest run of each kind: look-ups, ratios and targets. Knows rows, draws nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.load import FIRST_TOKEN
from bench.quality import KL, LOSS
from bench.rows import KINDS, Row, latest, read
from bench.step_profile import OPERATION, SHARE
from bench.systems import HEADRACE

# Of rows; bandwidth is recorded with speed.
FILES = (
    "speed",
    "load",
    "quality",
    "profile",
    "stream",
    "ablations",
    "routes",
    "constrain",
    "speculate",
    "adapters",
    "reuse",
    "batch",
    "serve",
)


@dataclass(frozen=True)
class Target:
    """A goal and what was measured for each number of threads (0: threads do not matter)."""

    name: str
    wanted: str
    measured: Mapping[int, str]
    met: bool


class Figures:
    """The newest rows of each kind."""

    def __init__(self, rows: Iterable[Row]) -> None:
        kept = list(rows)
        self._rows = [r for kind in KINDS for r in latest(r for r in kept if r.kind == kind)]

    @classmethod
    def of(cls, results: Path) -> Figures:
        """From a folder of recorded rows."""
        return cls(row for name in FILES for row in read(results / f"{name}.jsonl"))

    def rows(self, kind: str, **wanted: Any) -> list[Row]:
        """Rows of a kind whose fields, or settings, are as wanted."""
        return [r for r in self._rows if r.kind == kind and _fits(r, wanted)]

    def median(self, kind: str, measure: str, system: str, **wanted: Any) -> float | None:
        found = self.rows(kind, measure=measure, system=system, **wanted)
        return found[0].median if found else None

    def threads(self) -> list[int]:
        return sorted({r.threads for r in self.rows("speed")})

    def names(self, kind: str, field: str = "system") -> list[str]:
        """Systems, or measures, in the order in which they were measured."""
        return list(dict.fromkeys(getattr(r, field) for r in self.rows(kind)))

    def ratio(self, measure: str, system: str, threads: int) -> float | None:
        """headrace's speed over a system's."""
        own = self.median("speed", measure, HEADRACE, threads=threads)
        other = self.median("speed", measure, system, threads=threads)
        return own / other if own and other else None

    def least_ratio(self, measure: str, ending: str, threads: int) -> float | None:
        """headrace over the fastest of llama.cpp's builds with a format."""
        systems = [
            s for s in self.names("speed") if s.startswith("llama.cpp") and s.endswith(ending)
        ]
        ratios = (self.ratio(measure, s, threads) for s in systems)
        return min((r for r in ratios if r is not None), default=None)

    def bytes_per_token(self, context: int) -> float | None:
        """What one decode step of headrace reads: weights, and the cache of a context."""
        found = self.rows("speed", system=HEADRACE)
        if not found:
            return None
        facts = found[0].settings
        return float(facts["weight_bytes"] + context * facts["kv_bytes_per_token"])

    def read_rate(self, context: int, threads: int) -> float | None:
        """GB/s of weights and cache that decode reads."""
        rate = self.median("speed", decode_name(context), HEADRACE, threads=threads)
        nbytes = self.bytes_per_token(context)
        return nbytes * rate / 1e9 if nbytes and rate else None

    def bandwidth(self, threads: int) -> float | None:
        """The fastest read of either buffer."""
        return max((r.median for r in self.rows("bandwidth", threads=threads)), default=None)

    def perplexity(self, system: str) -> float | None:
        found = self.rows("quality", measure=LOSS, system=system)
        return math.exp(statistics.mean(found[0].samples)) if found else None

    def mean(self, measure: str, system: str) -> float | None:
        """Over the windows."""
        found = self.rows("quality", measure=measure, system=system)
        return statistics.mean(found[0].samples) if found else None

    def targets(self) -> list[Target]:
        """Those that the rows can judge."""
        found = [*self._speed_targets(), self._reach(), self._load(), self._share()]
        return [t for t in [*found, *self._quality_targets()] if t is not None]

    def _speed_targets(self) -> Iterator[Target | None]:
        for format_name, prefill in (("Q4_1", 3.0), ("Q4_0", 1.6)):
            for name in self.names("speed", "measure"):
                least = prefill if name.startswith("prefill") else 1.6
                ratios = {n: self.least_ratio(name, format_name, n) for n in self.threads()}
                title = f"{name}, over llama.cpp {format_name}"
                yield at_least(title, least, ratios, "{:.2f}x")

    def _reach(self) -> Target | None:
        shares: dict[int, float | None] = {}
        for n in self.threads():
            rate, limit = self.read_rate(16, n), self.bandwidth(n)
            shares[n] = rate / limit if rate and limit else None
        return at_least("decode at 16, share of the read bandwidth", 0.8, shares, "{:.0%}")

    def _load(self) -> Target | None:
        seconds = self.median("load", FIRST_TOKEN, HEADRACE)
        return _below("start to first token, whole process", 1.0, {0: seconds}, "{:.2f} s")

    def _share(self) -> Target | None:
        shares: dict[int, float | None] = {}
        for row in self.rows("profile", measure=SHARE, sampled=False):
            shares[row.threads] = max(shares.get(row.threads) or 0.0, row.median)
        return _below("Python's share of a greedy decode step", 0.1, shares, "{:.1%}")

    def _quality_targets(self) -> Iterator[Target | None]:
        peers = [
            s for s in self.names("quality") if s.startswith("llama.cpp") and s.endswith("Q4_1")
        ]
        kls = [k for s in peers if (k := self.mean(KL, s)) is not None]
        texts = [p for s in peers if (p := self.perplexity(s)) is not None]
        if kls and texts:
            yield _below("KL to float32", min(kls) + 0.002, {0: self.mean(KL, HEADRACE)}, "{:.4f}")
            limit = min(texts) * 1.005
            yield _below("perplexity", limit, {0: self.perplexity(HEADRACE)}, "{:.3f}")


@dataclass(frozen=True)
class Pass:
    """One profiled pass: seconds by operation."""

    name: str
    threads: int
    operations: Mapping[str, Row]


def passes(figures: Figures) -> list[Pass]:
    """Profiled passes in the order in which they were measured."""
    rows = [r for r in figures.rows("profile") if r.measure.startswith(OPERATION)]
    out = []
    for case in dict.fromkeys((r.threads, r.settings["context"], r.settings["rows"]) for r in rows):
        threads, context, count = case
        found = [r for r in rows if (r.threads, r.settings["context"], r.settings["rows"]) == case]
        name = decode_name(context) if count == 1 else f"prefill {count:,}"
        out.append(Pass(name, threads, {r.measure.removeprefix(OPERATION): r for r in found}))
    return out


def decode_name(context: int) -> str:
    return f"decode at {context:,}"


def _fits(row: Row, wanted: Mapping[str, Any]) -> bool:
    return all(
        getattr(row, k) == v if hasattr(row, k) else row.settings.get(k) == v
        for k, v in wanted.items()
    )


def at_least(
    name: str, least: float, values: Mapping[int, float | None], form: str
) -> Target | None:
    """A target for each number of threads; None where nothing was measured."""
    known = {n: v for n, v in values.items() if v is not None}
    shown = {n: form.format(v) for n, v in known.items()}
    met = all(v >= least for v in known.values())
    return Target(name, f"at least {form.format(least)}", shown, met) if known else None


def _below(name: str, limit: float, values: Mapping[int, float | None], form: str) -> Target | None:
    known = {n: v for n, v in values.items() if v is not None}
    shown = {n: form.format(v) for n, v in known.items()}
    met = all(v < limit for v in known.values())
    return Target(name, f"below {form.format(limit)}", shown, met) if known else None
