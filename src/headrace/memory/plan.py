"""Plans memory: a pure function of a machine, a model's facts and a user's options.

What grows first when there is more: rows of a prefill pass, the context up to the base window, the pool of
experts up to all of them, the context up to the model's own. So a larger budget never takes experts away
for context.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.memory.fixed import fixed_pool
from headrace.memory.inputs import (
    DEFAULT_RAM_PERCENT,
    GB,
    ModelFacts,
    PlanOptions,
    gigabytes,
    ignored,
)
from headrace.memory.ledger import Plan, Refusal, at_least, at_most
from headrace.memory.machine import Machine
from headrace.memory.sizing import Fit, Sizer, margin, with_margin
from headrace.memory.windows import candidates, choose

PAGE = 1 << 16  # the largest that a control group's limit is rounded down to


def plan(machine: Machine, facts: ModelFacts, options: PlanOptions) -> Plan | Refusal:
    """The plan, or why there is none with the nearest thing that fits."""
    sizer = Sizer(machine, facts, options)
    if sizer.least_window > facts.context:
        return Refusal(
            f"max_context is {sizer.least_window}, the model's own context is {facts.context}",
            f"the nearest that fits is --max-context {facts.context}",
            sizer.needed(sizer.least_window),
            machine.budget_bytes,
        )
    if options.source in ("experts_per_layer", "pool_gb"):
        return fixed_pool(sizer)
    return _budgeted(sizer)


def target_bytes(machine: Machine, options: PlanOptions) -> int:
    """The budget that options and machine give; the user's own is taken as it is."""
    if options.memory_gb is not None:
        return gigabytes("memory_gb", options.memory_gb)
    slack = machine.capacity_bytes // 20  # for what others will need a moment later
    bounds = [machine.budget_bytes - slack]
    percent = options.max_ram_percent
    if options.memory_limit_gb is not None:
        bounds.append(gigabytes("memory_limit_gb", options.memory_limit_gb))
    elif percent is None:
        percent = DEFAULT_RAM_PERCENT
    if percent is not None:
        bounds.append(int(machine.capacity_bytes * percent / 100))
    return max(0, min(bounds))


def _budgeted(sizer: Sizer) -> Plan | Refusal:
    """A plan inside a target: the user's, or one that is chosen here."""
    options, target = sizer.options, target_bytes(sizer.machine, sizer.options)
    fit = choose(sizer, target)
    if fit is None:
        return _too_small(sizer, target)
    room = sizer.machine.budget_bytes
    if target >= sizer.machine.capacity_bytes + PAGE:
        return _beyond(sizer, target, sizer.ledger(target, fit).committed)
    fit = _within_room(sizer, fit, room, sizer.ledger(target, fit).committed)
    committed = sizer.ledger(target, fit).committed
    if committed > room:
        return _not_available(sizer, target, committed)
    looked_at = candidates(sizer, min(target, room), fit)
    if options.memory_gb is not None:
        notes = [*ignored(options), *_unneeded(target, committed)]
        return sizer.plan(target, fit, looked_at, *notes)
    if fit.pool == sizer.facts.num_slots:
        target = min(target, with_margin(committed))  # no more than the model can use
    limit = options.memory_limit_gb
    ceiling = None if limit is None else gigabytes("memory_limit_gb", limit)
    return replace(sizer.plan(target, fit, looked_at), limit_bytes=ceiling)


def _within_room(sizer: Sizer, fit: Fit, room: int, committed: int) -> Fit:
    """An automatic window gives way to what the machine has now, the pool of a fixed budget does not."""
    if committed <= room or sizer.options.max_context != "auto":
        return fit
    smaller = choose(sizer, room)
    return smaller if smaller is not None and smaller.pool == fit.pool else fit


def _unneeded(target: int, committed: int) -> list[str]:
    idle = target - committed
    return [f"{at_most(idle)} GB of the budget are not needed"] if idle > 2 * margin(target) else []


def _too_small(sizer: Sizer, target: int) -> Refusal:
    """Nothing fits the target: name the least budget, and the window that would fit it."""
    asked, room = sizer.options.max_context, sizer.machine.budget_bytes
    needed = sizer.needed(sizer.least_window)
    if needed > room:
        hint = f"this machine has {at_most(room)} GB for it now"
    elif sizer.options.memory_gb is not None:
        hint = f"the nearest that fits is --memory-gb {at_least(needed)}"
    else:
        hint = f"give --memory-gb {at_least(needed)} to take more than auto would"
    if (largest := sizer.largest_window(target)) is not None:
        hint += f"; --max-context {largest} fits as it is"
    what = "the model" if asked == "auto" else f"a context of {asked}"
    return Refusal(
        f"{what} needs at least {at_least(needed)} GB; {_called(sizer)} {at_most(target)} GB",
        hint,
        needed,
        target,
        candidates(sizer, target, None),
    )


def _called(sizer: Sizer) -> str:
    """What a target is, as the start of a clause about its size."""
    if sizer.options.memory_gb is not None:
        return "the budget is"
    return "the limit and free memory allow" if sizer.options.memory_limit_gb else "auto may use"


def _beyond(sizer: Sizer, target: int, committed: int) -> Refusal:
    """A budget that the machine has not even when nothing else runs."""
    machine = sizer.machine
    return Refusal(
        f"a budget of {at_most(target)} GB is more than this machine has:"
        f" {at_most(machine.capacity_bytes)} GB{_of_a_group(machine)}",
        _nearest(sizer),
        committed,
        machine.capacity_bytes,
        candidates(sizer, machine.budget_bytes, None),
    )


def _of_a_group(machine: Machine) -> str:
    """Which control group's limit the capacity is, if one's."""
    found = [x.source for x in machine.limits if x.limit_bytes == machine.capacity_bytes]
    return f" by the limit of {found[0]}" if found else ""


def _nearest(sizer: Sizer) -> str:
    """The largest budget that can be had now, or why there is none."""
    machine = sizer.machine
    room = machine.budget_bytes // (GB // 100) * (GB // 100)
    if choose(sizer, room) is not None:
        return f"the nearest that fits is --memory-gb {at_most(room)}"
    least, group = sizer.needed(sizer.least_window), machine.tightest
    needed = f"at least {at_least(least)} GB are needed"
    if group is None:
        return f"{needed}: close other programs"
    if group.limit_bytes < least:
        return f"{needed}: raise the limit of {group.source}, {at_most(group.limit_bytes)} GB"
    return f"{needed}: end other programs of {group.source}, or raise its limit"


def _not_available(sizer: Sizer, target: int, committed: int) -> Refusal:
    """A budget that the machine does not have now."""
    room = sizer.machine.budget_bytes
    return Refusal(
        f"a budget of {at_most(target)} GB would use {at_least(committed)} GB;"
        f" {at_most(room)} GB can be had now",
        _nearest(sizer),
        committed,
        room,
        candidates(sizer, room, None),
    )
