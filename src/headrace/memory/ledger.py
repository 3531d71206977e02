"""What a plan says: the ledger in bytes, the windows that were considered, and the refusal in its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NoReturn

from headrace.errors import MemoryBudgetError, UnsupportedError
from headrace.kernels.program import LOGIT_ROWS, LOGIT_ROWS_EACH
from headrace.memory.inputs import GB


@dataclass(frozen=True)
class Ledger:
    """Where every byte of the budget goes. `lookahead` (with the sweep) and `pool` are slots of experts."""

    base: int
    dense: int
    kv: int
    workspace: int
    retained: int
    lookahead: int
    pool: int
    headroom: int

    @property
    def total(self) -> int:
        return sum(self.rows().values())

    @property
    def committed(self) -> int:
        """What may really be used: all but the headroom."""
        return self.total - self.headroom

    def rows(self) -> Mapping[str, int]:
        """Bytes by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Candidate:
    """A context window that was considered, and why it was taken or not.

    pool_slots: what the pool would be; None where the window does not fit. needed_bytes: the
    smallest budget for it.
    """

    window: int
    needed_bytes: int
    pool_slots: int | None
    taken: bool
    reason: str


@dataclass(frozen=True)
class Plan:
    """One way to run a model on a machine: the same value for `doctor`, which shows it, and for loading.

    pool_slots hold experts of all layers, lookahead_slots forecasts, sweep_slots those that a prefill passes through.
    source: the option that decided. adaptive: whether a governor may resize the pool below pool_slots.
    limit_bytes: the ceiling that the user set for it, if any. num_sequences: windows that may be full at a time, beside
    the retained_contexts of prefixes alone.
    """

    target_bytes: int
    source: str
    adaptive: bool
    ledger: Ledger
    window: int
    chunk_rows: int
    pool_slots: int
    min_pool_slots: int
    lookahead_slots: int
    sweep_slots: int
    slot_bytes: int
    num_experts: int  # of all layers
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    limit_bytes: int | None = None
    simulated: bool = False
    num_sequences: int = 1
    retained_contexts: int = 0

    @property
    def logit_rows(self) -> int:
        """Rows of a pass that may want logits."""
        return LOGIT_ROWS + LOGIT_ROWS_EACH * (self.num_sequences - 1)

    @property
    def resident(self) -> bool:
        """Whether the whole model is in memory once it has been read."""
        return self.pool_slots == self.num_experts

    def for_loading(self) -> Plan:
        """This plan, to load a model by. Raises UnsupportedError for a simulated machine's."""
        if self.simulated:
            raise UnsupportedError(
                "this plan is for a simulated machine and can load no model",
                hint="plan for the machine itself",
            )
        return self


@dataclass(frozen=True)
class Refusal:
    """Why there is no plan: what the least would need and what there is, in bytes."""

    message: str
    hint: str
    needed_bytes: int
    budget_bytes: int
    candidates: tuple[Candidate, ...] = ()

    def error(self) -> MemoryBudgetError:
        return MemoryBudgetError(self.message, self.needed_bytes, self.budget_bytes, hint=self.hint)

    def for_loading(self) -> NoReturn:
        """Raises MemoryBudgetError: nothing is loaded without a plan."""
        raise self.error()


def at_least(nbytes: int) -> str:
    """Bytes as GB, rounded up: a budget that is really enough."""
    return f"{-(-nbytes // (GB // 100)) / 100:.2f}"


def at_most(nbytes: int) -> str:
    """Bytes as GB, rounded down: a budget that there really is."""
    return f"{max(0, nbytes) // (GB // 100) / 100:.2f}"
