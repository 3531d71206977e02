"""Pieces of the page that its sections share: tables, and where and when rows were measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.rows import Row, Run

NOTHING = "Nothing is recorded yet."


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def provenance(rows: Sequence[Row]) -> Iterator[str]:
    """Where, when and with what these rows were measured: a line for each run."""
    runs = {row.run.date: row.run for row in rows}
    for date, run in sorted(runs.items(), reverse=True):
        yield _of_a_run(run, [row for row in rows if row.run.date == date])
    if facts := [f"- {line}" for line in dict.fromkeys(_system_facts(r) for r in rows) if line]:
        yield "\n".join(facts)


def _of_a_run(run: Run, rows: Sequence[Row]) -> str:
    machine, counts = run.machine, sorted({len(r.samples) for r in rows})
    threads = sorted({row.threads for row in rows} - {0})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    on = f" ({' and '.join(map(threads_name, threads))})" if threads else ""
    return (
        f"`{run.command}`{on}; {run.date}, headrace {run.commit}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['l3_bytes'] / 2**20:.0f} MiB last-level cache; "
        f"{machine['system']}, Python {machine['python']}; {samples} samples each; "
        f"load average before the run {machine['load_average']}. Instruction sets: {', '.join(machine['flags'])}."
    )


def threads_name(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _system_facts(row: Row) -> str:
    if not row.versions:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
    wanted = ("kernels", "kv", "dtype", "attention", "weight_buffers", "build")
    known = [f"{k} {_plain(row.settings[k])}" for k in wanted if k in row.settings]
    return f"{row.system}: {'; '.join([versions, *known])}"


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
