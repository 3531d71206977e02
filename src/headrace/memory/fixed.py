"""Plans around a pool of the user's own size: the target follows from it."""

from __future__ import annotations

from headrace.memory.inputs import GB, gigabytes, ignored
from headrace.memory.ledger import Candidate, Plan, Refusal, at_least, at_most
from headrace.memory.sizing import BASE_WINDOW, Fit, Sizer, chunks, windows, with_margin


def fixed_pool(sizer: Sizer) -> Plan | Refusal:
    """The plan of --experts-per-layer or --pool-gb; auto takes the base window beside it."""
    facts, options, machine = sizer.facts, sizer.options, sizer.machine
    room = machine.budget_bytes
    if not facts.num_slots:
        return Refusal(
            f"{options.source} sizes a pool of experts, and this model has none",
            "leave it out; --memory-gb bounds the whole process",
            sizer.needed(sizer.least_window),
            room,
        )
    asked = _asked_slots(sizer)
    if asked < facts.top_k or (options.experts_per_layer or 0) > facts.num_experts:
        return _impossible(sizer, asked)
    pool = min(asked, facts.num_slots)
    lookahead = 0 if pool == facts.num_slots else sizer.reserve
    wanted = options.max_context
    window = wanted if isinstance(wanted, int) else min(BASE_WINDOW, facts.context)
    looked_at = _candidates(sizer, window, pool, lookahead)
    if options.source == "pool_gb" and asked * facts.expert_slot_bytes > machine.capacity_bytes:
        least = sizer.rest(window, chunks(window)[-1]) + asked * facts.expert_slot_bytes
        return _too_large(sizer, window, asked, least, looked_at)
    for rows in _passes(sizer, window, pool):
        fit = Fit(window, rows, pool, lookahead)
        committed = sizer.ledger(0, fit).committed
        if committed <= room:
            return sizer.plan(with_margin(committed), fit, looked_at, *ignored(sizer.options))
    return _too_large(sizer, window, pool, committed, looked_at)


def _passes(sizer: Sizer, window: int, pool: int) -> tuple[int, ...]:
    """Rows of a pass to try, most first: longer ones only where experts are read and the pool is large enough."""
    if pool == sizer.facts.num_slots:
        return chunks(window)
    longer = (rows for rows, least in sizer.long_passes(window) if pool + sizer.reserve >= least)
    return (*sorted(longer, reverse=True), *chunks(window))


def _asked_slots(sizer: Sizer) -> int:
    facts, options = sizer.facts, sizer.options
    if options.experts_per_layer is not None:
        return options.experts_per_layer * facts.num_moe_layers
    assert options.pool_gb is not None
    return gigabytes("pool_gb", options.pool_gb) // facts.expert_slot_bytes


def _candidates(sizer: Sizer, taken: int, pool: int, lookahead: int) -> tuple[Candidate, ...]:
    room, asked, out = sizer.machine.budget_bytes, sizer.options.max_context, []
    for window in sorted({*windows(sizer.facts.context), taken}):
        fit = Fit(window, chunks(window)[-1], pool, lookahead)
        needed = sizer.ledger(0, fit).committed
        fits = needed <= room
        if not fits:
            reason = f"needs {at_least(needed)} GB, there are {at_most(room)}"
        elif window != taken:
            reason = "fits; take it with --max-context"
        else:
            reason = "taken: " + ("the base" if asked == "auto" else "it was asked for")
        out.append(
            Candidate(window, needed, pool if fits else None, fits and window == taken, reason)
        )
    return tuple(out)


def _impossible(sizer: Sizer, asked: int) -> Refusal:
    """Fewer experts than one token uses, or more than a layer has."""
    facts, slot = sizer.facts, sizer.facts.expert_slot_bytes
    if sizer.options.experts_per_layer is not None:
        least = -(-facts.top_k // facts.num_moe_layers)
        nearest = least if asked < facts.top_k else facts.num_experts
        hint = f"the nearest that fits is --experts-per-layer {nearest}"
    else:
        hint = f"the nearest that fits is --pool-gb {facts.top_k * slot / GB:.9f}"
    return Refusal(
        f"a pool of {asked:,} experts is not possible: a token uses {facts.top_k} at once,"
        f" and there are {facts.num_experts} in each of {facts.num_moe_layers} layers",
        hint,
        facts.top_k * slot,
        asked * slot,
    )


def _too_large(
    sizer: Sizer, window: int, pool: int, committed: int, looked_at: tuple[Candidate, ...]
) -> Refusal:
    """The pool does not fit the machine: name the largest that does."""
    facts, room = sizer.facts, sizer.machine.budget_bytes
    slot = facts.expert_slot_bytes
    slots = (room - sizer.rest(window, chunks(window)[-1])) // slot - sizer.reserve
    slots = min(slots, facts.num_slots)
    per_layer = slots // facts.num_moe_layers
    by_layer = sizer.options.experts_per_layer is not None
    if slots < facts.top_k or (by_layer and per_layer * facts.num_moe_layers < facts.top_k):
        hint = "no pool fits beside this context; a smaller --max-context takes less"
    elif by_layer:
        hint = f"the nearest that fits is --experts-per-layer {per_layer}"
    else:
        hint = f"the nearest that fits is --pool-gb {slots * slot / GB:.9f}"
    return Refusal(
        f"a pool of {pool:,} experts makes {at_least(committed)} GB in all;"
        f" {at_most(room)} GB can be had now",
        hint,
        committed,
        room,
        looked_at,
    )
