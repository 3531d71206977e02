"""How `doctor` looks on a terminal. Takes a report and prints; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.memory.inputs import GB
from headrace.memory.ledger import Candidate, Ledger, Plan, Refusal, at_least

if TYPE_CHECKING:
    from headrace.cli.doctor import Report

_BAR_WIDTH = 32
_ROWS = {
    "base": ("interpreter and tokenizer", "white"),
    "dense": ("dense weights", "blue"),
    "kv": ("context (KV cache)", "cyan"),
    "workspace": ("workspace", "magenta"),
    "retained": ("retained conversations", "cyan"),
    "lookahead": ("lookahead", "yellow"),
    "pool": ("pool of experts", "green"),
    "headroom": ("headroom", "bright_black"),
}


def show(report: Report) -> None:
    """Print a report to standard output."""
    console = Console(highlight=False, soft_wrap=True)
    for label, text in _head(report):
        console.print(Text(f"{label:<11}{text}"))
    if isinstance(report.result, Plan):
        _show_plan(console, report, report.result)
    for line in _windows(() if report.result is None else report.result.candidates):
        console.print(line)
    for item in report.installed:
        console.print(Text(f"{'installed':<11}{item.path}, {_gb(item.nbytes)}"))
    for warning in report.warnings:
        console.print(Text(f"{'warning':<11}{warning}", style="yellow"))


def _gb(nbytes: int) -> str:
    return f"{nbytes / GB:,.2f} GB"


def _head(report: Report) -> Iterator[tuple[str, str]]:
    machine = report.machine
    yield (
        "machine",
        f"{'simulated, ' if machine.simulated else ''}{_gb(machine.physical_bytes)} of memory,"
        f" {_gb(machine.usable_bytes)} usable now, {machine.cores} cores",
    )
    for limit in machine.limits:
        room = _gb(limit.room_bytes)
        yield "limit", f"{_gb(limit.limit_bytes)}, {room} left, by {limit.source}"
    if machine.pressure is not None:
        some, full = machine.pressure.some_avg10, machine.pressure.full_avg10
        yield "pressure", f"some {some:g} %, full {full:g} % of the last ten seconds"
    if report.disk is not None:
        how = "past the page cache" if report.disk.direct else "page cache not passed by"
        yield "disk", f"{_gb(report.disk.bytes_per_s)}/s read, measured {how}"
    if report.memory_bytes_per_s is not None:
        yield (
            "memory",
            f"{_gb(report.memory_bytes_per_s)}/s read, measured on {machine.cores} cores",
        )
    yield "home", f"{report.home}, {_gb(report.free_disk_bytes)} of its disk free"
    yield "model", f"{report.model}, {report.path or 'not ready here'}"
    if isinstance(report.result, Refusal):
        yield "refused", report.result.message


def _show_plan(console: Console, report: Report, plan: Plan) -> None:
    how = ", adapts to what others need" if plan.adaptive else ""
    console.print(Text(f"{'plan':<11}{_gb(plan.target_bytes)} by {plan.source}{how}"))
    console.print(
        Text(f"{'':<11}context {plan.window:,} tokens, prefill in passes of {plan.chunk_rows} rows")
    )
    if plan.num_experts:
        share = 100 * plan.pool_slots / plan.num_experts
        console.print(
            Text(
                f"{'':<11}{plan.pool_slots:,} of {plan.num_experts:,} experts in memory"
                f" ({share:.0f} %), {plan.lookahead_slots} slots for lookahead, {plan.sweep_slots} for sweeps"
            )
        )
    console.print(_ledger(plan.ledger))
    if report.estimate is not None:
        console.print(Text(f"{'expected':<11}{_expected(report)}"))


def _expected(report: Report) -> str:
    made = report.estimate
    assert made is not None
    if made.decode_rate is None:
        return "no speed: it was not measured"
    text = (
        f"about {made.decode_rate:,.1f} tok/s, for each token {_gb(made.touched_bytes)} from memory"
    )
    if made.streamed_bytes:
        text += f", {_gb(made.streamed_bytes)} of them from disk first if experts are used evenly"
    return text


def _ledger(ledger: Ledger) -> Table:
    """The ledger with a bar for each row: where in the budget it lies."""
    full, empty = "█", "·"
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    total, before = max(1, ledger.total), 0
    for name, nbytes in ledger.rows().items():
        label, colour = _ROWS[name]
        begin, end = (_BAR_WIDTH * at // total for at in (before, before + nbytes))
        end = max(end, begin + 1) if nbytes else end
        begin = min(begin, _BAR_WIDTH - 1)
        bar = Text(empty * begin, style="bright_black")
        bar.append(full * (min(end, _BAR_WIDTH) - begin), style=colour)
        bar.append(empty * (_BAR_WIDTH - min(end, _BAR_WIDTH)), style="bright_black")
        before += nbytes
        if nbytes or name == "headroom":
            table.add_row(Text(f"{'':<11}{label}"), f"{nbytes / GB:,.3f} GB", bar)
    table.add_row(Text(f"{'':<11}total"), f"{ledger.total / GB:,.3f} GB", "")
    return table


def _windows(candidates: tuple[Candidate, ...]) -> Iterator[Text]:
    for item in candidates:
        label = "window" if item.taken else ""
        needed = f"from {at_least(item.needed_bytes):>6} GB"
        style = "bold" if item.taken else ""
        yield Text(f"{label:<11}{item.window:>9,}  {needed}  {item.reason}", style=style)
