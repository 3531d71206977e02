"""The page's tables of drafts: what they are worth with every drafter."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Figures
from bench.rows import Row
from bench.tables import NOTHING, provenance, table, threads_name


def speculate(figures: Figures) -> Iterator[str]:
    """Look-up on the small model, and every drafter on the model that has a head."""
    for kind in ("speculate", "drafters"):
        if rows := figures.rows(kind):
            yield from _table(figures, rows)
        elif kind == "speculate":
            yield NOTHING


def _table(figures: Figures, rows: list[Row]) -> Iterator[str]:
    kind = rows[0].kind
    modes = list(dict.fromkeys(r.settings["speculate"] for r in rows))
    cases = dict.fromkeys((r.measure, r.settings["sampled"], r.threads) for r in rows)
    body = []
    for measure, sampled, threads in cases:
        found = figures.rows(kind, measure=measure, sampled=sampled, threads=threads)
        plain = next(r.median for r in found if r.settings["speculate"] == "off")
        how = f"{measure}, {'sampled' if sampled else 'greedy'}, {threads_name(threads)}"
        for draft in dict.fromkeys(_draft(r) for r in found):
            cells = {r.settings["speculate"]: _cell(r, plain) for r in found if _draft(r) == draft}
            cells = {"off": f"{plain:.1f}", **cells}
            name = [how, draft] if kind == "drafters" else [how]
            body.append([*name, *(cells.get(mode, "-") for mode in modes)])
    yield table(["tok/s", *(["drafts"] if kind == "drafters" else []), *map(str, modes)], body)
    yield from provenance(rows)


def _draft(row: Row) -> str:
    return str(row.settings.get("draft", "lookup"))


def _cell(row: Row, plain: float) -> str:
    facts = row.settings
    if facts["speculate"] == "off":
        return f"{row.median:.1f}"
    share = f"; {facts['accepted']} of {facts['drafted']}" if facts["drafted"] else ""
    return f"{row.median:.1f} ({row.median / plain:.2f}x{share})"
