"""Tables and plots of docs/benchmarks.md from the recorded rows: the newest of each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "img"
BEGIN, END = "<!-- rows -->", "<!-- end of rows -->"

Row = dict[str, Any]


def rows(kind: str, *key: str) -> list[Row]:
    """The newest row of each key, in the order in which the keys were first recorded."""
    path = ROOT / "bench" / "results" / f"{kind}.jsonl"
    newest: dict[tuple[Any, ...], Row] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            newest[tuple(row[k] for k in key)] = row
    return list(newest.values())


def table(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_tables() -> str:
    """One table a thread count: tok/s and headrace's ratio to each peer."""
    found = rows("speed", "engine", "threads", "workload")
    parts = []
    for threads in sorted({r["threads"] for r in found}):
        here = {(r["engine"], r["workload"]): r["median"] for r in found if r["threads"] == threads}
        workloads = list(dict.fromkeys(w for _, w in here))
        body = []
        for engine in dict.fromkeys(e for e, _ in here):
            cells = [engine]
            for work in workloads:
                value, own = here.get((engine, work)), here.get(("headrace", work))
                ratio = f" ({own / value:.2f}x)" if own and value and engine != "headrace" else ""
                cells.append(f"{value:.1f}{ratio}" if value else "-")
            body.append(cells)
        parts.append(
            f"**{threads} thread{'s' if threads > 1 else ''}**, tok/s (headrace's ratio)\n\n"
            + table(["engine", *workloads], body)
        )
    return "\n\n".join(parts)


def quality_table() -> str:
    body = [
        [r["engine"], f"{r['perplexity']:.3f}", f"{r['kl']:.5f}", f"{r['top1']:.3f}"]
        for r in rows("quality", "engine")
    ]
    return table(["engine", "perplexity", "KL to float32", "top-1 equal"], body)


def other_table() -> str:
    found = rows("load", "workload") + rows("bandwidth", "workload", "threads")
    body = []
    for r in found:
        extra = f", peak {r['peak_bytes'] / 1e6:.0f} MB" if "peak_bytes" in r else ""
        extra += f", step {r['step_ms']:.2f} ms" if "step_ms" in r else ""
        value = (
            f"{100 * r['median']:.1f} %"
            if r["unit"] == "share"
            else f"{r['median']:.3g} {r['unit']}"
        )
        body.append([r["workload"], value + extra])
    return table(["what", "median"], body)


def roofline() -> str:
    """Which share of the read bandwidth decode reaches."""
    reading = {r["workload"]: r["median"] for r in rows("bandwidth", "workload", "threads")}
    lines = []
    for r in rows("speed", "engine", "threads", "workload"):
        size = r.get("facts", {}).get("weight_bytes")
        if size and r["workload"] == "decode at 16" and r["engine"] == "headrace":
            rate = size * r["median"] / 1e9
            shares = ", ".join(
                f"{100 * rate / v:.0f} % of {v:.1f} GB/s ({k})" for k, v in reading.items()
            )
            lines.append(
                f"- {r['threads']} thread(s): {size / 1e6:.1f} MB of weights a token, {rate:.2f} GB/s: {shares}"
            )
    return "\n".join(lines)


def plot_speed() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    found = [
        r
        for r in rows("speed", "engine", "threads", "workload")
        if not r["engine"].startswith("headrace,")
    ]
    workloads = list(dict.fromkeys(r["workload"] for r in found))
    if not workloads:
        return
    figure, axes = plt.subplots(1, len(workloads), figsize=(4 * len(workloads), 3.2))
    for axis, work in zip(axes, workloads, strict=True):
        for offset, threads in enumerate(sorted({r["threads"] for r in found})):
            here = [r for r in found if r["workload"] == work and r["threads"] == threads]
            at = [i + 0.4 * offset for i in range(len(here))]
            axis.barh(
                at,
                [r["median"] for r in here],
                height=0.38,
                label=f"{threads} threads" if threads > 1 else "1 thread",
            )
            axis.set_yticks(
                range(len(here)),
                [r["engine"] for r in here] if axis is axes[0] else [""] * len(here),
            )
        axis.set_title(work)
        axis.set_xlabel("tok/s")
        axis.invert_yaxis()
    axes[-1].legend()
    figure.tight_layout()
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.savefig(IMAGES / "speed.svg", metadata={"Date": None})


def plot_quality() -> None:
    import matplotlib.pyplot as plt

    found = [r for r in rows("quality", "engine") if r["kl"] > 0]
    if not found:
        return
    figure, axis = plt.subplots(figsize=(6, 2.6))
    axis.barh([r["engine"] for r in found], [r["kl"] for r in found])
    axis.set_xscale("log")
    axis.set_xlabel("KL to float32 (lower is better)")
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(IMAGES / "quality.svg", metadata={"Date": None})


def write() -> None:
    """Replace the generated part of docs/benchmarks.md and draw the plots."""
    plot_speed()
    plot_quality()
    latest = rows("speed", "engine", "threads", "workload")
    where = latest[-1] if latest else {"machine": {}, "date": "", "commit": ""}
    machine = where["machine"]
    about = f"{machine.get('cpu', '?')}, {machine.get('cores', '?')} cores, {', '.join(machine.get('flags', []))}; {where['date']}, commit {where['commit']}."
    parts = [
        BEGIN, about, "## Speed", speed_tables(), "![speed](img/speed.svg)", "### Read bandwidth", roofline(),
        "## Quality", quality_table(), "![quality](img/quality.svg)", "## Load, conversion, Python's share", other_table(), END,
    ]  # fmt: skip
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(before + "\n\n".join(parts) + after)
