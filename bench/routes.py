"""Eviction policies over recorded routes: hit rate against pool size, beside the offline optimum.

`python -m bench.routes FILE ...` with files of `headrace run --trace-routes FILE`, taken one after another. A step is
one position in one layer: its experts are all in the pool while it runs, so the pool is never smaller than a step.
Every policy starts empty. "LFU, decayed" is that .
"""

from __future__ import annotations

import argparse
import heapq
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.machine import ROOT, new_run
from bench.rows import Row, append
from headrace.errors import FileError, InputError
from headrace.experts.trace import read_routes

Steps = Sequence[Sequence[int]]  # experts of all layers by one number, distinct within a step
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def steps_of(path: Path) -> tuple[list[list[int]], int]:
    """The steps of a recording, and how many experts its model has."""
    header, routes = read_routes(path)
    keys = routes["layer"].astype(np.int64)[:, None] * header.num_experts + routes["experts"]
    return keys.tolist(), header.num_layers * header.num_experts


def lru(steps: Steps, slots: int) -> int:
    """Hits when the expert that was used longest ago goes."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for step in steps:
        hits += sum(key in held for key in step)
        for key in step:
            held[key] = None
            held.move_to_end(key)
        while len(held) > slots:
            held.popitem(last=False)
    return hits


def lfu(steps: Steps, slots: int, half_life: float = math.inf) -> int:
    """Hits when the expert with the fewest uses so far goes, the one used longest ago of those.

    half_life: steps after which a use counts half. Scores are logarithms of base 2 that grow with time instead.
    """
    score: dict[int, float] = {}
    last: dict[int, int] = {}
    held: set[int] = set()
    heap: list[tuple[float, int, int]] = []
    hits = 0
    for now, step in enumerate(steps):
        hits += sum(key in held for key in step)
        missing = [key for key in step if key not in held]
        for key in step:
            score[key] = float(np.logaddexp2(score.get(key, -math.inf), now / half_life))
            last[key] = now
        while len(held) + len(missing) > slots:
            least, when, key = heapq.heappop(heap)
            if key in held and (least, when) == (score[key], last[key]):  # an old entry otherwise
                held.remove(key)
        held.update(missing)
        for key in step:  # after evictions: the experts of the step stay
            heapq.heappush(heap, (score[key], now, key))
    return hits


def lfu_decayed(steps: Steps, slots: int) -> int:
    """Hits of LFU over the last few thousand steps: the policy that `experts.slots.SlotPool` follows."""
    return lfu(steps, slots, half_life=2000)


def clock(steps: Steps, slots: int, most: int = 1) -> int:
    """Hits of CLOCK: a hand goes round and takes the first expert with no credit, taking one from each it passes.

    A use gives one credit, `most` at most.
    """
    place: dict[int, int] = {}
    held = [-1] * slots
    credit = [0] * slots
    hand = hits = 0
    for step in steps:
        pinned = {place[key] for key in step if key in place}
        hits += len(pinned)
        for key in step:
            if key in place:
                continue
            if len(place) < slots:
                slot = len(place)
            else:
                while hand in pinned or credit[hand]:
                    if hand not in pinned:
                        credit[hand] -= 1
                    hand = (hand + 1) % slots
                slot = hand
                hand = (hand + 1) % slots
                del place[held[slot]]
            place[key], held[slot], credit[slot] = slot, key, 0
            pinned.add(slot)
        for slot in pinned:
            credit[slot] = min(credit[slot] + 1, most)
    return hits


def clock_frequency(steps: Steps, slots: int) -> int:
    """Hits of CLOCK with up to three credits."""
    return clock(steps, slots, most=3)


def belady(steps: Steps, slots: int) -> int:
    """Hits of the offline optimum: the expert whose next use is farthest away goes."""
    following: list[list[int]] = []
    seen: dict[int, int] = {}
    for now in range(len(steps) - 1, -1, -1):
        following.append([seen.get(key, len(steps)) for key in steps[now]])
        seen.update(dict.fromkeys(steps[now], now))
    following.reverse()
    until: dict[int, int] = {}  # of the experts that are held: when they are used next
    heap: list[tuple[int, int]] = []
    hits = 0
    for step, after in zip(steps, following, strict=True):
        hits += sum(key in until for key in step)
        missing = [key for key in step if key not in until]
        for key in step:
            until.pop(key, None)  # not to be taken now
        while len(until) + len(step) > slots:
            when, key = heapq.heappop(heap)
            if until.get(key) == -when:
                del until[key]
        assert len(missing) <= slots
        for key, when in zip(step, after, strict=True):
            until[key] = when
            heapq.heappush(heap, (-when, key))
    return hits


POLICIES: dict[str, Callable[[Steps, int], int]] = {
    "LRU": lru,
    "LFU": lfu,
    "LFU, decayed": lfu_decayed,
    "CLOCK": clock,
    "CLOCK, 3 credits": clock_frequency,
    "Belady": belady,
}


def rates(steps: Steps, slots: int) -> dict[str, float]:
    """Hit rate by policy. Raises ValueError for a pool smaller than a step."""
    total = sum(len(step) for step in steps)
    if slots < max((len(step) for step in steps), default=0):
        raise ValueError(f"{slots} slots are fewer than a step needs")
    return {name: policy(steps, slots) / max(total, 1) for name, policy in POLICIES.items()}


def main() -> int:
    try:
        return _main()
    except InputError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routes", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="of one model")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of all experts")
    parser.add_argument("--last", type=int, help="only this many of the last steps")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--record", action="store_true", help="add the rows to the results")
    given = parser.parse_args()
    if not all(0 < share <= 1 for share in given.shares):
        parser.error("a share is more than 0, and 1 at most")
    recorded = [steps_of(path) for path in given.files]
    for path, (_, num_experts) in zip(given.files, recorded, strict=True):
        if num_experts != recorded[0][1]:
            raise FileError(path, "header", f"is of another model than {given.files[0]}")
    steps, num_experts = [step for found, _ in recorded for step in found], recorded[0][1]
    steps = steps[-given.last :] if given.last else steps
    smallest = max((len(step) for step in steps), default=1)
    run = new_run("python -m bench.routes FILE" + " ..." * (len(recorded) > 1))
    print(f"{'slots':>6} {'share':>6}  " + "  ".join(f"{name:>16}" for name in POLICIES))
    rows = []
    for share in given.shares:
        slots = max(round(share * num_experts), smallest)
        row = rates(steps, slots)
        print(f"{slots:6} {share:6.0%}  " + "  ".join(f"{rate:16.4f}" for rate in row.values()))
        settings = {"slots": slots, "experts": num_experts, "steps": len(steps)}
        rows += [
            Row("routes", "hit rate", name, 0, "share", (rate,), run, settings)
            for name, rate in row.items()
        ]
    if given.record:
        append(given.results / "routes.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
