"""The page's sections on the model that is bigger than memory, made of figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.ablations import AS_PLANNED, POOL
from bench.figures import Figures
from bench.rows import Row
from bench.stream import DISK, RAW
from bench.stream_figures import RESIDENT, StreamFigures, flow
from bench.systems import HEADRACE
from bench.tables import NOTHING, provenance, table

FLOW_HEAD = ("in memory", "forecast right", "MB read a token", "in vain", "threads waited")


def stream(figures: Figures) -> Iterator[str]:
    """Engines inside the limit, headrace's reads against the disk, and all with the whole model in memory."""
    found = StreamFigures(figures)
    rows = found.limited()
    if not rows:
        yield NOTHING
        return
    about = rows[0].settings
    size, limit = about["model_bytes"] / 1e9, about["limit_bytes"] / 1e9
    yield (
        f"The model has {size:.2f} GB, the limit is {limit:.2f} GB. Peak: of the group, as the kernel counts it, with "
        "mapped weights; in brackets the process's own resident peak."
    )
    yield table(
        ["", *found.measures(), "peak memory", "MB read a token"],
        [_line(found, name) for name in dict.fromkeys(r.system for r in rows)],
    )
    yield "![tokens a second inside the limit](img/stream.svg)"
    if failures := list(_failures(rows)):
        yield "\n".join(failures)
    yield from _disk(figures, found)
    yield from _resident(figures)
    yield from provenance(figures.rows("stream"))


def _line(found: StreamFigures, system: str) -> list[str]:
    rows = [found.row(m, system) for m in found.measures()]
    ran = [r for r in rows if r is not None and r.median]
    peak = max((r.settings["peak_bytes"] for r in ran), default=0) / 1e6
    resident = max((r.settings["resident_peak_bytes"] for r in ran), default=0) / 1e6
    last = ran[-1] if ran else None
    return [
        system,
        *(_cell(found, m, system) for m in found.measures()),
        f"{peak:,.0f} MB ({resident:,.0f})" if ran else "-",
        _read_per_token(last) if last else "-",
    ]


def _cell(found: StreamFigures, measure: str, system: str) -> str:
    row = found.row(measure, system)
    if row is None or not row.median:
        return "-"
    ratio, made = found.ratio(measure, system), _tokens_made(row)
    notes = [f"{ratio:.1f}x"] if ratio and system != HEADRACE else []
    if made < row.settings.get("asked_tokens", made):
        notes.append(f"{made:,.0f} tokens")
    return f"{row.median:.3g}" + (f" ({'; '.join(notes)})" if notes else "")


def _tokens_made(row: Row) -> float:
    """In one sample, of those that ran."""
    ran = sum(1 for sample in row.samples if sample)
    return float(row.settings.get("tokens", 0) / ran)


def _read_per_token(row: Row) -> str:
    """What the kernel says that the process had read."""
    return f"{row.settings['counters']['storage_bytes'] / row.settings['tokens'] / 1e6:,.0f}"


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.settings["error"]:
            killed = ", killed by the kernel for memory" if row.settings["killed"] else ""
            yield f"- {row.system}, {row.measure}{killed}: `{row.settings['error']}`"


def _disk(figures: Figures, found: StreamFigures) -> Iterator[str]:
    """What the disk gives, what decode must read at least, and what came of it."""
    raw = figures.rows("stream", measure=RAW, system=DISK)
    yield table(
        ["raw O_DIRECT reads of whole experts", *(_lanes(r.threads) for r in raw)],
        [["MB/s", *(f"{r.median:,.0f}" for r in raw)]],
    )
    roof, missing = found.roofline(), found.missing_bytes()
    if not roof or not missing:
        return
    yield (
        f"The pool has no room for {missing / 1e6:,.0f} MB of the experts of a token; at the best of these rates that "
        f"allows {roof:.2f} tok/s, the disk's roofline."
    )
    rows = [r for r in found.limited() if r.system == HEADRACE]
    body = [[r.measure, *flow_cells(r), _share(r, found.raw()), _of_roof(r, roof)] for r in rows]
    yield table([HEADRACE, *FLOW_HEAD, "of the raw rate", "of the roofline"], body)


def flow_cells(row: Row) -> list[str]:
    f = flow(row)
    if f is None:
        return ["-"] * len(FLOW_HEAD)
    agreement = "-" if f.agreement is None else f"{f.agreement:.1%}"
    size, wasted = f"{f.bytes_read / 1e6:,.1f}", f"{f.bytes_wasted / 1e6:,.1f}"
    return [f"{f.resident:.1%}", agreement, size, wasted, f"{f.waited:.0%}"]


def _share(row: Row, raw: float | None) -> str:
    rate = row.settings["counters"]["bytes_read"] / row.settings["seconds"] / 1e6
    return f"{rate / raw:.0%}" if raw else "-"


def _of_roof(row: Row, roof: float) -> str:
    return f"{row.median / roof:.0%}" if row.measure.startswith("decode") else "-"


def _resident(figures: Figures) -> Iterator[str]:
    rows = [r for r in figures.rows("stream") if r.measure.startswith(RESIDENT)]
    if not rows:
        return
    measures = list(dict.fromkeys(r.measure for r in rows))
    found = StreamFigures(figures)
    systems = dict.fromkeys(r.system for r in rows)
    body = [[name, *(_cell(found, m, name) for m in measures)] for name in systems]
    names = [m.removeprefix(RESIDENT) for m in measures]
    yield table(["the whole model in memory", *names], body)


def ablations(figures: Figures) -> Iterator[str]:
    """headrace with one part changed, beside the plan's choice."""
    rows = figures.rows("ablation")
    if not rows:
        yield NOTHING
        return
    base = next((r.median for r in rows if r.system == AS_PLANNED), 0.0)
    body = []
    for row in rows:
        beside = f" ({row.median / base:.2f}x)" if base and not row.system.startswith(POOL) else ""
        body.append([row.system, f"{row.median:.2f}{beside}", *flow_cells(row)])
    yield table([rows[0].measure, "tok/s", *FLOW_HEAD], body)
    yield from provenance(rows[:1])


def policies(figures: Figures) -> Iterator[str]:
    """Hit rate of every eviction policy by the size of the pool."""
    rows = figures.rows("routes")
    if not rows:
        yield NOTHING
        return
    sizes = list(dict.fromkeys(r.settings["slots"] for r in rows))
    names = list(dict.fromkeys(r.system for r in rows))
    rates = {(r.settings["slots"], r.system): r.median for r in rows}
    experts = rows[0].settings["experts"]
    body = [[f"{n / experts:.0%}", *(f"{rates[n, name]:.1%}" for name in names)] for n in sizes]
    yield table(["pool, of all experts", *names], body)
    yield from provenance(rows)


def _lanes(count: int) -> str:
    return "1 lane" if count == 1 else f"{count} lanes"
