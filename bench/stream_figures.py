"""Figures of the model that is bigger than memory: the roofline of the disk, hit rates, ratios. Draws nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.figures import Figures, Target, at_least
from bench.rows import Row
from bench.stream import AIRLLM, DISK, LLAMA, NEUROSTREAM, PREFILL, RAW
from bench.systems import HEADRACE

DECODE = "decode "
RESIDENT = "resident "
# Of the dense targets, less the twentieth that experts may cost.
RESIDENT_TARGETS = {f"{RESIDENT}{PREFILL}": 3.0 * 0.95, f"{RESIDENT}decode": 1.6 * 0.95}


@dataclass(frozen=True)
class Flow:
    """Where a run's experts came from. Rates are shares of all uses of experts; bytes are of a token."""

    resident: (
        float  # were in memory, or in a read that a forecast had begun, when their layer chose them
    )
    agreement: float | None  # forecasts that were right
    bytes_read: float
    bytes_wasted: float
    waited: float  # share of the time of all threads


class StreamFigures:
    """What rows of kind "stream" say together."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def raw(self) -> float | None:
        """MB/s of the disk with the best lane count."""
        found = self._figures.rows("stream", measure=RAW, system=DISK)
        return max((r.median for r in found), default=None)

    def limited(self) -> list[Row]:
        """Rows of engines inside the limit."""
        return [
            r
            for r in self._figures.rows("stream")
            if r.system != DISK and not r.measure.startswith(RESIDENT)
        ]

    def measures(self) -> list[str]:
        return list(dict.fromkeys(r.measure for r in self.limited()))

    def row(self, measure: str, system: str) -> Row | None:
        found = self._figures.rows("stream", measure=measure, system=system)
        return found[0] if found else None

    def ratio(self, measure: str, system: str) -> float | None:
        """headrace's speed over a system's; None where that ran nothing."""
        own, other = self.row(measure, HEADRACE), self.row(measure, system)
        return own.median / other.median if own and other and other.median else None

    def missing_bytes(self) -> float | None:
        """Bytes a token of experts that the pool has no room for, where all are equally likely."""
        own = next((r for r in self.limited() if r.system == HEADRACE), None)
        if own is None or "experts" not in own.settings:
            return None
        s = own.settings
        held = (s["pool_slots"] + s["lookahead_slots"]) / s["experts"]
        return float(s["uses_per_token"] * s["expert_bytes"] * (1 - held))

    def roofline(self) -> float | None:
        """Tokens a second if decode only waited for those bytes."""
        raw, missing = self.raw(), self.missing_bytes()
        return raw * 1e6 / missing if raw and missing else None

    def targets(self) -> Iterator[Target]:
        """Threads do not matter to the table: all of these were measured with one number of them."""
        for measure in self.measures():
            for system, least in _wanted(measure).items():
                name = f"bigger than memory: {measure}, over {system}"
                yield from _target(name, least, self.ratio(measure, system), "{:.1f}x")
            own, roof = self.row(measure, HEADRACE), self.roofline()
            if measure.startswith(DECODE) and own and roof:
                name = f"bigger than memory: {measure}, share of the disk's roofline"
                yield from _target(name, 0.85, own.median / roof, "{:.0%}")
        for measure, least in RESIDENT_TARGETS.items():
            name = f"mixture of experts, {measure}, over {LLAMA}"
            yield from _target(name, least, self.ratio(measure, LLAMA), "{:.2f}x")


def flow(row: Row) -> Flow | None:
    """Of a row of headrace; None where it did not run."""
    counters, tokens = row.settings.get("counters", {}), row.settings.get("tokens", 0)
    if not tokens or not counters.get("uses"):
        return None
    guessed = counters["guessed"]
    return Flow(
        resident=max(0.0, 1 - counters["reads"] / counters["uses"]),
        agreement=counters["guessed_right"] / guessed if guessed else None,
        bytes_read=counters["bytes_read"] / tokens,
        bytes_wasted=counters["bytes_wasted"] / tokens,
        waited=counters["seconds_waited"] / (row.settings["seconds"] * row.threads),
    )


def _wanted(measure: str) -> dict[str, float]:
    """The least ratio to each engine."""
    if measure == PREFILL:
        return {LLAMA: 3.0}
    return {LLAMA: 10.0, NEUROSTREAM: 10.0, AIRLLM: 10.0}


def _target(name: str, least: float, value: float | None, form: str) -> Iterator[Target]:
    target = at_least(name, least, {0: value}, form)
    if target is not None:
        yield target
