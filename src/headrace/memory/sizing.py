"""The sums of a plan: what a window, a pass and a pool take, and what fits a target. Whole bytes only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.kernels.program import PAGE_TOKENS
from headrace.memory.inputs import GB, ModelFacts, PlanOptions
from headrace.memory.ledger import Candidate, Ledger, Plan
from headrace.memory.machine import Machine

# Interpreter, libraries and heap, about twice what a bare `run` of a small model takes.
BASE_BYTES = 80_000_000
BASE_WINDOW = 8192
MIN_WINDOW = 512
WINDOW_STEP = 256  # of windows below the base
CHUNKS = (512, 256, 128, 64, 32, 16)  # rows of a prefill pass
LONG_CHUNKS = (1024, 2048)  # where experts are read in each pass
LONG_PERCENT = 3  # of the pool that such a pass may cost
SWEEP_ROWS = 256  # a pass of this size reads experts once for many tokens: kept before context
LOOKAHEAD_SPARE = 2  # forecasts beyond top_k, so that one wrong guess evicts no right one
SWEEP_BYTES = 16_000_000  # through which a prefill sweeps: what a disk reads while a layer attends


def margin(target: int) -> int:
    """The headroom that a plan leaves where it can: a sixteenth of the target, at most 1 GB."""
    return min(target // 16, GB)


def least_margin(target: int) -> int:
    """The headroom that is always left; near the smallest budgets the rest of the margin is used."""
    return margin(target) // 4


def with_margin(committed: int) -> int:
    """A target that leaves its margin beside what is committed."""
    return committed + min(committed // 15 + 1, GB)


def chunks(window: int) -> tuple[int, ...]:
    """Rows of a pass that a window allows, most first."""
    return tuple(rows for rows in CHUNKS if rows <= window) or (window,)


def windows(context: int) -> Iterator[int]:
    """The windows that auto considers for a model, smallest first; its own context is the last."""
    window = MIN_WINDOW
    while window < context:
        yield window
        window *= 2
    yield context


def sweep_slots(facts: ModelFacts) -> int:
    """Slots of a prefill's sweep: one is read while another is computed, and as many as keep a disk busy."""
    if not facts.num_slots:
        return 0
    return min(2 * facts.num_experts, max(2, SWEEP_BYTES // facts.expert_slot_bytes))


@dataclass(frozen=True)
class Fit:
    """A window inside a target: rows of a pass, slots of the pool and of the lookahead."""

    window: int
    rows: int
    pool: int
    lookahead: int


class Sizer:
    """The sums for one machine, model and set of options; holds nothing that changes."""

    def __init__(self, machine: Machine, facts: ModelFacts, options: PlanOptions) -> None:
        self.machine = machine
        self.facts = facts
        self.options = options
        self.base = max(BASE_BYTES, machine.held_bytes) + facts.text_bytes
        self.reserve = facts.top_k + LOOKAHEAD_SPARE if facts.num_slots else 0
        self.sweep = sweep_slots(facts)
        self.min_slots = min(facts.num_slots, facts.top_k + self.reserve)

    @property
    def least_window(self) -> int:
        """The asked window, or the smallest that auto takes."""
        asked = self.options.max_context
        return asked if isinstance(asked, int) else min(MIN_WINDOW, self.facts.context)

    def ledger(self, target: int, fit: Fit) -> Ledger:
        facts, slot = self.facts, self.facts.expert_slot_bytes
        window = -(-fit.window // PAGE_TOKENS) * PAGE_TOKENS * facts.kv_bytes_per_token
        sequences = self.options.parallel
        parts = {
            "base": self.base,
            "dense": facts.dense_bytes,
            "kv": window * sequences,
            "workspace": facts.workspace.nbytes(fit.rows, fit.window)
            + facts.workspace.beside(sequences - 1, fit.window),
            "retained": window * self.options.retained_contexts,
            "lookahead": (fit.lookahead + self.sweep) * slot,
            "pool": fit.pool * slot,
        }
        return Ledger(**parts, headroom=target - sum(parts.values()))

    def rest(self, window: int, rows: int) -> int:
        """Everything but slots and headroom."""
        return self.ledger(0, Fit(window, rows, 0, 0)).committed

    def split(self, slots: int) -> tuple[int, int]:
        """Slots as pool and lookahead: whoever holds every expert forecasts none."""
        if slots >= self.facts.num_slots:
            return self.facts.num_slots, 0
        return slots - self.reserve, self.reserve

    def fit(self, target: int, window: int, *, grow: bool = True) -> Fit | None:
        """The most rows, then the most slots, of a window in a target; without `grow` the least slots.

        Slots grow only beside the most rows (of CHUNKS), so that more memory never means fewer slots.
        """
        slot, allowed = self.facts.expert_slot_bytes, chunks(window)
        for rows in allowed:
            room = target - self.rest(window, rows)
            if room - least_margin(target) >= self.min_slots * slot:
                if grow and slot and rows == allowed[0]:
                    return self._grown(target, window)
                return Fit(window, rows, *self.split(self.min_slots))
        return None

    def _grown(self, target: int, window: int) -> Fit:
        """The most slots beside the most rows of CHUNKS, or beside a longer pass that costs the pool little.

        A pool that could nearly pay for a longer pass waits until it can, so that it never shrinks for one.
        """
        rows = chunks(window)[0]
        slots = max(self.min_slots, self._slots(target, window, rows))
        if slots < self.facts.num_slots:
            for longer, least in self.long_passes(window):
                beside = self._slots(target, window, longer)
                if beside < least:
                    slots = min(slots, least)
                    break
                rows, slots = longer, beside
        return Fit(window, rows, *self.split(slots))

    def _slots(self, target: int, window: int, rows: int) -> int:
        room = target - self.rest(window, rows) - margin(target)
        return max(0, room) // self.facts.expert_slot_bytes

    def long_passes(self, window: int) -> Iterator[tuple[int, int]]:
        """Passes longer than those of CHUNKS, shortest first, each with the least slots that it is worth it for.

        Every pass reads nearly all experts that are not in the pool, so twice the rows are half the reads.
        """
        usual = self.rest(window, chunks(window)[0])
        for rows in LONG_CHUNKS:
            if rows <= window:
                cost = self.rest(window, rows) - usual
                pool = -(-cost * 100 // (LONG_PERCENT * self.facts.expert_slot_bytes))
                yield rows, max(self.min_slots, self.reserve + pool)

    def needed(self, window: int) -> int:
        """The smallest target that a window fits."""
        least = self.rest(window, chunks(window)[-1])
        least += self.min_slots * self.facts.expert_slot_bytes
        low, high = least, least + GB  # the margin is never more
        while low < high:
            middle = (low + high) // 2
            enough = middle - least_margin(middle) >= least
            low, high = (low, middle) if enough else (middle + 1, high)
        return low

    def largest_window(self, target: int) -> int | None:
        """The largest window of a target beside the smallest pool; None where none fits."""
        low, high = 0, self.facts.context
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fit(target, middle) else (low, middle - 1)
        return low or None

    def plan(self, target: int, fit: Fit, candidates: tuple[Candidate, ...], *notes: str) -> Plan:
        """The plan of a fit in a target."""
        source = self.options.source
        return Plan(
            target_bytes=target,
            source=source,
            adaptive=source in ("auto", "memory_limit_gb") and fit.pool > 0,
            ledger=self.ledger(target, fit),
            window=fit.window,
            chunk_rows=fit.rows,
            pool_slots=fit.pool,
            min_pool_slots=min(fit.pool, self.facts.top_k),
            lookahead_slots=fit.lookahead,
            sweep_slots=self.sweep,
            slot_bytes=self.facts.expert_slot_bytes,
            num_experts=self.facts.num_slots,
            num_sequences=self.options.parallel,
            retained_contexts=self.options.retained_contexts,
            candidates=candidates,
            notes=notes,
            simulated=self.machine.simulated,
        )
