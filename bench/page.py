"""Makes docs/benchmarks.md: the text of `page.md.in` with tables from figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench import adapters
from bench.constrain import COMPILE, MASK
from bench.constrain import SHARE as SHARE_OF_DECODE
from bench.drafts_page import speculate
from bench.figures import Figures, decode_name, passes
from bench.quality import KL, TOP1
from bench.rows import Row
from bench.serve_page import serve
from bench.step_profile import SHARE
from bench.stream_figures import StreamFigures
from bench.stream_page import ablations, policies, stream
from bench.systems import HEADRACE
from bench.tables import NOTHING, provenance, table, threads_name

TEMPLATE = Path(__file__).with_name("page.md.in")


def page(figures: Figures) -> str:
    """The whole page: the template with every `{{section}}` filled in."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, section in SECTIONS.items():
        text = text.replace(
            f"{{{{{name}}}}}\n\n", "".join(f"{part}\n\n" for part in section(figures))
        )
    return text


def _targets(figures: Figures) -> Iterator[str]:
    found = [*figures.targets(), *StreamFigures(figures).targets()]
    if not found:
        return
    threads = figures.threads() or [1, 2]
    body = []
    for t in found:
        cells = [t.measured.get(n, t.measured.get(0, "-")) for n in threads]
        body.append([t.name, t.wanted, *cells, "yes" if t.met else "**no**"])
    yield "## Targets"
    yield "Where there are several builds of llama.cpp, the fastest (or, for quality, the best) counts."
    yield table(["target", "wanted", *map(threads_name, threads), "met"], body)
    if any(not t.met for t in found):
        yield "Why a target is missed: [the profile of a pass](#inside-a-pass)."


def _speed(figures: Figures) -> Iterator[str]:
    rows = figures.rows("speed")
    if not rows:
        yield NOTHING
        return
    measures = figures.names("speed", "measure")
    for threads in figures.threads():
        body = [
            [name, *(_speed_cell(figures, m, name, threads) for m in measures)]
            for name in figures.names("speed")
        ]
        yield table([threads_name(threads), *measures], body)
    yield "![tokens a second of every engine](img/speed.svg)"
    yield from provenance(rows)


def _speed_cell(figures: Figures, measure: str, system: str, threads: int) -> str:
    rate = figures.median("speed", measure, system, threads=threads)
    if rate is None:
        return "-"
    ratio = figures.ratio(measure, system, threads)
    return f"{rate:,.1f}" + (f" ({ratio:.2f}x)" if ratio and system != HEADRACE else "")


def _bandwidth(figures: Figures) -> Iterator[str]:
    rows = figures.rows("bandwidth")
    if not rows:
        yield NOTHING
        return
    threads = figures.threads()
    body = []
    for name in figures.names("bandwidth", "measure"):
        found = {r.threads: r for r in rows if r.measure == name}
        size = next(iter(found.values())).settings["buffer_bytes"] / 1e6
        body.append([f"{name}, {size:,.0f} MB", *(f"{found[n].median:.1f} GB/s" for n in threads)])
    for context in (16, 1000):
        size = (figures.bytes_per_token(context) or 0) / 1e6
        cells = [_reach(figures, context, n) for n in threads]
        body.append([f"headrace, {decode_name(context)}: {size:,.1f} MB a token", *cells])
    yield table(["", *map(threads_name, threads)], body)
    yield "![read bandwidth and what decode reaches](img/bandwidth.svg)"


def _reach(figures: Figures, context: int, threads: int) -> str:
    rate, limit = figures.read_rate(context, threads), figures.bandwidth(threads)
    return f"{rate:.1f} GB/s ({rate / limit:.0%})" if rate and limit else "-"


def _load(figures: Figures) -> Iterator[str]:
    rows = figures.rows("load")
    if not rows:
        yield NOTHING
        return
    body = []
    for row in rows:
        threads = f", {threads_name(row.threads)}" if row.threads else ""
        peak = f"{row.settings['peak_bytes'] / 1e6:,.0f} MB"
        body.append([f"{row.system}: {row.measure}{threads}", f"{row.median:.2f} s", peak])
    yield table(["", "seconds", "peak memory"], body)
    yield "![seconds to the first token](img/load.svg)"
    yield from provenance(rows)


def _quality(figures: Figures) -> Iterator[str]:
    rows = figures.rows("quality")
    if not rows:
        yield NOTHING
        return
    body = [
        [
            name,
            f"{figures.perplexity(name) or 0:.3f}",
            f"{figures.mean(KL, name) or 0:.5f}",
            f"{figures.mean(TOP1, name) or 0:.3f}",
        ]
        for name in figures.names("quality")
    ]
    yield table(["", "perplexity", KL, TOP1], body)
    yield "![KL to float32](img/quality.svg)"
    yield f"Hash of the windows' tokens: `{rows[0].settings['windows']}`."
    yield from provenance(rows)


def _step(figures: Figures) -> Iterator[str]:
    rows = figures.rows("profile")
    if not rows:
        yield NOTHING
        return
    shares = [(r.threads, r.settings["context"]) for r in rows if r.measure == SHARE]
    body = (_share_cells(figures, *c) for c in dict.fromkeys(shares))
    yield table(["Python's share", "greedy", "sampled"], body)
    for one in passes(figures):
        head = [f"{one.name}, {threads_name(one.threads)}", "milliseconds", "share", "MB", "GB/s"]
        yield table(head, _operation_cells(one.operations))
    yield "![share of each operation](img/step.svg)"
    yield from provenance(rows)


def _share_cells(figures: Figures, threads: int, context: int) -> list[str]:
    where = {"measure": SHARE, "threads": threads, "context": context}
    cells = []
    for sampled in (False, True):
        row = figures.rows("profile", sampled=sampled, **where)[0]
        milliseconds = row.settings["step_seconds"] * 1000
        cells.append(f"{row.median:.1%} (steps of {milliseconds:.2f} ms)")
    return [f"{threads_name(threads)}, context {context:,}", *cells]


def _operation_cells(found: Mapping[str, Row]) -> Iterator[list[str]]:
    spent = {name: max(row.median, 0.0) for name, row in found.items()}
    whole = sum(spent.values())
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        nbytes = found[name].settings["bytes"]
        rate = f"{nbytes / seconds / 1e9:.1f}" if nbytes > 1e6 and seconds else ""
        size = f"{nbytes / 1e6:.1f}" if nbytes > 1e6 else ""
        yield [name, f"{seconds * 1000:.3f}", f"{seconds / whole:.1%}", size, rate]


def _constrain(figures: Figures) -> Iterator[str]:
    rows = figures.rows("constrain")
    if not rows:
        yield NOTHING
        return
    public = [r for r in rows if r.measure in (COMPILE, MASK)]
    if public:
        head = ["seconds", "50 %", "90 %", "99 %", "most", "of"]
        yield table(head, (_percentiles(r) for r in public))
        facts = public[0].settings
        refused = sum(facts["refused"].values())
        causes = "; ".join(f"{cause} ({n})" for cause, n in facts["refused"].items())
        yield (
            f"{facts['set']}: {facts['compiled']} of {facts['schemas']} schemas are compiled, the others refused. "
            f"The most frequent causes ({refused}): {causes}."
        )
    shares = [r for r in rows if r.measure == SHARE_OF_DECODE]
    head = ["", "share", "a token", "forced", "tok/s", "tok/s without"]
    yield table(head, (_shares(r) for r in shares))
    yield from provenance(rows)


def _percentiles(row: Row) -> list[str]:
    counted = row.settings["tokens" if row.measure == MASK else "compiled"]
    return [row.measure, *(f"{row.samples[i]:.6f}" for i in (50, 90, 99, 100)), f"{counted:,}"]


def _shares(row: Row) -> list[str]:
    facts = row.settings
    how = "sampled" if facts["sampled"] else "greedy"
    return [
        f"{how}, {threads_name(row.threads)}",
        f"{row.median:.1%}",
        f"{facts['microseconds']:.0f} µs",
        f"{facts['forced']} of {facts['tokens']}, {facts['spans']} spans",
        f"{facts['rate']:.1f}",
        f"{facts['free_rate']:.1f}",
    ]


def _reuse(figures: Figures) -> Iterator[str]:
    rows = figures.rows("reuse")
    if not rows:
        yield NOTHING
        return
    modes = list(dict.fromkeys(r.settings["mode"] for r in rows))
    body = []
    for measure, threads in dict.fromkeys((r.measure, r.threads) for r in rows):
        found = figures.rows("reuse", measure=measure, threads=threads)
        facts = found[0].settings
        what = f"{facts['requests']} requests, {facts['prompt_tokens']:,} tokens"
        cells = {r.settings["mode"]: r for r in found}
        body.append(
            [
                f"{measure}, {threads_name(threads)}: {what}",
                *(f"{cells[m].settings['read_tokens']:,} ({cells[m].median:.3f} s)" for m in modes),
                *(f"{cells[m].median / cells['exact'].median:.1f}x" for m in modes if m != "exact"),
            ]
        )
    times = [f"{mode} / exact" for mode in modes if mode != "exact"]
    yield table(["tokens read (to first token)", *modes, *times], body)
    yield from provenance(rows)


def _batch(figures: Figures) -> Iterator[str]:
    rows = figures.rows("batch")
    if not rows:
        yield NOTHING
        return
    for threads in sorted({r.threads for r in rows}):
        for measure in dict.fromkeys(r.measure for r in rows):
            found = [r for r in rows if (r.threads, r.measure) == (threads, measure)]
            sizes = sorted({r.settings["sequences"] for r in found})
            body = []
            for name in dict.fromkeys(r.system for r in found):
                rates = {r.settings["sequences"]: r.median for r in found if r.system == name}
                body.append([name, *(_batch_cell(rates, size) for size in sizes)])
            yield table([f"{measure}, {threads_name(threads)}", *map(str, sizes)], body)
    yield from provenance(rows)


def _batch_cell(rates: Mapping[int, float], size: int) -> str:
    if size not in rates:
        return "-"
    gain = f" ({rates[size] / rates[1]:.2f}x)" if size > 1 and 1 in rates else ""
    return f"{rates[size]:,.1f}{gain}"


SECTIONS: dict[str, Callable[[Figures], Iterator[str]]] = {
    "targets": _targets,
    "speed": _speed,
    "bandwidth": _bandwidth,
    "load": _load,
    "quality": _quality,
    "step": _step,
    "stream": stream,
    "ablations": ablations,
    "policies": policies,
    "constrain": _constrain,
    "speculate": speculate,
    "adapters": adapters.section,
    "reuse": _reuse,
    "batch": _batch,
    "serve": serve,
}
