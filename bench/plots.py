"""The plots of docs/benchmarks.md, drawn from figures. The same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import Figures, decode_name, passes
from bench.load import FIRST_TOKEN
from bench.quality import KL
from bench.stream_figures import DECODE, StreamFigures
from bench.systems import HEADRACE

OWN, PEER = "#1f6f8b", "#b8b8b8"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "headrace",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    own: bool
    text: str


def draw(figures: Figures, folder: Path) -> None:
    """Write the plots that there are rows for."""
    import matplotlib

    matplotlib.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Figures], Any]] = {
        "speed": _speed, "bandwidth": _bandwidth, "load": _load, "quality": _quality, "step": _step,
        "stream": _stream,
    }  # fmt: skip
    with matplotlib.rc_context(STYLE):
        for name, plot in plots.items():
            if (figure := plot(figures)) is not None:
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def _speed(figures: Figures) -> Any:
    measures, threads = figures.names("speed", "measure"), figures.threads()
    if not measures:
        return None
    figure, axes = _grid(len(threads), len(measures), 0.3 * len(figures.names("speed")) + 0.6)
    for line, count in zip(axes, threads, strict=True):
        for axis, measure in zip(line, measures, strict=True):
            rows = figures.rows("speed", measure=measure, threads=count)
            bars = [Bar(r.system, r.median, r.system == HEADRACE, f"{r.median:,.0f}") for r in rows]
            _bars(axis, bars, f"{measure}, {_threads(count)}", "tok/s", labels=axis is line[0])
    return figure


def _bandwidth(figures: Figures) -> Any:
    if not figures.rows("bandwidth"):
        return None
    figure, axes = _grid(1, len(figures.threads()), 1.6)
    for axis, count in zip(axes[0], figures.threads(), strict=True):
        rows = figures.rows("bandwidth", threads=count)
        bars = [Bar(r.measure, r.median, False, f"{r.median:.1f}") for r in rows]
        for context in (16, 1000):
            if (rate := figures.read_rate(context, count)) is not None:
                bars.append(Bar(decode_name(context), rate, True, f"{rate:.1f}"))
        _bars(axis, bars, _threads(count), "GB/s", labels=axis is axes[0][0])
    return figure


def _load(figures: Figures) -> Any:
    rows = figures.rows("load", measure=FIRST_TOKEN)
    if not rows:
        return None
    figure, axes = _grid(1, 1, 0.3 * len(rows) + 0.6)
    bars = [Bar(r.system, r.median, r.system == HEADRACE, f"{r.median:.2f}") for r in rows]
    _bars(axes[0][0], bars, FIRST_TOKEN, "seconds", labels=True)
    return figure


def _quality(figures: Figures) -> Any:
    means = {s: figures.mean(KL, s) for s in figures.names("quality")}
    bars = [Bar(s, kl, s == HEADRACE, f"{kl:.4f}") for s, kl in means.items() if kl]
    if not bars:
        return None
    figure, axes = _grid(1, 1, 0.3 * len(bars) + 0.6)
    _bars(axes[0][0], bars, "KL to float32 (log scale, lower is better)", "nats", labels=True)
    axes[0][0].set_xscale("log")
    return figure


def _step(figures: Figures) -> Any:
    """One stacked bar of shares for each pass."""
    cases = passes(figures)
    if not cases:
        return None
    figure, axes = _grid(1, 1, 0.4 * len(cases) + 1.4)
    axis, colours = axes[0][0], _colours()
    for at, case in enumerate(cases):
        left = 0.0
        spent = {name: max(row.median, 0.0) for name, row in case.operations.items()}
        for number, (name, seconds) in enumerate(spent.items()):
            width = 100 * seconds / sum(spent.values())
            label = name if at == 0 else None
            axis.barh(at, width, left=left, color=colours[number % len(colours)], label=label)
            left += width
    axis.set_yticks(range(len(cases)), [f"{c.name}, {_threads(c.threads)}" for c in cases])
    axis.invert_yaxis()
    axis.set_xlabel("per cent of a pass")
    axis.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.4, -0.25), frameon=False)
    return figure


def _stream(figures: Figures) -> Any:
    """Inside the limit, on a log scale, beside the disk's roofline."""
    found = StreamFigures(figures)
    measures = found.measures()
    if not measures:
        return None
    most = len({r.system for r in found.limited()}) + 1
    figure, axes = _grid(1, len(measures), 0.3 * most + 0.6)
    for axis, measure in zip(axes[0], measures, strict=True):
        rows = [r for r in found.limited() if r.measure == measure and r.median]
        bars = [Bar(r.system, r.median, r.system == HEADRACE, f"{r.median:.3g}") for r in rows]
        roof = found.roofline()
        if measure.startswith(DECODE) and roof:
            bars.append(Bar("disk's roofline", roof, False, f"{roof:.3g}"))
        _bars(axis, bars, measure, "tok/s (log scale)", labels=True)
        axis.set_xscale("log")
    return figure


def _bars(axis: Any, bars: Sequence[Bar], title: str, unit: str, *, labels: bool) -> None:
    drawn = axis.barh(
        range(len(bars)), [b.value for b in bars], color=[OWN if b.own else PEER for b in bars]
    )
    axis.bar_label(drawn, [b.text for b in bars], padding=2, fontsize=8)
    axis.set_yticks(range(len(bars)), [b.label if labels else "" for b in bars])
    axis.invert_yaxis()
    axis.margins(x=0.2)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(unit)


def _grid(lines: int, columns: int, height: float) -> tuple[Any, Any]:
    import matplotlib.pyplot as plt

    width = 3.2 * columns if columns > 1 else 6.0
    return plt.subplots(
        lines, columns, figsize=(width, height * lines), squeeze=False, layout="constrained"
    )


def _colours() -> list[Any]:
    import matplotlib

    return [*matplotlib.color_sequences["tab20"]]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
