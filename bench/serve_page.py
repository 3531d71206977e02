"""The page's tables of servers under load."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Figures
from bench.serving import COST, FIRST, REQUESTS, TOKENS
from bench.systems import HEADRACE
from bench.tables import NOTHING, provenance, table, threads_name


def serve(figures: Figures) -> Iterator[str]:
    """What servers answer by the number of clients, and what a token costs beside the engine's own time."""
    rows = figures.rows("serve")
    if not rows:
        yield NOTHING
        return
    for threads in sorted({r.threads for r in rows}):
        for measure in (REQUESTS, TOKENS, FIRST):
            found = [r for r in rows if (r.threads, r.measure) == (threads, measure)]
            clients = sorted({r.settings["clients"] for r in found})
            body = []
            for name in dict.fromkeys(r.system for r in found):
                values = {r.settings["clients"]: r.median for r in found if r.system == name}
                cells = (f"{values[n]:,.1f}" if n in values else "-" for n in clients)
                body.append([name, *cells])
            unit = found[0].unit
            head = f"{measure}, {unit}, {threads_name(threads)}"
            yield table([head, *(f"{n} clients" if n > 1 else "1 client" for n in clients)], body)
        for row in figures.rows("serve", measure=COST, system=HEADRACE, threads=threads):
            yield (
                f"The server's own cost, {threads_name(threads)}: {row.median:.2f} ms a token at "
                f"{row.settings['clients']} streams (wanted: below 1)."
            )
    yield from provenance(rows)
