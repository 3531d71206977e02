"""headrace with one part changed, on the model of `bench.stream`: lookahead, lanes, and the size of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench import machine, stream
from bench.rows import Row, Run, append
from bench.settings import Settings, command
from bench.stream import PROMPT, Sample, Workload, decode_name

LANES = (1, 2, 4, 8)
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
AS_PLANNED = "as planned"
POOL = "pool"  # begins the names of pool sizes
NO_LIMIT = 1 << 40


def variants(limit: int, num_experts: int) -> dict[str, dict[str, Any]]:
    """Configurations by name. Pools are of chosen sizes beside whatever memory the rest takes; the others share the
    limit's plan."""
    budget = {"memory_gb": limit / 1e9}
    return {
        AS_PLANNED: budget,
        "no lookahead": {**budget, "lookahead": False},
        **{f"{n} lanes" if n > 1 else "1 lane": {**budget, "lanes": n} for n in LANES},
        **{
            f"{POOL} of {share:.0%}": {"experts_per_layer": round(share * num_experts)}
            for share in SHARES
        },
    }


def measure(settings: Settings) -> list[Row]:
    """Record rows of kind "ablation": every variant in turns."""
    if not stream.possible():
        return []
    run = machine.new_run(command("ablations", settings))
    rows = list(_rows(settings, run))
    append(settings.results / "ablations.jsonl", rows)
    return rows


def _rows(settings: Settings, run: Run) -> Iterator[Row]:
    limit = stream.limit_bytes(settings)
    workload = Workload(decode_name(settings.ablation_steps), PROMPT, settings.ablation_steps)
    samples: dict[str, list[Sample]] = {}
    chosen = variants(limit, stream.experts_per_layer(settings))
    for _ in range(settings.stream_rounds):
        for name, config in chosen.items():
            system = stream.headrace(settings, **config)
            bound = limit if "memory_gb" in config else NO_LIMIT
            one = stream.sample(system, workload, settings, bound)
            samples.setdefault(name, []).append(one)
            print(f"{name}: {one.error or one.rate(workload)}", flush=True)
    for name, found in samples.items():
        yield stream.row("ablation", name, workload, found, run, settings, {"limit_bytes": limit})
