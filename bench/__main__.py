"""`python -m bench [PART ...]`: measure, record, report."""

from __future__ import annotations

import os
import sys

from bench import (
    ablations,
    adapters,
    batch,
    constrain,
    load,
    quality,
    report,
    reuse,
    serving,
    speculate,
    speed,
    step_profile,
    stream,
)
from bench.cgroup import GroupError
from bench.process import WorkerError
from bench.rows import RowError
from bench.settings import Settings, parse

IDLE = 0.5  # load average above which a warning is printed
MEASURES = {
    "speed": speed.measure,
    "quality": quality.measure,
    "load": load.measure,
    "profile": step_profile.measure,
    "stream": stream.measure,
    "ablations": ablations.measure,
    "constrain": constrain.measure,
    "speculate": speculate.measure,
    "adapters": adapters.measure,
    "reuse": reuse.measure,
    "batch": batch.measure,
    "serve": serving.measure,
}


def main() -> int:
    parts, settings = parse()
    settings.work.mkdir(parents=True, exist_ok=True)
    try:
        _run(parts, settings)
    except (WorkerError, RowError, GroupError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def _run(parts: tuple[str, ...], settings: Settings) -> None:
    if (load_average := os.getloadavg()[0]) > IDLE:
        print(
            f"bench: the load average is {load_average:.1f}; measure on an idle machine",
            file=sys.stderr,
        )
    for name in parts:
        if name == "report":
            print(report.write(settings.results))
            continue
        for row in MEASURES[name](settings):
            print(
                f"{row.system}, {row.measure}, threads {row.threads}: {row.median:.6g} {row.unit}"
            )


if __name__ == "__main__":
    sys.exit(main())
