"""What a generation did, as lines for people and as JSON. Knows no command and prints nothing."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.artifact.unfinished import replacing
from headrace.errors import SettingError
from headrace.values import ExpertStats, GenerationStats


@dataclass(frozen=True)
class RunFacts:
    """What a report says besides the generation: where it ran."""

    identity: str
    kernels: str
    threads: int
    load_seconds: float
    adapter: str | None = None  # the identity of its content


def peak_memory_bytes() -> int:
    """The largest resident memory of this process so far."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = next((line for line in lines if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(found.split()[1]) * 1024


def lines(stats: GenerationStats, facts: RunFacts) -> Iterator[str]:
    """The report for people; the last line is the fingerprint."""
    seed = "" if stats.seed is None else f" seed {stats.seed},"
    reused = f" after {stats.reused_tokens:,} reused" if stats.reused_tokens else ""
    unread = f" and before {stats.unread_tokens:,} unread" if stats.unread_tokens else ""
    first = f", {stats.decode_tokens:,} after the first" if stats.decode_tokens else ""
    seconds = f" in {stats.decode_seconds:.2f} s ({stats.decode_rate:,.1f} tok/s)" if first else ""
    yield (
        f"read {_count(stats.read_tokens, 'token')} in {stats.prefill_seconds:.2f} s"
        f" ({stats.prefill_rate:,.1f} tok/s){reused}{unread},"
        f" wrote {_count(stats.new_tokens, 'token')}{first}{seconds}"
    )
    yield (
        f"loaded in {facts.load_seconds:.2f} s, peak memory {peak_memory_bytes() / 1e6:,.0f} MB,"
        f" {facts.kernels} kernels, {_count(facts.threads, 'thread')},{seed}"
        f" ended by {stats.finish_reason}"
    )
    if facts.adapter is not None:
        yield f"adapter {facts.adapter}"
    if stats.experts is not None:
        yield _experts(stats.experts, _threads_seconds(stats, facts))
    if stats.forced_tokens:
        spans = _count(stats.forced_spans, "span")
        yield f"grammar: {_count(stats.forced_tokens, 'token')} forced in {spans}, {stats.constraint_seconds:.2f} s"
    if stats.drafted_tokens:
        share = stats.accepted_tokens / stats.drafted_tokens
        yield f"drafts: {stats.accepted_tokens:,} of {_count(stats.drafted_tokens, 'token')} accepted ({share:.0%})"
    clipped = [f"{site} {count:,}" for site, count in stats.saturations.items() if count]
    if clipped:
        yield f"saturated values: {', '.join(clipped)}"
    yield f"fingerprint {stats.fingerprint}"


def _threads_seconds(stats: GenerationStats, facts: RunFacts) -> float:
    """The time of a generation, of all its threads together: what they could have waited."""
    return facts.threads * (stats.prefill_seconds + stats.decode_seconds)


def _experts(experts: ExpertStats, threads_seconds: float) -> str:
    share = experts.seconds_waited / threads_seconds if threads_seconds else 0.0
    guessed = f", {experts.guessed_right / experts.guessed:.0%} guessed" if experts.guessed else ""
    return (
        f"experts: {experts.uses:,} used, {experts.hit_rate:.1%} in memory{guessed};"
        f" read {experts.bytes_read / 1e6:,.0f} MB ({experts.bytes_wasted / 1e6:,.0f} in vain),"
        f" threads waited {share:.0%} of their time"
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def as_json(stats: GenerationStats, facts: RunFacts) -> dict[str, Any]:
    """The same for programs; times in seconds, rates in tokens a second, memory in bytes.

    `seconds_waited` of the experts is added up over the `threads`.
    """
    body = {**asdict(stats), "saturations": dict(stats.saturations)}
    counts = {"read_tokens": stats.read_tokens, "decode_tokens": stats.decode_tokens}
    rates = {"prefill_rate": stats.prefill_rate, "decode_rate": stats.decode_rate}
    return {**body, **counts, **rates, **asdict(facts), "peak_memory_bytes": peak_memory_bytes()}


def check_writable(path: Path) -> None:
    """Refuse a report's path before the work rather than after it. Raises SettingError."""
    parent = path.absolute().parent
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise SettingError(f"{path} cannot be written")


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write a JSON file; whoever reads it meanwhile sees the old or the new one."""
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
        path.write_text(json.dumps(body, indent=1) + "\n", "utf-8")
        return
    with replacing(path) as work:
        work.write_text(json.dumps(body, indent=1) + "\n", "utf-8")
