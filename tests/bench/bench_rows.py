"""Rows of an invented run, for the tests of what is made of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.rows import Row, Run

MACHINE: dict[str, Any] = {
    "cpu": "Test processor",
    "flags": ["avx2"],
    "cores": 2,
    "l3_bytes": 32 << 20,
    "memory_bytes": 8 << 30,
    "system": "Linux 6.1",
    "architecture": "x86_64",
    "python": "3.11.7",
    "load_average": 0.05,
}
DECODE = ("decode at 16", "decode at 1,000")
RATES = {
    "headrace": 3.0,
    "llama.cpp (AMX) Q4_1": 1.5,
    "llama.cpp (AVX2) Q4_1": 1.0,
    "llama.cpp (AMX) Q4_0": 2.0,
}


def run(date: str = "2026-01-02T03:04:05+00:00") -> Run:
    return Run(date, "python -m bench speed", "0123456789ab", MACHINE)


def row(kind: str, measure: str, system: str = "headrace", **changed: Any) -> Row:
    values = {"threads": 1, "unit": "tok/s", "samples": (1.0, 3.0, 2.0), "run": run(), **changed}
    return Row(kind=kind, measure=measure, system=system, **values)


def every_kind() -> Iterator[Row]:
    """At least one row of each kind; headrace decodes 300 tok/s and reads 1 MB a token."""
    facts: dict[str, Any] = {
        "settings": {"weight_bytes": 1_000_000, "kv_bytes_per_token": 0},
        "versions": {"v": "1"},
    }
    for threads in (1, 2):
        for system, rate in RATES.items():
            for measure in ("prefill 512", *DECODE):
                samples = (100 * rate * threads,)
                yield row("speed", measure, system, threads=threads, samples=samples, **facts)
        for measure, size in (("read weights", 1_000_000), ("read memory", 1 << 30)):
            settings = {"buffer_bytes": size}
            samples = (0.5 * threads,)
            yield row(
                "bandwidth",
                measure,
                "memory",
                threads=threads,
                unit="GB/s",
                samples=samples,
                settings=settings,
            )
        yield from _profile(threads)
    peak: dict[str, Any] = {"settings": {"peak_bytes": 5_000_000}, "unit": "s"}
    yield row("load", "start to first token", samples=(0.5,), **peak)
    yield row("load", "conversion", threads=0, samples=(6.0,), **peak)
    yield from _quality()
    yield from stream_rows()


def _profile(threads: int) -> Iterator[Row]:
    for context in (16, 1000):
        base: dict[str, Any] = {"threads": threads, "unit": "share"}
        for sampled, share in ((False, 0.04), (True, 0.3)):
            settings = {"context": context, "sampled": sampled, "step_seconds": 0.01}
            yield row("profile", "Python's share", samples=(share,), settings=settings, **base)
        for name, seconds, size in (("Attend", 0.001, 0), ("Project head", 0.002, 30_000_000)):
            settings = {"context": context, "rows": 1, "bytes": size}
            measure = f"operation {name}"
            yield row(
                "profile", measure, samples=(seconds,), settings=settings, **{**base, "unit": "s"}
            )


def _quality() -> Iterator[Row]:
    systems = {
        "float32": (0.0, 3.5),
        "headrace": (0.0045, 3.51),
        "llama.cpp (AMX) Q4_1": (0.0036, 3.505),
    }
    for system, (kl, loss) in systems.items():
        shared: dict[str, Any] = {"threads": 0, "settings": {"windows": "abcd"}, "unit": "nats"}
        yield row("quality", "KL to float32", system, samples=(kl, kl), **shared)
        yield row("quality", "loss", system, samples=(loss, loss), **shared)
        yield row("quality", "top-1 equal", system, samples=(0.95, 0.97), **shared)


def stream_rows() -> Iterator[Row]:
    """headrace decodes 6 tok/s of a model of 100 experts, 25 of which have slots; AirLLM is killed."""
    for lanes, rate in ((1, 800.0), (4, 1000.0)):
        yield row("stream", "raw reads", "disk", threads=lanes, unit="MB/s", samples=(rate,))
    counters = {"uses": 100, "reads": 60, "guessed": 50, "guessed_right": 40}
    counters |= {"bytes_read": 1600e6, "bytes_wasted": 100e6, "seconds_waited": 0.83333}
    counters |= {"storage_bytes": 1600e6}
    known: dict[str, Any] = {
        "model_bytes": 4_000_000_000, "limit_bytes": 1_000_000_000, "experts": 100, "pool_slots": 20,
        "lookahead_slots": 5, "expert_bytes": 2_000_000, "uses_per_token": 100, "tokens": 10,
        "seconds": 10 / 6, "peak_bytes": 900_000_000, "resident_peak_bytes": 800_000_000, "killed": 0,
        "error": "", "counters": counters,
    }  # fmt: skip
    rates = {"headrace": (100.0, 6.0), "llama.cpp": (20.0, 0.2)}
    for system, (prefill, decode) in rates.items():
        for measure, rate in (("prefill 512", prefill), ("decode 256 tokens", decode)):
            cut = measure.startswith("decode") and system != "headrace"
            asked = {**known, "asked_tokens": 256 if cut else 10}
            yield row("stream", measure, system, threads=2, samples=(rate,), settings=asked)
    dead = {**known, "error": "ended with -9", "killed": 1, "tokens": 0, "counters": {}}
    yield row("stream", "decode 256 tokens", "AirLLM", threads=2, samples=(0.0,), settings=dead)
    for system, rate in (("headrace", 30.0), ("llama.cpp", 25.0)):
        yield row("stream", "resident decode", system, threads=2, samples=(rate,))
    planned = {"settings": known, "threads": 2}
    for name, rate in (("as planned", 6.0), ("no lookahead", 4.0), ("pool of 50%", 9.0)):
        yield row("ablation", "decode 128 tokens", name, samples=(rate,), **planned)
    for slots in (10, 50):
        for policy, share in (("LRU", 0.3), ("Belady", 0.5)):
            settings = {"slots": slots, "experts": 100, "steps": 1000}
            yield row("routes", "hit rate", policy, threads=0, samples=(share,), settings=settings)
    asked = {
        "set": "Some schemas",
        "schemas": 10,
        "compiled": 8,
        "refused": {"not": 2},
        "tokens": 500,
    }
    for measure in ("compile", "mask of a token"):
        yield row("constrain", measure, unit="s", samples=tuple(i / 1e5 for i in range(101)), settings=asked)  # fmt: skip
    cost = {"sampled": False, "tokens": 100, "forced": 20, "spans": 7, "microseconds": 80.0, "rate": 90.0, "free_rate": 80.0}  # fmt: skip
    yield row("constrain", "share of the decode time", unit="share", samples=(0.01,), settings=cost)
    for mode, rate in (("off", 100.0), ("auto", 150.0), (4, 90.0)):
        drafts = {"speculate": mode, "sampled": False, "tokens": 200, "drafted": 80 * (mode != "off"), "accepted": 60}  # fmt: skip
        yield row("speculate", "code editing", samples=(rate,), settings=drafts)
    yield from sequence_rows()


def sequence_rows() -> Iterator[Row]:
    """What sequences do besides: adapters, drafts, reuse, company."""
    for name, kl in (
        ("KL without", 0.01),
        ("KL under the adapter", 0.011),
        ("KL of the adapter", 0.4),
    ):
        yield row("adapters", name, threads=0, samples=(kl,), settings={"top1": [0.95]})
    for name, seconds in (("reload to the first token", 0.2), ("a token without", 0.005),
                          ("set another adapter", 2e-6)):  # fmt: skip
        yield row("adapters", name, samples=(seconds,))
    for draft, mode in (("lookup", "off"), ("lookup", 1), ("mtp", 1), ("model", "auto")):
        drafts = {"draft": draft, "speculate": mode, "sampled": False, "tokens": 200, "drafted": 80 * (mode != "off"), "accepted": 60}  # fmt: skip
        yield row("drafters", "chat", samples=(50.0,), settings=drafts)
    for mode, read in (("exact", 900), ("aligned", 2400), ("cold", 6000)):
        facts = {"mode": mode, "requests": 9, "prompt_tokens": 6000, "read_tokens": read, "pass_rows": 512}  # fmt: skip
        yield row("reuse", "a coding agent", unit="s", samples=(read / 1e4,), settings=facts)
    for system, gain in (("headrace", 4.0), ("llama.cpp", 3.0)):
        for size in (1, 4):
            rate = 100.0 * (gain if size > 1 else 1.0)
            yield row("batch", "decode", system, samples=(rate,), settings={"sequences": size})
    for system, gain in (("headrace", 1.5), ("llama.cpp server Q4_0", 1.0)):
        for clients in (1, 8):
            known = {"clients": clients, "slots": 8, "max_tokens": 64}
            for measure, unit in (("requests", "1/s"), ("tokens", "tok/s"), ("first text", "ms")):
                yield row("serve", measure, system, unit=unit, samples=(gain * clients,), settings=known)  # fmt: skip
    known = {"clients": 8, "slots": 8, "max_tokens": 64}
    yield row("serve", "cost of a token", unit="ms", samples=(0.25,), settings=known)
