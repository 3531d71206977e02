"""`python -m bench report`: docs/benchmarks.md and its plots from the recorded rows."""

from __future__ import annotations

from pathlib import Path

from bench import page, plots
from bench.figures import Figures
from bench.machine import ROOT

DOCS = ROOT / "docs"


def write(results: Path, docs: Path = DOCS) -> Path:
    """Replace the page and the plots. Raises RowError where a recorded row is not one."""
    figures = Figures.of(results)
    plots.draw(figures, docs / "img")
    path = docs / "benchmarks.md"
    path.write_text(page.page(figures), encoding="utf-8")
    return path
