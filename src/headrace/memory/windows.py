"""Which context window a plan takes, and why each other one was not taken."""

from __future__ import annotations

from headrace.memory.ledger import Candidate, at_least, at_most
from headrace.memory.sizing import (
    BASE_WINDOW,
    MIN_WINDOW,
    SWEEP_ROWS,
    WINDOW_STEP,
    Fit,
    Sizer,
    chunks,
    windows,
)


def choose(sizer: Sizer, target: int) -> Fit | None:
    """The asked window, or the one that the order of plan.py's head gives; None where nothing fits."""
    wanted, context = sizer.options.max_context, sizer.facts.context
    if isinstance(wanted, int):
        return sizer.fit(target, wanted)
    base = min(BASE_WINDOW, context)
    fit = sizer.fit(target, base)
    if fit is None or fit.rows < min(SWEEP_ROWS, chunks(base)[0]):
        return _below_base(sizer, target, base)
    if fit.pool == sizer.facts.num_slots:
        larger = (sizer.fit(target, w) for w in windows(context) if w > base)
        whole = [f for f in larger if f and (f.pool, f.rows) == (fit.pool, fit.rows)]
        return whole[-1] if whole else fit
    return fit


def _below_base(sizer: Sizer, target: int, base: int) -> Fit | None:
    """As much context as fits beside the smallest pool, in steps so small that little lies idle."""
    low, high = 0, max(0, base - 1) // WINDOW_STEP
    while low < high:
        middle = (low + high + 1) // 2
        fit = sizer.fit(target, middle * WINDOW_STEP, grow=False)
        enough = fit is not None and fit.rows >= SWEEP_ROWS
        low, high = (middle, high) if enough else (low, middle - 1)
    return sizer.fit(target, max(low * WINDOW_STEP, min(MIN_WINDOW, base)), grow=False)


def candidates(sizer: Sizer, target: int, chosen: Fit | None) -> tuple[Candidate, ...]:
    """Every window that was looked at, smallest first; `chosen` is the one that was taken."""
    out = []
    looked_at = {*windows(sizer.facts.context), *([chosen.window] if chosen else [])}
    for window in sorted(looked_at):
        taken = chosen is not None and window == chosen.window
        fit = chosen if taken else sizer.fit(target, window)
        pool = None if fit is None else fit.pool
        reason = _reason(sizer, target, window, fit, chosen)
        out.append(Candidate(window, sizer.needed(window), pool, taken, reason))
    return tuple(out)


def _reason(sizer: Sizer, target: int, window: int, fit: Fit | None, chosen: Fit | None) -> str:
    asked = sizer.options.max_context != "auto"
    if chosen is not None and window == chosen.window:
        return "taken: it was asked for" if asked else _why_taken(sizer, chosen)
    if fit is None:
        return f"needs {at_least(sizer.needed(window))} GB, there are {at_most(target)}"
    if asked:
        return "fits, but another one was asked for"
    if chosen is None:
        return "fits what can be had now"
    if window < chosen.window:
        return "smaller than the one taken"
    if fit.pool < chosen.pool:
        return f"would leave {fit.pool:,} experts in memory, not {chosen.pool:,}"
    if fit.rows < chosen.rows:
        return f"would leave passes of {fit.rows} rows, not {chosen.rows}"
    return "experts come before more context, and not all of them are in memory"


def _why_taken(sizer: Sizer, chosen: Fit) -> str:
    if chosen.window == sizer.facts.context:
        return "taken: the model's own context"
    if chosen.window < BASE_WINDOW:
        return "taken: the largest that fits beside the smallest pool"
    if chosen.pool < sizer.facts.num_slots:
        return "taken: the base; what is left holds experts"
    return "taken: the largest that keeps everything in memory"
