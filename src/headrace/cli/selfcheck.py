"""`headrace selfcheck`: every kernel tier of this machine against the definition.

Painted models, dense ones and mixtures, run on every tier and are compared byte for byte with the reference; then a
short real generation on the default model, where it is installed. One digest covers it all.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headrace import locate
from headrace.cli import painted, painted_mixture
from headrace.cli.whole import WHOLE
from headrace.errors import HeadraceError
from headrace.kernels import select
from headrace.llm import DEFAULT_MODEL, LLM

REFERENCE = "reference"
QUESTION = "Name three rivers."
NEW_TOKENS = 12


class MismatchError(HeadraceError):
    """A tier computed other bits than the definition."""

    code = "mismatch"


def selfcheck(*, kernels: str | None = None, threads: Annotated[int | None, WHOLE] = None) -> int:
    """Check that every kernel tier computes the same bits, and print one digest.

    Small dense models and mixtures run on every tier and must equal the definition; a mixture runs with all
    experts in memory and with a small pool that reads them from a temporary file. The digest is the same on
    every machine that has the default model, and on every one that has not.

    Parameters
    ----------
    kernels
        Check this tier only, against the reference; auto is the best one here.
    threads
        Threads of the kernels; 3 if not given, whatever the machine has.
    """
    threads = 3 if threads is None else threads
    chosen = select.select(kernels or REFERENCE, threads=threads)
    tiers = _tiers(chosen.name if kernels else None)
    digest = hashlib.sha256()
    for part in (*_painted(tiers, threads), *_mixtures(tiers, threads)):
        digest.update(part)
    for part in _real(tiers, threads):
        digest.update(part)
    print(f"digest {digest.hexdigest()[:32]}")
    return 0


def _tiers(wanted: str | None) -> list[str]:
    """The tiers that can run here, or the wanted one; every other is reported by name."""
    found = []
    for name, reason in select.unavailable().items():
        if name == wanted or (wanted is None and not reason):
            found.append(name)
        else:
            print(f"{name}: skipped ({reason or 'not asked for'})")
    return found


def _painted(tiers: Sequence[str], threads: int) -> list[bytes]:
    """The definition's outcome of every case, once every tier agrees with it."""
    start = time.perf_counter()
    programs = {case.name: painted.paint(case).program for case in painted.CASES}
    right = {name: painted.outcome(p, select.select(REFERENCE)) for name, p in programs.items()}
    print(
        f"{REFERENCE}: computed {len(right)} painted models ({time.perf_counter() - start:.2f} s)",
        flush=True,
    )
    for tier in (t for t in tiers if t != REFERENCE):
        start = time.perf_counter()
        for count in {1, threads}:
            backend = select.select(tier, threads=count)
            for name, program in programs.items():
                _compare(
                    f"{tier} with {count} threads, {name}",
                    right[name],
                    painted.outcome(program, backend),
                )
        print(f"{tier}: {len(programs)} painted models equal ({time.perf_counter() - start:.2f} s)")
    return [part for outcome in right.values() for part in outcome.parts]


def _mixtures(tiers: Sequence[str], threads: int) -> list[bytes]:
    """As `_painted`, for mixtures: every tier with every pool equals the definition with all experts in memory."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        models = {
            case.name: painted_mixture.paint(case, Path(folder) / f"{number}.experts")
            for number, case in enumerate(painted.MIXTURES)
        }
        definition, resident = select.select(REFERENCE), painted_mixture.POOLS[0]
        right = {name: m.outcome(definition, resident) for name, m in models.items()}
        print(
            f"{REFERENCE}: computed {len(right)} painted mixtures ({time.perf_counter() - start:.2f} s)",
            flush=True,
        )
        for tier in (t for t in tiers if t != REFERENCE):
            start = time.perf_counter()
            for count, pool in itertools.product({1, threads}, painted_mixture.POOLS):
                backend = select.select(tier, threads=count)
                for name, model in models.items():
                    what = f"{tier} with {count} threads, {name}, {pool.name}"
                    _compare(what, right[name], model.outcome(backend, pool))
            seconds = time.perf_counter() - start
            print(f"{tier}: {len(models)} painted mixtures equal ({seconds:.2f} s)")
    return [part for outcome in right.values() for part in outcome.parts]


def _compare(what: str, right: painted.Outcome, ours: painted.Outcome) -> None:
    for name in ("logits", "cache", "clipped"):
        if getattr(ours, name) != getattr(right, name):
            raise MismatchError(
                f"{what}: {name} differ from the definition",
                hint="this build must not be used; HEADRACE_KERNELS=portable may be right",
            )


def _real(tiers: Sequence[str], threads: int) -> list[bytes]:
    """The fingerprint of a short greedy answer, equal on every native tier."""
    path = locate.installed(DEFAULT_MODEL)
    if path is None:
        print(
            f"real generation: skipped ({DEFAULT_MODEL} is not installed: headrace pull {DEFAULT_MODEL})"
        )
        return []
    found = {t: _generation(path, t, threads) for t in tiers if t != REFERENCE}
    if REFERENCE in tiers:
        print(f"real generation, {REFERENCE}: skipped (it takes minutes)")
    for tier, fingerprint in found.items():
        print(f"real generation, {tier}: {fingerprint}")
    if len(set(found.values())) > 1:
        raise MismatchError(f"{DEFAULT_MODEL}: the tiers' generations differ")
    return [fingerprint.encode() for fingerprint in sorted(set(found.values()))]


def _generation(path: Path, tier: str, threads: int) -> str:
    with LLM(path, kernels=tier, threads=threads, max_context=256) as llm:
        done = llm.generate(QUESTION, temperature=0.0, max_tokens=NEW_TOKENS)
        return f"{done.stats.fingerprint} {len(done.tokens)} tokens"
